"""Inputs computed before every call: providers share work, may refuse a batch, and refused batches run as before."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import turbogr_compile
from turbogr_compile import Pass, Phase
from turbogr_compile.errors import TurbogrError
from turbogr_compile.runtime.prologue import Call, Unprovable, add_input, keep_original, original_of, providers
from turbogr_compile.testing import run_passes, trace_graph

aten = torch.ops.aten
ROADS = [
    {"target": "eager"},
    {"codegen": "aten"},
    pytest.param({"codegen": "inductor"}, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def statistics():
    """Of graphs that this test compiles."""
    gc.collect()
    older = set(turbogr_compile.statistics())
    return lambda: [s for s in turbogr_compile.statistics() if s not in older]


@dataclass(frozen=True)
class ScaleProducts(Pass):
    """Multiply each product by an added input."""

    name = "scale-products"
    phase = Phase.PRE_GRAD
    after = ("fold-masks",)

    provide: ClassVar[Callable[[Call], Any]] = staticmethod(lambda call: torch.ones(()))
    keeps: ClassVar[bool] = True

    def run(self, graph, ctx):
        products = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        if self.keeps:
            keep_original(graph)
        for node in products:
            fake = node.meta["val"].fake_mode.from_tensor(torch.ones(()), static_shapes=True)
            with ctx.rewrite("scale", node):
                factor = add_input(graph, "factor", fake, self.provide)
                with graph.inserting_after(node):
                    scaled = graph.call_function(aten.mul.Tensor, (node, factor))
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user, new=scaled: user is not new)


def scaling(provide, keeps=True):
    return type("Scaling", (ScaleProducts,), {"provide": staticmethod(provide), "keeps": keeps})()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (x * self.weight).pow(2).sum()


def only_full(call: Call) -> torch.Tensor:
    """Refuses batches with an empty row; what it returns is wrong, so that one sees which graph ran."""
    (x,) = [i for i in call.inputs if isinstance(i, torch.Tensor) and i.ndim == 2]
    if (x == 0).all(1).any():
        raise Unprovable("a row is empty", "model.py:7  x * self.weight")
    return torch.full((), 3.0)


def compiled(model, provide, road, **more):
    passes = [scaling(provide)]
    return turbogr_compile.compile(model, passes=passes, without=["eliminate-common"], **road, **more)


def loss_and_gradient(model, step, x):
    model.zero_grad()
    loss = step(x)
    loss.backward()
    return loss.detach(), model.weight.grad.clone()


def test_work_is_shared_within_a_call_and_not_beyond():
    made = []
    call = Call([1])
    assert [call.once("rows", lambda: made.append(0) or len(made)) for _ in range(2)] == [1, 1]
    assert call.once("other", lambda: None) is None
    assert call.once("other", lambda: 5) is None, "None is a value like any other"
    assert Call([1]).once("rows", lambda: 7) == 7


@pytest.mark.parametrize("road", ROADS, ids=str)
def test_refused_batches_run_the_kept_graph_and_are_counted_and_told_once(road, statistics):
    model = Model()
    eager = copy.deepcopy(model)
    step = compiled(model, only_full, road)
    full, empty = torch.ones(2, 4), torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0]])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for x in (full, empty, empty, full, empty):
            loss, gradient = loss_and_gradient(model, step, x)
            expected, wanted = loss_and_gradient(eager, eager, x)
            factor = 9.0 if x is full else 1.0
            torch.testing.assert_close(loss, factor * expected)
            torch.testing.assert_close(gradient, factor * wanted)
    said = [w for w in heard if "cannot take the rewritten graph" in str(w.message)]
    assert len(said) == 1
    assert "a row is empty\n  model.py:7" in str(said[0].message)
    assert said[0].filename == __file__
    (stats,) = statistics()
    assert (stats.calls, stats.fallbacks) == (5, {"a row is empty": 3})
    assert "5 calls" in repr(stats) and "3 fell back: a row is empty" in repr(stats)


def test_refused_batches_write_to_inputs_once():
    class Counting(Model):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return super().forward(x)

    model = Counting()
    step = compiled(model, only_full, {"codegen": "aten"})
    with pytest.warns(UserWarning, match="a row is empty"):
        for x in (torch.zeros(2, 4), torch.ones(2, 4), torch.zeros(2, 4)):
            step(x)
    assert model.seen == 3


def test_each_reason_is_told():
    def refuse(call):
        raise Unprovable(f"reason {int(call.inputs[0].sum())}")

    step = compiled(lambda x: x * 2, refuse, {"target": "eager"})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for value in (1, 2, 1):
            torch.testing.assert_close(step(torch.full((1,), float(value))), torch.full((1,), 2.0 * value))
    assert ["reason 1" in str(w.message) for w in heard] == [True, False]
    assert "reason 2" in str(heard[1].message)


def test_the_kept_graph_has_the_inputs_that_earlier_passes_added():
    def causal(x):
        return (x * 2).masked_fill(torch.ones(4, 4).triu(1) == 1, -1.0).sum()

    step = compiled(causal, refuse, {"codegen": "aten"}, expect={"fold-masks": ">=1"})
    x = torch.randn(4, 4)
    with pytest.warns(UserWarning, match="never"):
        torch.testing.assert_close(step(x), causal(x))


def test_providers_run_without_gradients_and_once_per_call():
    seen = []

    def provide(call):
        seen.append(torch.is_grad_enabled())
        return torch.ones(())

    model = Model()
    step = compiled(model, provide, {"codegen": "aten"})
    for _ in range(2):
        step(torch.ones(2, 4)).backward()
    assert seen == [False, False]


def test_refusing_without_a_kept_graph_names_the_remedy():
    step = turbogr_compile.compile(Model(), passes=[scaling(only_full, keeps=False)], target="eager")
    with pytest.raises(TurbogrError, match=r"a row is empty.*keep_original"):
        step(torch.zeros(2, 4))


def test_statistics_die_with_compiled_code(statistics):
    step = compiled(Model(), only_full, {"target": "eager"})
    assert not statistics()
    step(torch.ones(2, 4))
    assert [s.calls for s in statistics()] == [1]
    del step
    torch._dynamo.reset()
    gc.collect()
    assert not statistics()


def test_the_first_kept_graph_stays():
    module = trace_graph(lambda x: x * 2, "f32[3]")
    assert original_of(module) is None
    run_passes(module, [ScaleProducts()])
    run_passes(module, [ScaleProducts()])
    assert len(providers(module.graph)) == 3
    original = original_of(module)
    assert not providers(original.graph)
    torch.testing.assert_close(original(torch.ones(3)), torch.full((3,), 2.0))


def refuse(call):
    raise Unprovable("never")


def test_numeric_verification_does_not_lose_the_kept_graph():
    """It runs the graph in modules of its own."""
    module = trace_graph(lambda x: (x * 2) + (x * 2), "f32[3]")
    run_passes(module, ["eliminate-common", scaling(refuse)], verify="numeric")
    assert original_of(module) is not None


def test_numeric_verification_does_not_blame_a_pass_whose_provider_refuses_made_up_inputs(statistics):
    with pytest.warns(UserWarning, match="cannot take the rewritten graph") as heard:
        turbogr_compile.explain(
            lambda x: x * 2, torch.ones(3), passes=[scaling(refuse)], target="eager", verify="numeric"
        )
    assert len(heard) == 1
    assert statistics()[0].fallbacks == {"never": 1}


def test_numeric_verification_gets_the_inputs_of_earlier_passes_from_their_providers():
    """Doubling what was multiplied by zero is right; it is not once a made-up number takes the place of the zero."""
    module = trace_graph(lambda x: x * 2, "f32[3]")
    nothing, double = scaling(lambda call: torch.zeros(())), scaling(lambda call: torch.full((), 2.0))
    run_passes(module, [nothing], verify="strict")
    run_passes(module, [double], verify="numeric")
