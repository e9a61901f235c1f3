"""`turbogr` and `python -m turbogr_compile`."""

from __future__ import annotations

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
