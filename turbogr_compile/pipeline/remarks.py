"""What the compiler has to say about a graph: what it did, what it did not and why."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from enum import Enum

from ..graph.provenance import UserLine, is_library

CAPTURE = "capture"  # in the place of a pass: what is said before the first one


def warn(text: str) -> None:
    """A Python warning at the user's own line, the one that called into torch or turbogr."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"turbogr: {text}", stacklevel=level)


class RemarkKind(Enum):
    APPLIED = "applied"
    MISSED = "missed"  # an optimisation that did not apply, and why
    ANALYSIS = "analysis"
    FAILED = "failed"  # something of ours broke; the graph went on without it


@dataclass(frozen=True)
class Remark:
    """One sentence for the model's author, tied to a line of their code where there is one.

    `id` is a stable slug, so that documentation and tests can refer to the remark.
    """

    kind: RemarkKind
    id: str
    pass_name: str
    text: str
    line: UserLine | None = None
    node: str = ""
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.line.where}: " if self.line else ""
        hint = f"\n    → {self.hint}" if self.hint else ""
        return f"{where}{self.kind.value} [{self.id}] {self.text}{hint}"
