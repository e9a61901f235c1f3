"""Why a rule does not apply at a place, in words for the model's author."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.shapes import same_literal
from ..graph.text import target_text, type_text, value_text
from ..pipeline.context import Obstacle
from .pattern import literal_of


def _wanted_text(wanted: Any) -> str:
    if isinstance(wanted, fx.Node):
        return "a tensor" if wanted.op == "placeholder" else target_text(wanted)
    return value_text(wanted)


def _found_text(found: Any) -> str:
    if isinstance(found, fx.Node) and found.op == "call_function":
        return target_text(found)
    return f"input {value_text(found)}" if isinstance(found, fx.Node) else value_text(found)


def wrong_op(wanted: Any, found: Any, user: fx.Node | None) -> Obstacle:
    node = found if isinstance(found, fx.Node) and found.op == "call_function" else user
    return Obstacle(
        "op", f"wants {_wanted_text(wanted)}, found {_found_text(found)}", node.name if node is not None else "",
        "spell it as the rule does, or give the rule this spelling as a variant",
    )  # fmt: skip


def wrong_count(wanted: Any, found: Any, user: fx.Node) -> Obstacle:
    theirs = len(found) if isinstance(found, (list, tuple)) else 1
    return Obstacle("op", f"wants {len(wanted)} values, found {theirs}", user.name)


def not_shared(wanted: fx.Node, bound: fx.Node, found: fx.Node) -> Obstacle:
    what = f"`{wanted.name}`" if wanted.op == "placeholder" else target_text(wanted)
    return Obstacle(
        "op", f"wants %{bound.name} again for {what}, found %{found.name}", found.name,
        "use the same value in both places",
    )  # fmt: skip


def wrong_literal(wanted: Any, found: Any, user: fx.Node, bound: dict[str, Any]) -> Obstacle:
    for name, value in bound.items():
        if same_literal(value, literal_of(wanted)):
            return two_values(name, value, literal_of(found), user)
    return Obstacle(
        "literal", f"wants {value_text(literal_of(wanted))}, found {value_text(literal_of(found))}", user.name,
        "use the rule's value, or declare it a keyword-only parameter of the rule to accept any",
    )  # fmt: skip


def not_a_literal(name: str, wanted: type, found: Any, user: fx.Node) -> Obstacle:
    return Obstacle("literal", f"`{name}` must be a constant {wanted.__name__}, found {value_text(found)}", user.name)


def two_values(name: str, first: Any, second: Any, user: fx.Node) -> Obstacle:
    return Obstacle(
        "literal", f"`{name}` is {value_text(first)} and {value_text(second)}", user.name,
        "use one value in both places",
    )  # fmt: skip


def wrong_shape(ours: torch.Tensor, theirs: torch.Tensor, found: fx.Node) -> Obstacle:
    return Obstacle("shape", f"wants {type_text(ours)}, found {type_text(theirs)}", found.name)


def does_not_fit(error: Exception, nodes: list[fx.Node]) -> Obstacle:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    _, guarded, guard = first.partition("guards are frozen: ")
    why = f"it would need {guard.removesuffix(' == True')}, which is not provable" if guarded else first
    shapes = ", ".join(f"%{n.name}: {type_text(n.meta['val'])}" for n in dict.fromkeys(nodes))
    return Obstacle("shape", f"the pattern does not fit {shapes}: {why}", nodes[0].name)


def does_nothing(nodes: list[fx.Node]) -> Obstacle:
    shapes = ", ".join(f"%{n.name}: {type_text(n.meta['val'])}" for n in dict.fromkeys(nodes))
    return Obstacle("shape", f"on {shapes} the pattern returns its input", nodes[0].name)


def no_other_output(sink: fx.Node, nodes: dict[fx.Node, fx.Node]) -> Obstacle:
    at = max(nodes.values())
    return Obstacle("op", f"wants {target_text(sink)} as a further result, found none", at.name)


def ends_early(anchor: fx.Node, at: fx.Node) -> Obstacle:
    wanted = next(iter(anchor.users))
    users = ", ".join("the graph's output" if u.op == "output" else target_text(u) for u in at.users) or "nothing"
    return Obstacle(
        "op", f"wants {target_text(wanted)} on the result, found {users}", at.name,
        "spell it as the rule does, or give the rule this spelling as a variant",
    )  # fmt: skip
