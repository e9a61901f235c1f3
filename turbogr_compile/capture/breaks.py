"""Why Dynamo ended a graph before the end of the function, for the model's author."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

from .. import _torch
from ..graph.provenance import UserLine, is_library

_PART = re.compile(r"^\s*(Explanation|Hint): (.*)$", re.MULTILINE)
_USELESS = ("Please report an issue", "It may be possible to write Dynamo tracing rules")
_BRANCH = "generic_jump"  # Dynamo's word for a branch on the value of a tensor
COSTS = "what a graph hands to the next one keeps its padded rows"


@dataclass(frozen=True)
class GraphBreak:
    reason: str
    hint: str
    line: UserLine | None


def graph_break(module: fx.GraphModule) -> GraphBreak | None:
    """Of a graph that ends before its function does."""
    found = _torch.break_reason(module)
    if found is None:
        return None
    text, stack = found
    frames = [f for f in stack if not is_library(f.filename)] or stack
    last = frames[-1] if frames else None
    line = UserLine(last.filename, last.lineno or 0, (last.line or "").strip(), last.name) if last else None
    if text.startswith(_BRANCH):
        return GraphBreak(
            "a branch depends on the value of a tensor", "compute both sides and choose by torch.where", line
        )
    parts = _PART.findall(text)
    why = next((said for kind, said in parts if kind == "Explanation"), text.splitlines()[0] if text else "unknown")
    hints = [said for kind, said in parts if kind == "Hint" and not said.startswith(_USELESS)]
    return GraphBreak(why.rstrip("."), hints[0].rstrip(".") if hints else "move this line out of the step", line)
