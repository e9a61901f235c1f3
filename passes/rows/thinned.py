"""Weights that dropout has thinned: a packed attention draws in its place, so all of their readers must be packed, too.

Which pairs are dropped is a function of a seed, the head and both columns (`kernels/dropout.py`): attentions that share
their weights share the seed. A reader that is no packed attention would see another draw than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import fx

from .attending import Attention


def at_odds(attentions: Mapping[fx.Node, Attention], runs: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Attentions of which another reader of the same thinned weights is no packed attention."""
    return {node for node, a in attentions.items() if _draw(a) is not None and not _alone(a, attentions, runs)}


def _draw(a: Attention) -> fx.Node | None:
    """The dropout that it replaces; one that the captured op draws itself has no other reader."""
    drop = a.form.dropout
    return drop.node if drop is not None and drop.node is not a.node else None


def _alone(a: Attention, attentions: Mapping[fx.Node, Attention], runs: Callable[[fx.Node], bool]) -> bool:
    draw = _draw(a)
    assert draw is not None
    readers = [r for r in _readers(draw, attentions) if runs(r)]
    shared = len(readers) > 1
    if shared and sum(a.form.sizes[axis] != 1 for axis in a.form.heads) > 1:
        return False  # heads that several axes count may be counted in another order elsewhere
    return all(r in attentions and _draw(attentions[r]) is draw for r in readers)


def _readers(draw: fx.Node, attentions: Mapping[fx.Node, Attention]) -> Iterator[fx.Node]:
    """Who reads thinned weights: attentions, and what is on the way to none."""
    inside = {n for a in attentions.values() if _draw(a) is draw for n in a.form.chain}
    todo, seen = [draw], {draw}
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user in inside:
                todo.append(user)
            else:
                yield user
