"""Places where rows could have been left out and were not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Missed:
    """A place where rows could have been left out and were not."""

    node: fx.Node
    id: str
    text: str
    hint: str = ""
