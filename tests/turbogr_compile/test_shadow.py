"""The shadow: the first calls of a compiled graph are compared with the captured graph, and a wrong one is not used."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import turbogr_compile
from turbogr_compile import Pass, Phase
from turbogr_compile.check.comparison import agree, distance
from turbogr_compile.check.validate import DIFFERS, draws
from turbogr_compile.errors import VerifyError
from turbogr_compile.runtime.prologue import Unprovable, add_input, keep_original
from turbogr_compile.show.recording import Recording
from turbogr_compile.testing import trace_graph

aten = torch.ops.aten
ROADS = [{"target": "eager"}, {"codegen": "aten"}]
WITH_INDUCTOR = [*ROADS, pytest.param({"codegen": "inductor"}, marks=pytest.mark.slow)]


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
class Edit(Pass):
    """Put something behind each gelu."""

    name = "edit"
    phase = Phase.PRE_GRAD
    insert: ClassVar[Callable[[fx.Graph, fx.Node], fx.Node]]

    def run(self, graph, ctx):
        for node in graph.find_nodes(op="call_function", target=aten.gelu.default):
            users = list(node.users)
            with ctx.rewrite("insert", node), graph.inserting_after(node):
                new = self.insert(graph, node)
                for user in users:
                    user.replace_input_with(node, new)


def edit(insert, **more):
    return type("Edited", (Edit,), {"insert": staticmethod(insert), **more})()


def op(target, *args):
    return lambda graph, node: graph.call_function(target, (node, *args))


DOUBLED = edit(op(aten.mul.Scalar, 2.0))
DETACHED = edit(op(aten.detach.default))
HARMLESS = edit(op(aten.mul.Scalar, 1.0))


class Model(nn.Module):
    """Attention, running statistics, a counter written in place, and a result per row."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        h = x + self.attend(x, x, x, need_weights=False)[0]
        h = h + self.down(F.gelu(self.up(h)))
        return self.norm(h.transpose(1, 2)).transpose(1, 2).tanh()


class Heard:
    """Warnings of ours."""

    def __enter__(self):
        self._catch = warnings.catch_warnings(record=True)
        self._all = self._catch.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self._catch.__exit__(*error)
        self.texts = [str(w.message) for w in self._all if str(w.message).startswith("turbogr")]


def assert_trains_like_eager(model, passes, road, verify="shadow:2", steps=4):
    eager = copy.deepcopy(model)
    step = turbogr_compile.compile(model, passes=passes, verify=verify, **road)
    with Heard() as heard:
        for _ in range(steps):
            x = torch.randn(3, 5, 8)
            results = [step(x), eager(x)]
            torch.testing.assert_close(*results)
            for result, m in zip(results, (model, eager), strict=True):
                m.zero_grad()
                result.pow(2).sum().backward()
            for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, msg=name)
            for (name, a), b in zip(model.named_buffers(), eager.buffers(), strict=True):
                torch.testing.assert_close(a, b, msg=name)
    return heard.texts


@pytest.mark.parametrize("road", WITH_INDUCTOR, ids=str)
def test_a_right_graph_is_compared_as_often_as_asked_and_used(road, statistics):
    assert not assert_trains_like_eager(Model(), [HARMLESS], road)
    (stats,) = statistics()
    assert (stats.calls, stats.compared, stats.fallbacks) == (4, 2, {})


@pytest.mark.parametrize("road", WITH_INDUCTOR, ids=str)
def test_wrong_values_are_caught_in_the_first_call_and_never_reach_the_user(road, statistics):
    (text,) = assert_trains_like_eager(Model(), [DOUBLED], road)
    assert "graph 0.0, call 1, differs from the captured graph" in text
    assert "output 0" in text and "of its norm (tolerance 1e-05)" in text
    (stats,) = statistics()
    assert (stats.calls, stats.compared, stats.fallbacks) == (4, 1, {DIFFERS: 4})


@pytest.mark.parametrize("road", ROADS, ids=str)
def test_wrong_gradients_are_caught_by_name(road):
    (text,) = assert_trains_like_eager(Model(), [DETACHED], road)
    assert "the gradient of up_weight is off by 1.0e+00 of its norm" in text
    assert "output" not in text and "down_weight" not in text


def test_wrong_only_after_autograd():
    """A pass on the backward graph: values stay right."""

    @dataclass(frozen=True)
    class DoubleBackward(Pass):
        """Double the gradient behind a gelu."""

        name = "double-backward"
        phase = Phase.POST_GRAD
        roles = frozenset({turbogr_compile.Role.BACKWARD})

        def run(self, graph, ctx):
            (node,) = graph.find_nodes(op="call_function", target=aten.gelu_backward.default)
            users = list(node.users)
            with ctx.rewrite("double", node), graph.inserting_after(node):
                twice = graph.call_function(aten.mul.Tensor, (node, 2.0))
                for user in users:
                    user.replace_input_with(node, twice)

    (text,) = assert_trains_like_eager(Model(), [DoubleBackward()], {"codegen": "aten"})
    assert "the gradient of up_weight is off by 1.0e+00 of its norm" in text and "output" not in text


def test_a_difference_raises_where_errors_do():
    step = turbogr_compile.compile(Model(), passes=[DOUBLED], verify="shadow", on_error="raise", target="eager")
    with pytest.raises(VerifyError, match=r"call 1, differs from the captured graph:\n(.*\n)*  output 0 (.*\n)*  try:"):
        step(torch.randn(3, 5, 8))


def test_a_graph_that_raises_is_not_used():
    def broken(call):
        raise IndexError("no such row")

    def insert(graph, node):
        fake = node.meta["val"].fake_mode.from_tensor(torch.ones(()), static_shapes=True)
        return graph.call_function(aten.mul.Tensor, (node, add_input(graph, "factor", fake, broken)))

    (text,) = assert_trains_like_eager(Model(), [edit(insert)], {"codegen": "aten"})
    assert "it raised IndexError: no such row" in text


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("road", ROADS, ids=str)
def test_without_gradients_outputs_are_compared(grad, road):
    model, x = Model().eval(), torch.randn(3, 5, 8)
    with grad():
        expected = copy.deepcopy(model)(x)
        for passes, told in (([HARMLESS, DETACHED], 0), ([DOUBLED], 1)):
            torch._dynamo.reset()
            step = turbogr_compile.compile(model, passes=passes[-1:], verify="shadow:1", **road)
            with Heard() as heard:
                torch.testing.assert_close(step(x), expected)
            assert len(heard.texts) == told
    assert model.seen == 6, "two calls of three rows, each counted once"


def test_each_compiled_graph_has_its_own_count(statistics):
    """Here one graph per size."""
    model = Model()
    step = turbogr_compile.compile(model, verify="shadow:2", codegen="aten", dynamic=False)
    for n in (3, 4, 3, 4, 3, 4, 5):
        step(torch.randn(n, 5, 8))
    assert [(s.calls, s.compared) for s in statistics()] == [(3, 2), (3, 2), (1, 1)]


@pytest.mark.parametrize("road", ROADS, ids=str)
def test_inputs_are_written_once_whatever_their_layout_and_history(road, statistics):
    def accumulate(total, x):
        total.add_(x)
        return (total * x).sum()

    step = turbogr_compile.compile(accumulate, verify="shadow:2", **road)
    total, expected = torch.zeros(6, 8)[::2, ::4], torch.zeros(3, 2)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3).t()
            torch.testing.assert_close(step(total, x), accumulate(expected, x))
            torch.testing.assert_close(total, expected)
    for _ in range(3):
        gradients = []
        for fn in (step, accumulate):
            leaf = torch.ones(3, 2, requires_grad=True)
            held = leaf * 2
            (fn(held, x) + held.sum()).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)
    assert [(s.compared, s.fallbacks) for s in statistics()] == [(2, {}), (2, {})]


def test_what_is_left_in_a_written_input_is_compared():
    def remember(cache, x):
        cache.copy_(F.gelu(x))
        return x.sum()

    step = turbogr_compile.compile(remember, passes=[DOUBLED], verify="shadow:1", codegen="aten")
    cache, x = torch.zeros(4), torch.randn(4)
    with Heard() as heard:
        step(cache, x)
    assert "what is left in input cache is off by 1.0e+00 of its norm" in heard.texts[0]
    torch.testing.assert_close(cache, F.gelu(x))


def test_the_random_state_is_as_without_a_shadow():
    """Random numbers outside of the graph, here drawn by a provider, must not depend on who compares."""
    drawn = []

    def draw(call):
        drawn.append(torch.rand(()))
        return torch.ones(())

    def insert(graph, node):
        fake = node.meta["val"].fake_mode.from_tensor(torch.ones(()), static_shapes=True)
        return graph.call_function(aten.mul.Tensor, (node, add_input(graph, "factor", fake, draw)))

    step = turbogr_compile.compile(F.gelu, passes=[edit(insert)], verify="shadow:1", target="eager")
    torch.manual_seed(7)
    step(torch.ones(3))
    torch.manual_seed(7)
    assert drawn == [torch.rand(())] * 2


@pytest.mark.parametrize("road", ROADS, ids=str)
def test_a_graph_that_drops_is_compared_with_dropout_off_and_draws_as_ever(road, statistics):
    def noisy(x):
        return F.dropout(F.gelu(x), 0.5).sum()

    with Heard() as heard:
        step = turbogr_compile.compile(noisy, verify="shadow:1", **road)
        for _ in range(2):
            x = torch.randn(64)
            torch.manual_seed(1)
            expected = noisy(x)
            torch.manual_seed(1)
            torch.testing.assert_close(step(x), expected)
    assert not heard.texts
    assert [s.compared for s in statistics()] == [1]


def test_a_graph_whose_numbers_are_drawn_before_the_step_is_not_compared_and_says_so(statistics):
    table = nn.Embedding(50, 4)

    def sampled(ids):
        return (table(ids) @ table(torch.randint(1, 50, (20,))).T).logsumexp(-1).mean()

    recording = Recording()
    with Heard() as heard:
        passes = ["offload-sampling"]
        turbogr_compile.compile(sampled, verify="shadow", codegen="aten", passes=passes, instruments=[recording])(
            torch.tensor([3, 5])
        )
    (text,) = heard.texts
    assert "drawn before the step" in text and "test_shadow.py" in text
    assert [r["id"] for r in recording.records[0]["remarks"]].count("not-compared") == 1
    assert not [s for s in statistics() if s.compared]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: F.dropout(x, 0.1), True),
        (lambda x: F.dropout(x, 0.0), False),
        (lambda x: F.dropout(x, 0.1, training=False), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (lambda x: x + torch.rand(4, 4), True),
        (lambda x: torch.bernoulli(x.sigmoid()), True),
        (lambda x: x + torch.randint(0, 5, (4, 4)), True),
        (lambda x: x @ x, False),
    ],
)
def test_what_draws(fn, expected):
    assert any(draws(n) for n in trace_graph(fn, "f32[2, 4, 4]").graph.nodes) is expected


def test_a_refused_batch_is_not_a_comparison(statistics):
    def only_positive(call):
        if call.inputs[0][0] < 0:
            raise Unprovable("negative")
        return torch.ones(())

    def insert(graph, node):
        keep_original(graph)
        fake = node.meta["val"].fake_mode.from_tensor(torch.ones(()), static_shapes=True)
        return graph.call_function(aten.mul.Tensor, (node, add_input(graph, "factor", fake, only_positive)))

    step = turbogr_compile.compile(F.gelu, passes=[edit(insert)], verify="shadow:2", codegen="aten")
    with Heard() as heard:
        for sign in (-1, 1, -1, 1, 1):
            torch.testing.assert_close(step(torch.full((3,), 1.0 * sign)), F.gelu(torch.full((3,), 1.0 * sign)))
    assert len(heard.texts) == 1
    (stats,) = statistics()
    assert (stats.calls, stats.compared, stats.fallbacks) == (5, 2, {"negative": 2})


@pytest.mark.parametrize("road", ROADS, ids=str)
def test_inside_activation_checkpointing(road, statistics):
    """The tensors that comparing saves for its own backward are no business of the checkpoint."""
    layer = nn.Linear(4, 4)

    def block(x):
        return layer(F.gelu(x)).exp()

    step = turbogr_compile.compile(block, passes=[HARMLESS], verify="shadow:3", deferral=False, **road)
    x = torch.randn(3, 4, requires_grad=True)
    step(x)
    found = [
        torch.autograd.grad(checkpoint(fn, x, use_reentrant=False).sum(), [x, *layer.parameters()])
        for fn in (step, block)
    ]
    torch.testing.assert_close(*found)
    assert [s.compared for s in statistics()] == [3]


# --- what counts as equal --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_of_what_cancels_is_no_difference(dtype, statistics):
    """The result, and the gradient of the bias in front of the softmax, are rounding errors around zero."""

    def residue(x, bias):
        scores = torch.softmax(F.gelu(x) + bias, -1)
        return scores.sum(-1) - 1, (scores * x.detach()).sum()

    # x / 3 * 3 is x up to rounding.
    thirds = edit(
        lambda graph, node: _then(graph, graph.call_function(aten.div.Scalar, (node, 3.0)), aten.mul.Scalar, 3.0)
    )
    step = turbogr_compile.compile(residue, passes=[thirds], verify="shadow:5", target="eager", on_error="raise")
    for _ in range(5):
        step(torch.randn(64, 33, dtype=dtype), torch.zeros(64, 1, dtype=dtype, requires_grad=True))
    assert [(s.compared, s.fallbacks) for s in statistics()] == [(5, {})]


def _then(graph, node, target, *args):
    with graph.inserting_after(node):
        return graph.call_function(target, (node, *args))


def test_a_wrong_value_next_to_what_cancels_is_a_difference():
    """Rounding moves the result by 1e-7 or so, the planted error by 1e-4; both are far more than the result itself."""

    def residue(x, scale):
        return (torch.softmax(x * scale, -1).sum(-1) - 1) + 1e-4 * F.gelu(x).sum(-1) - 1e-4 * F.gelu(x).sum(-1)

    @dataclass(frozen=True)
    class AddToOne(Pass):
        """Add one to the first sum of a gelu."""

        name = "add-to-one"
        phase = Phase.PRE_GRAD

        def run(self, graph, ctx):
            node = graph.find_nodes(op="call_function", target=aten.gelu.default)[0]
            users = list(node.users)
            with ctx.rewrite("add", node), graph.inserting_after(node):
                new = graph.call_function(aten.add.Scalar, (node, 1.0))
                users[0].replace_input_with(node, new)

    settings = {"verify": "shadow", "target": "eager", "on_error": "raise", "without": ["eliminate-common"]}
    x, scale = torch.randn(64, 33), torch.ones(33, requires_grad=True)
    turbogr_compile.compile(residue, **settings)(x, scale)
    torch._dynamo.reset()
    with pytest.raises(VerifyError, match="output 0"):
        turbogr_compile.compile(residue, passes=[AddToOne()], **settings)(x, scale)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.ones(9), torch.ones(9) * (1 + 1e-6), True),
        (torch.ones(9), torch.ones(9) * (1 + 1e-4), False),
        (torch.zeros(9), torch.full((9,), 1e-9), False),
        (torch.ones(9, dtype=torch.bfloat16), torch.full((9,), 1.0078125, dtype=torch.bfloat16), True),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), True),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * (1 + 1e-6), True),
        (torch.ones(0), torch.ones(0), True),
        (3, 3, True),
        (3, 4, False),
        (None, None, True),
    ],
)
def test_agreement(a, b, expected):
    assert agree(a, b) is expected
    assert (distance(a, b) == 0) <= expected
