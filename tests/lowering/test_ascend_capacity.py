"""Option `capacity` on the road to GE: static shapes, one pair of graphs per combination of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import turbogr_compile
from turbogr_compile.lowering.torchair import native
from turbogr_compile.runtime import specialize
from turbogr_compile.runtime.prologue import Unprovable
from turbogr_compile.runtime.specialize import Specialized, open_size
from turbogr_compile.runtime.statistics import statistics

from .models import HSTU, ITEMS, LENGTH, SASRec
from .simulator import needs_torchair
from .test_ascend_sim import assert_same_step


def batch(model: type[nn.Module], *lengths: int) -> tuple[Tensor, ...]:
    """Histories of these lengths, padded on the right with 0."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(1, ITEMS, (len(lengths), LENGTH), generator=generator)
    targets = torch.randint(1, ITEMS, (len(lengths), LENGTH), generator=generator)
    kept = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    times = torch.randint(0, 10**6, ids.shape, generator=generator).sort(-1).values
    return (ids * kept, *([times] if model is HSTU else []), targets * kept)


def compiled(model: nn.Module, capacity: Any, **settings: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    options = {"target": "ascend-sim", "on_error": "raise", "capacity": capacity}
    return torch.compile(model, backend="turbogr", options=options, **settings)


def open_dims(graphs: list[Any]) -> list[Any]:
    """Sizes of inputs that a GE graph leaves open."""
    shapes = [value.shape for loaded in graphs for node in loaded.graph.inputs for value in node.outputs]
    return [size for shape in shapes for size in shape or () if not isinstance(size, int) or size < 0]


@needs_torchair
@pytest.mark.parametrize("model", [SASRec, HSTU])
def test_static_shapes_for_each_bucket(model: type[nn.Module]):
    torch.manual_seed(0)
    trained, before = model(), statistics()
    run = compiled(trained, (8, 16))
    with native.watching() as graphs:
        assert_same_step(trained, run, batch(model, 2, 3))
        assert len(graphs) == 2 and "JaggedAttention" in graphs[0].graph.types
        assert_same_step(trained, run, batch(model, 1, 0))  # the same bucket
        assert len(graphs) == 2
        assert_same_step(trained, run, batch(model, 4, 5))
        assert_same_step(trained, run, batch(model, 12, 4))  # exactly the bucket
        assert len(graphs) == 4
        assert_same_step(trained, run, batch(model, 12, 12))  # beyond the largest
        assert len(graphs) == 4
    assert not open_dims(graphs)
    assert [list(s.fallbacks.values()) for s in statistics() if s.calls and s not in before] == [[1]]


@needs_torchair
@pytest.mark.slow
def test_static_shapes_where_the_batch_is_dynamic():
    torch.manual_seed(0)
    model = SASRec()
    run = compiled(model, 8, dynamic=True)
    with native.watching() as graphs:
        assert_same_step(model, run, batch(SASRec, 2, 3))
        assert_same_step(model, run, batch(SASRec, 2, 3, 2))
    assert len(graphs) == 4 and not open_dims(graphs)


class Picked(nn.Module):
    """Sees how many rows its mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.inner = nn.Embedding(ITEMS, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = F.gelu(self.inner(self.items(ids)), approximate="tanh")
        kept = ids != 0
        return F.cross_entropy(x[kept] @ self.items.weight.T, targets[kept])


@needs_torchair
def test_sizes_stay_open_where_the_model_sees_them():
    torch.manual_seed(0)
    model = Picked()
    torch._dynamo.reset()
    run = turbogr_compile.compile(model, target="ascend-sim", on_error="raise", capacity=8)  # x[mask] in one graph
    with native.watching() as graphs:
        assert_same_step(model, run, batch(SASRec, 2, 3))
        assert_same_step(model, run, batch(SASRec, 7, 3))
    assert len(graphs) == 2 and open_dims(graphs)


# --- choosing graphs, without torchair ---------------------------------------------------------------


def traced() -> torch.fx.GraphModule:
    return torch.fx.experimental.proxy_tensor.make_fx(lambda x, n: x * n, tracing_mode="symbolic")(torch.ones(5), 3)


def test_a_graph_for_each_combination_until_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(specialize, "LIMIT", 2)
    made: list[str] = []

    def lower(name: str, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        made.append(name)
        assert [tuple(x.shape) for x in inputs] == [(int(name.split("x")[0]),)]
        return module

    chosen = Specialized(traced(), lower, raises=True)
    assert chosen(torch.ones(4), 3).tolist() == [3.0] * 4
    assert chosen(torch.ones(4), 3).tolist() == [3.0] * 4
    assert chosen(torch.ones(6), 2).tolist() == [2.0] * 6
    assert made == ["4x3", "6x2"]
    with pytest.raises(Unprovable, match="2 combinations of sizes"):
        chosen(torch.ones(7), 2)
    assert chosen(torch.ones(4), 3).tolist() == [3.0] * 4


def test_what_the_target_cannot_take_falls_back_once():
    tried = []

    def lower(*given: Any) -> Callable[..., Any]:
        tried.append(given)
        raise RuntimeError("no such kernel\nmore")

    chosen = Specialized(traced(), lower, raises=False)
    for _ in range(2):
        with pytest.raises(Unprovable, match=r"static shapes: no such kernel$"):
            chosen(torch.ones(4), 3)
    assert len(tried) == 1
    with pytest.raises(RuntimeError, match="no such kernel"):
        Specialized(traced(), lower, raises=True)(torch.ones(4), 3)


def test_symbols_with_a_value_are_no_open_sizes():
    assert open_size(traced().graph) is None
