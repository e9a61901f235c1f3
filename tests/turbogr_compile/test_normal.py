"""One spelling per meaning: normalize and trace."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from turbogr_compile.capture.normal import normalize
from turbogr_compile.capture.trace import trace
from turbogr_compile.errors import TurbogrError
from turbogr_compile.graph.phases import Phase
from turbogr_compile.graph.text import graph_text

aten = torch.ops.aten


def text(fn: Callable[..., Any], *inputs: Any, phase: Phase = Phase.PRE_GRAD) -> str:
    """Traced text, after checking that the graph computes what `fn` does and that normalizing again changes nothing."""
    module = trace(fn, inputs, phase)
    first = graph_text(module.graph)
    names = [n.name for n in module.graph.nodes]
    normalize(module.graph, phase)
    module.graph.lint()
    assert graph_text(module.graph) == first
    assert [n.name for n in module.graph.nodes] == names
    if all(not isinstance(x, torch._subclasses.FakeTensor) for x in inputs):
        torch.manual_seed(0)
        expected = fn(*inputs)
        torch.manual_seed(0)
        torch.testing.assert_close(module(*inputs), expected, rtol=0, atol=0)
    return first


X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4)


SAME_SPELLING = [
    (lambda x: x.view(6, 4), lambda x: x.reshape(-1, 4)),
    (lambda x: x.flatten(0, 1), lambda x: x.view(6, 4)),
    (lambda x: x.transpose(-1, -2), lambda x: x.transpose(2, 1)),
    (lambda x: x.permute(-1, 0, 1), lambda x: x.permute(2, 0, 1)),
    (lambda x: x.permute(0, 2, 1), lambda x: x.transpose(-1, -2)),
    (lambda x: x[0].T * 2, lambda x: x[0].transpose(0, 1) * 2),
    (lambda x: x.transpose(0, 1).reshape(6, 4) + 1, lambda x: x.transpose(0, 1).contiguous().view(6, -1) + 1),
    (lambda x: x.view(6, 4).view(2, 12).exp(), lambda x: x.flatten(1).exp()),
    (lambda x: x.exp(), lambda x: x.expand(2, 3, 4)[:, :].view(2, 3, 4).exp()),
    (lambda x: x.exp().view(6, 4).add_(1), lambda x: x.exp().view(6, 4) + 1),
    (lambda x: (x > 0) & (x < 1), lambda x: torch.bitwise_and(x > 0, x < 1)),
    (lambda x: x.softmax(-1), lambda x: F.softmax(x, dim=2)),
    (lambda x: x.sum(-1), lambda x: torch.sum(x, dim=[2], keepdim=False)),
    (lambda x: x.unsqueeze(-1), lambda x: x.unsqueeze(3)),
    (lambda x: torch.stack([x, x], -1), lambda x: torch.stack((x, x), dim=3)),
    (lambda x: torch.stack([x, x]), lambda x: torch.stack((x, x), dim=-4)),
    (lambda x: torch.cat([x, x], -1), lambda x: torch.cat((x, x), 2)),
    (lambda x: x[:, 0:3], lambda x: x[:, :]),
    (lambda x: x * 2, lambda x: torch.mul(x, 2.0)),
    (lambda x: x + 1, lambda x: torch.add(x, 1.0, alpha=1)),
    (lambda x: x.masked_fill(x > 0, -1000), lambda x: x.masked_fill(x > 0.0, -1e3)),
    (lambda x: x.pow(2), lambda x: x ** 2.0),
    (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none")),
    (lambda x: F.layer_norm(x, (4,)), lambda x: F.layer_norm(x, [4], None, None, 1e-5)),
    (lambda x: x.expand(2, 3, 4), lambda x: x.expand(-1, 3, -1)),
    (lambda x: x.clone().mul_(2), lambda x: x.clone() * 2),
    (lambda x: torch.ones(2, 3), lambda x: torch.ones((2, 3), layout=torch.strided, pin_memory=False)),
    (lambda x: x.chunk(2, -1)[0], lambda x: x.chunk(2, 2)[0]),
    (lambda x: x.squeeze(-1), lambda x: x.squeeze(2)),
    (lambda x: x.logsumexp(-1), lambda x: x.logsumexp([2], False)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SAME_SPELLING)))
def test_two_spellings_of_one_meaning(number: int):
    one, other = SAME_SPELLING[number]
    assert strip(text(one, X)) == strip(text(other, X))


DIFFERENT = [
    (lambda x: x * 2, lambda x: x * 3),
    (lambda x: x.sum(-1), lambda x: x.sum(-1, keepdim=True)),
    (lambda x: x.softmax(-1), lambda x: x.softmax(1)),
    (lambda x: x.transpose(0, 1), lambda x: x.transpose(1, 2)),
    (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
    (lambda x: x.long() * 2, lambda x: x.long() * 2.0),
    (lambda x: torch.ones(2), lambda x: torch.ones(2, dtype=torch.bool)),
]


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_different_meanings_stay_different(number: int):
    one, other = DIFFERENT[number]
    assert strip(text(one, X)) != strip(text(other, X))


def strip(graph: str) -> str:
    """Without comment lines and without names, which follow the op that made the node."""
    lines = [line for line in graph.splitlines() if not line.strip().startswith("#")]
    names: dict[str, str] = {}
    for line in lines:
        if " : " in line:
            name = line.strip().split(" ", 1)[0]
            names[name] = f"%{len(names)}."
    out = "\n".join(lines)
    for name in sorted(names, key=len, reverse=True):
        out = out.replace(name, names[name])
    return out


def test_whole_text_of_a_small_function():
    def fn(x, w):
        h = F.linear(x, w).view(2, -1)
        h += 1
        return h.softmax(dim=-1)

    assert strip_lines(text(fn, X, torch.eye(4, dtype=torch.float64))) == (
        "graph(%arg0_1: f64[2, 3, 4], %arg1_1: f64[4, 4]):\n"
        "  %linear : f64[2, 3, 4] = aten.linear(%arg0_1, %arg1_1)\n"
        "  %view : f64[2, 12] = aten.reshape(%linear, [2, 12])\n"
        "  %add : f64[2, 12] = aten.add.Tensor(%view, 1.0)\n"
        "  %softmax : f64[2, 12] = aten.softmax.int(%add, 1)\n"
        "  return %softmax\n"
    )


def strip_lines(graph: str) -> str:
    return "".join(line + "\n" for line in graph.splitlines() if not line.strip().startswith("#"))


def test_scalars_of_integer_tensors_and_sizes_stay_integers():
    assert "2.0" not in text(lambda x: (x.long() * 2, torch.arange(0, 4), torch.full((2,), 2)), X)


def test_numbers_that_a_float_cannot_hold_stay():
    big = 2**53 + 1
    assert str(big) in text(lambda x: x * big, X)


def test_rank_zero_and_dims_of_the_result():
    text(lambda x: x.sum().softmax(-1), X)
    assert "aten.unsqueeze(%sum_1, 0)" in text(lambda x: x.sum().unsqueeze(-1), X)


def test_keyword_arguments_become_positional_and_gaps_are_filled():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    node = graph.call_function(aten.sum.dim_IntList, (x,), {"keepdim": True, "dim": [-1]})
    other = graph.call_function(aten.var.correction, (x,), {"keepdim": False, "correction": 1})
    third = graph.call_function(aten.cumsum.default, (), {"dim": -1, "self": x})
    fourth = graph.call_function(aten.slice.Tensor, (x,), {"end": 2})
    for n in (node, other, third, fourth):
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda _: X)
        n.meta["val"] = n.target(*args, **kwargs)
    graph.output((node, other, third, fourth))
    normalize(graph, Phase.PRE_GRAD)
    assert node.args == (x, [2], True) and node.kwargs == {}
    assert other.args == (x,) and other.kwargs == {"correction": 1}
    assert third.args == (x, 2) and third.kwargs == {}
    assert fourth.args == (x, 0, 0, 2) and fourth.kwargs == {}


def test_custom_ops_keep_their_own_meaning_of_dims():
    @torch.library.custom_op("turbogr_test::take", mutates_args=())
    def take(x: torch.Tensor, dim: int = -1, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    take.register_fake(lambda x, dim=-1, scale=1.0: torch.empty_like(x))
    assert "turbogr_test.take(%arg0_1, -2)" in text(lambda x: take(x, dim=-2, scale=1.0), X)


def test_no_ops_go_unless_the_caller_sees_their_memory():
    def fn(x):
        table = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        return x * table, table[0]

    module = trace(fn, [X], Phase.PRE_GRAD)
    module(X)[1].fill_(9.0)
    assert module(X)[1].item() == 1.0
    hidden = trace(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), [X], Phase.PRE_GRAD)
    assert [n.target for n in hidden.graph.nodes if n.op == "call_function"] == [aten.mul.Tensor]


def test_views_that_the_caller_sees_stay():
    def fn(x):
        h = x.exp()
        return h, h.view(2, 3, 4), x.expand(2, 3, 4), x.transpose(0, 1).reshape(-1).reshape(3, 2, 4)

    module = trace(fn, [X], Phase.PRE_GRAD)
    x = X.clone()
    outs = module(x)
    assert outs[0] is not outs[1] and outs[0].data_ptr() == outs[1].data_ptr()
    assert outs[2] is not x and outs[2].data_ptr() == x.data_ptr()
    assert outs[3].data_ptr() != x.data_ptr()


ON_MEMORY = {
    "as_strided": lambda x: x.as_strided((4, 6), (6, 1)),
    "numbers of pairs": lambda x: torch.view_as_complex(x.view(4, 3, 2)).abs(),
    "numbers of another size": lambda x: x.view(torch.int16) & 3,
    "an op of somebody else": lambda x: torch.ops.normal_tests.whole(x),
}


@pytest.mark.parametrize("name", ON_MEMORY)
@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 12)])
def test_copies_stay_for_those_who_look_at_memory(name, shape):
    """They make the argument lie in one piece."""
    library = torch.library.Library("normal_tests", "FRAGMENT")
    library.define("whole(Tensor x) -> Tensor")
    library.impl("whole", lambda x: torch.tensor(x.stride()) + x.sum(), "CompositeExplicitAutograd")
    library.impl("whole", lambda x: x.new_empty(x.dim()), "Meta")

    def fn(x):
        return ON_MEMORY[name](x.t().contiguous().view(shape).view(4, 6)) * 2

    x = torch.arange(24.0).view(6, 4)
    torch.testing.assert_close(trace(fn, [x], Phase.PRE_GRAD)(x), fn(x))


@pytest.mark.parametrize("name", [name for name in ON_MEMORY if name != "an op of somebody else"])
@pytest.mark.parametrize("write", [torch.Tensor.copy_, lambda x, other: x.__setitem__(slice(None), other)])
def test_what_is_written_lies_where_it_is_written(name, write):
    def fn(x):
        made = torch.zeros(4, 6)
        write(made, x.t())
        return ON_MEMORY[name](made) * 2

    x = torch.arange(24.0).view(6, 4)
    torch.testing.assert_close(trace(fn, [x], Phase.PRE_GRAD)(x), fn(x))


def test_full_slices_of_symbolic_sizes_go():
    traced = trace(lambda x: x[:, 1:].exp(), [symbolic(5, 6)], Phase.PRE_GRAD)
    assert "aten.slice.Tensor(%arg0_1, 1, 1)" in graph_text(traced.graph)
    assert [n.target for n in traced.graph.nodes].count(aten.slice.Tensor) == 1


def test_tensors_a_function_closes_over_are_constants():
    table = torch.arange(4.0, dtype=torch.float64)
    assert "constant" in text(lambda x: x + table, X)


def test_view_stays_after_autograd():
    later = text(lambda x: x.view(6, 4).detach() + 1, X, phase=Phase.POST_GRAD)
    assert "aten.view" in later and "detach" not in later


def test_phases_keep_or_take_apart_composites():
    w = torch.eye(4, dtype=torch.float64)

    def fn(x, w):
        return F.layer_norm(F.linear(x, w), (4,)).softmax(-1) @ w

    before = {n.target for n in trace(fn, [X, w], Phase.PRE_GRAD).graph.nodes}
    after = {n.target for n in trace(fn, [X, w], Phase.POST_GRAD).graph.nodes}
    assert {aten.linear.default, aten.layer_norm.default, aten.softmax.int, aten.matmul.default} <= before
    assert {aten.native_layer_norm.default, aten._softmax.default} <= after
    table = torch._decomp.get_decompositions([aten._softmax])
    taken = {n.target for n in trace(fn, [X, w], Phase.POST_GRAD, table).graph.nodes}
    assert aten._softmax.default not in taken and aten.exp.default in taken


def symbolic(*shape: int) -> torch.Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sample = torch.empty(*shape)
    for d in range(sample.ndim):
        torch._dynamo.mark_dynamic(sample, d)
    return mode.from_tensor(sample)


def test_symbolic_sizes():
    def fn(x):
        b, n, d = x.shape
        return x.view(b * n, d) * n, x.reshape(b, -1), n

    module = trace(fn, [symbolic(5, 6, 7)], Phase.PRE_GRAD)
    for shape in ((2, 3, 4), (5, 4, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), fn(x), rtol=0, atol=0)
    targets = {n.target for n in module.graph.nodes if n.op == "call_function"}
    assert targets <= {aten.sym_size.int, aten.reshape.default, aten.mul.Tensor, operator.mul}
    assert all("val" in n.meta for n in module.graph.nodes if n.op != "output")


def test_writing_to_an_input_is_an_error():
    def fn(x):
        return x.add_(1)

    with pytest.raises(TurbogrError, match="fn writes to its input 0"):
        trace(fn, [X], Phase.PRE_GRAD)


def test_in_place_inside_is_functional():
    def fn(x):
        h = x * 2
        h[:, 0] = 0
        h[0].mul_(x[1])
        a, b = h.chunk(2, -1)
        a.add_(b)
        return h, a

    graph = trace(fn, [X], Phase.PRE_GRAD).graph
    assert all(not n.target._schema.is_mutable for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    text(fn, X)


def test_no_grad_in_a_pattern_is_a_detach():
    def fn(x, w):
        with torch.no_grad():
            scale = (x * w).exp()
        return scale * w

    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    module = trace(fn, [X, w], Phase.PRE_GRAD)
    assert [n.target for n in module.graph.nodes].count(aten.detach.default) == 1
    (expected,) = torch.autograd.grad(fn(X, w).sum(), w)
    (actual,) = torch.autograd.grad(module(X, w).sum(), w)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert torch.is_grad_enabled()


def test_autocast_in_a_pattern_is_casts():
    def fn(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w).softmax(-1) + torch.einsum("bnd,de->bne", x, w)

    x, w = X.float(), torch.eye(4)
    assert "bf16" in text(fn, x, w)
    assert not torch.is_autocast_enabled("cpu")


# --- random programs ----------------------------------------------------------------------------------

STEPS: list[Callable[[list[torch.Tensor], int], Any]] = [
    lambda v, i: v.append(v[i] * v[-1]),
    lambda v, i: v.append(v[i].transpose(-1, -2).transpose(1, 2) + 1),
    lambda v, i: v.append(v[i].view(3, -1).t().reshape(2, 3, 4)),
    lambda v, i: v.append(F.layer_norm(v[i], (4,))),
    lambda v, i: v.append(v[i].softmax(-1)),
    lambda v, i: v.append(v[i].clone().masked_fill_(v[-1] > 0, -2)),
    lambda v, i: v.append(v[i].detach()),
    lambda v, i: v.append(torch.cat(v[i].chunk(2, -1)[::-1], dim=-1)),
    lambda v, i: v.append(v[i].roll(1, -1)),
    lambda v, i: v.append(torch.where(v[i] > 0, v[i], 0.5)),
    lambda v, i: v.append(F.dropout(v[i], 0.0, True) * 2),
    lambda v, i: v.append(no_grad(v[i])),
    lambda v, i: v.append(written(v[i], v[-1])),
]


def no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.tanh() * 2


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * 1
    h[:, 1:] += y[:, :-1]
    h[0, :, -1] = math.pi
    return h


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9)), min_size=1, max_size=7))
def test_random_programs_keep_values_and_gradients(steps: list[tuple[int, int]]):
    def fn(a, b):
        values = [a * 1, b * 1]
        for step, at in steps:
            STEPS[step](values, at % len(values))
        return values[-1], values[len(values) // 2]

    def results(f: Callable[..., Any]) -> list[Any]:
        a, b = X.clone().requires_grad_(), X.flip(0).cos().requires_grad_()
        outs = f(a, b)
        loss = sum((o * X.sin()).sum() for o in outs if o.requires_grad)
        grads = torch.autograd.grad(loss, (a, b), allow_unused=True) if isinstance(loss, torch.Tensor) else ()
        return [*outs, *grads]

    leaves = [X.clone().requires_grad_(), X.clone().requires_grad_()]
    module = trace(fn, leaves, Phase.PRE_GRAD)
    for expected, actual in zip(results(fn), results(module), strict=True):
        if expected is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


LOWER, HIGHER, VOID = torch.randn(5), torch.randn(3, 5), torch.empty(0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: aten.unsqueeze_copy.default(y, -1) * 2,
        lambda x, y: F.cosine_similarity(x, y, dim=-1),
        lambda x, y: torch.cat([VOID, y], -1),
        lambda x, y: torch.diag_embed(y, 0, -1, -3),
    ],
    ids=["one dim more", "broadcast", "void first", "two dims of the result"],
)
def test_dims_from_the_end_count_those_that_the_op_counts(fn):
    """Not those of the first operand, which may have fewer."""
    assert text(fn, LOWER, HIGHER)
