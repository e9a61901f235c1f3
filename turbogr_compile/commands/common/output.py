"""What a command prints, and the exit status it ends with."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


def show(options: argparse.Namespace, data: Any, text: str) -> None:
    """The text, or with --json the data."""
    sys.stdout.write((json.dumps(data, indent=1, default=str) if options.json else text).rstrip("\n") + "\n")
