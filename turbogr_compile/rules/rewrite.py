"""Applying matches: trace the replacement on the matched tensors, check it, inline it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..errors import PassError, TurbogrError
from ..graph.nodes import sizes_from
from ..graph.phases import Vocabulary
from ..graph.provenance import line_of
from ..graph.shapes import same_shape
from ..graph.text import type_text
from ..pipeline.context import Context
from .match import Match, storage
from .pattern import is_value, trace_holes
from .search import Search

if TYPE_CHECKING:
    from .rule import Rule


def apply_rules(rules: Iterable[Rule], graph: fx.Graph, ctx: Context) -> None:
    """Apply the rules again and again until none matches; then, if asked, say where they almost did."""
    rules = list(rules)
    search = Search(graph, ctx.words)
    allowed = 100 + 10 * len(graph.nodes)
    fired: Counter[str] = Counter()
    while True:
        before = fired.total()
        for rule in rules:
            for match in search.matches(rule):
                apply(match, graph, ctx)
                fired[rule.name] += 1
                if fired.total() > allowed:
                    raise _endless(fired, match)
        if fired.total() == before:
            break
    if ctx.explaining:
        for rule in rules:
            ctx.near_misses += search.near_misses(rule)


def apply(match: Match, graph: fx.Graph, ctx: Context) -> None:
    """Replace the matched nodes; nodes that are still used elsewhere stay."""
    made = _trace_replacement(match, ctx.words)
    results = _results(made)
    _check(match, results)
    point = match.insertion_point()
    assert point is not None, "obstacles() said that there is one"
    with ctx.rewrite(match.rule.name, *match.nodes, site=match.rule.site):
        copies = _inline(made, dict.fromkeys(match.inputs), graph, point)
        for old, new in zip(match.outputs, results, strict=True):
            old.replace_all_uses_with(_as_seen(match, old, copies[new]))
        _erase_unused(match.nodes, graph)


def _trace_replacement(match: Match, words: Vocabulary) -> fx.GraphModule:
    replacement = match.rule.replacement
    assert replacement is not None, "patterns are not traced without one"
    distinct = list(dict.fromkeys(match.inputs))
    which = [distinct.index(n) for n in match.inputs]
    try:
        values = [n.meta["val"] for n in distinct]
        made = trace_holes(replacement, values, which, match.literals, words)
    except TurbogrError:
        raise
    except Exception as error:
        raise _error(match, f"the replacement raised {type(error).__name__}: {error}") from error
    if made.graph.find_nodes(op="get_attr"):
        raise _error(match, "the replacement holds a constant tensor; build it with torch.full, or take it as a hole")
    return made


def _results(made: fx.GraphModule) -> list[Any]:
    result = made.graph.output_node().args[0]
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _check(match: Match, results: list[Any]) -> None:
    """What comes must describe the same tensors as what goes."""
    if len(results) != len(match.outputs):
        raise _error(match, f"the replacement returns {len(results)} values, the pattern {len(match.outputs)}")
    for old, new in zip(match.outputs, results, strict=True):
        ours, theirs = old.meta["val"], new.meta.get("val") if is_value(new) else new
        if not isinstance(theirs, torch.Tensor) or not _same(ours, theirs):
            raise _error(match, f"the replacement gives {type_text(theirs)} for %{old.name}: {type_text(ours)}")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and same_shape(a.shape, b.shape)


def _inline(made: fx.GraphModule, inputs: Iterable[fx.Node], graph: fx.Graph, point: fx.Node) -> dict[fx.Node, fx.Node]:
    placeholders = made.graph.find_nodes(op="placeholder")
    copies = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(point):
        for node in made.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            # The trace's own stack is the rule's; the new node descends from the user's lines.
            copies[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "unbacked_bindings")}
    return copies


def _as_seen(match: Match, old: fx.Node, new: fx.Node) -> fx.Node:
    """`new`, where the caller does not see it; else a tensor that shares memory with the inputs only as `old` did."""
    if new in match.inputs and sizes_from(old):
        return _inserted(torch.ops.aten.alias.default, old, new)
    if not any(user.op == "output" for user in old.users):
        return new
    shared = storage(new) in {storage(n) for n in match.inputs}
    if shared and storage(old) in match.nodes:
        target = torch.ops.aten.clone.default
    elif new in match.inputs:
        target = torch.ops.aten.alias.default
    else:
        return new
    return _inserted(target, old, new)


def _inserted(target: torch._ops.OpOverload, old: fx.Node, new: fx.Node) -> fx.Node:
    with old.graph.inserting_before(old):
        result = old.graph.create_node("call_function", target, (new,), name=target.overloadpacket.__name__)
    result.meta = {"val": old.meta["val"]}
    return result


def _erase_unused(nodes: tuple[fx.Node, ...], graph: fx.Graph) -> None:
    """Erase what nobody reads any more, and the sizes that were computed for it alone."""
    waiting = list(nodes)
    while waiting:
        node = max(waiting)
        waiting.remove(node)
        if not node.users:
            waiting += [
                n for n in node.all_input_nodes if n.op == "call_function" and not is_value(n) and n not in waiting
            ]
            graph.erase_node(node)


def _endless(fired: Counter[str], match: Match) -> PassError:
    names = " and ".join(f"'{name}' ({count} times)" for name, count in fired.most_common(3))
    return _error(match, f"no end in sight: {names} keep firing; a replacement must not match a pattern again")


def _error(match: Match, text: str) -> PassError:
    last = match.outputs[-1]
    return PassError(
        f"rule '{match.rule.name}' ({match.rule.site}): {text}", node=last.name, line=str(line_of(last) or "")
    )
