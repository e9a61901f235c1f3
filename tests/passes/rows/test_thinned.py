"""Attentions that share weights which dropout has thinned draw the same pairs, or none of them draws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from turbogr_compile.passes.rows.thinned import at_odds


@pytest.mark.parametrize("sizes, agree", [({"a": 2, "b": 1}, True), ({"a": 2, "b": 2}, False)])
def test_shared_draws_number_heads_alike(sizes, agree):
    """Heads that two axes count may be counted in another order by the other reader."""
    graph = fx.Graph()
    draw = graph.placeholder("draw")
    readers = [graph.call_function(torch.relu, (draw,)) for _ in range(2)]
    form = SimpleNamespace(dropout=SimpleNamespace(node=draw), chain=(), heads=tuple(sizes), sizes=sizes)
    attentions: dict[fx.Node, Any] = {n: SimpleNamespace(node=n, form=form) for n in readers}
    assert at_odds(attentions, lambda _: True) == (set() if agree else set(readers))
