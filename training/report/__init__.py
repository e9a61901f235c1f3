"""The page about runs: `write_report(folders, "report.html")`."""

from __future__ import annotations

from . import words
from .comparison import Comparison, compare
from .page import page_model, write_report
from .runs import Run, read_run

__all__ = ["Comparison", "Run", "compare", "page_model", "read_run", "words", "write_report"]
