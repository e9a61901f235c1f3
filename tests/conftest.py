"""Tests find faults of the compiler itself; validation, which is on by default, would hide them behind a fallback."""

import os

os.environ.setdefault("TURBOGR_VERIFY", "fast")
os.environ.setdefault("TURBOGR_QUIET", "1")
