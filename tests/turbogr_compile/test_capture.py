"""Captured graphs behave like eager: outputs, writes and every gradient."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from turbogr_compile.capture.dynamo import CannotCapture, Captured, capture, readable_name
from turbogr_compile.capture.normal import normalize
from turbogr_compile.graph.phases import Phase
from turbogr_compile.graph.provenance import line_of
from turbogr_compile.graph.text import graph_text

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@dataclass
class Backend:
    """Capture, then AOTAutograd with eager graphs (or, with `aot` off, the captured module itself)."""

    aot: bool = True
    refusals_allowed: bool = False
    captured: list[fx.GraphModule] = field(default_factory=list)
    refusals: list[CannotCapture] = field(default_factory=list)
    backwards: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        before = str(gm.graph), [dict(n.meta) for n in gm.graph.nodes]
        try:
            made = capture(gm, inputs)
            module = made.module
        except CannotCapture as refusal:
            if not self.refusals_allowed:
                raise
            self.refusals.append(refusal)
            made, module = Captured(gm), gm
        else:
            check_normal(module, all(n.meta.get("stack_trace") for n in gm.graph.nodes if is_op(n)))
            self.captured.append(module)
        assert before == (str(gm.graph), [dict(n.meta) for n in gm.graph.nodes])
        if not self.aot:
            return made.after_writes(module)

        def keep(graph: fx.GraphModule, _: Any) -> Any:
            self.backwards.append(graph)
            return make_boxed_func(graph.forward)

        compiled = aot_autograd(
            fw_compiler=lambda g, _: make_boxed_func(g.forward),
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
        )(module, inputs)
        return made.after_writes(compiled)

    @property
    def text(self) -> str:
        assert len(self.captured) == 1
        return graph_text(self.captured[0].graph)

    @property
    def targets(self) -> list[Any]:
        return [n.target for m in self.captured for n in m.graph.nodes if n.op == "call_function"]

    @property
    def refusal(self) -> CannotCapture:
        (refusal,) = self.refusals
        assert not self.captured
        return refusal


def is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not torch._C._set_grad_enabled


def check_normal(module: fx.GraphModule, lines: bool) -> None:
    """Invariants of every captured graph."""
    graph = module.graph
    graph.lint()
    text = graph_text(graph)
    normalize(graph, Phase.PRE_GRAD)
    assert graph_text(graph) == text
    stored = False
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function") and "autocast" not in str(node.target):
            assert "val" in node.meta, node
        if node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable or node.target is aten.copy_.default
            assert node.target is not torch._C._set_grad_enabled
            stored = stored or node.target is aten.copy_.default
            assert not stored or node.target is aten.copy_.default or "autocast" in str(node.target)
            assert not lines or "autocast" in str(node.target) or node.meta["stack_trace"], node
        assert node.target not in (aten.view.default, aten._unsafe_view.default)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def run(fn: Callable[..., Any], model: Any, args: tuple[Any, ...]) -> list[Any]:
    """Outputs, gradients of parameters and of inputs, buffers and inputs afterwards."""
    leaves = [a for a in tensors(args) if a.requires_grad]
    torch.manual_seed(1)
    result = fn(*args)
    outs = torch.utils._pytree.tree_leaves(result)
    loss = sum(
        (o * torch.cos(torch.arange(o.numel(), dtype=o.dtype).view(o.shape))).sum()
        for o in outs
        if isinstance(o, torch.Tensor) and o.requires_grad
    )
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    grads: Any = ()
    if isinstance(loss, torch.Tensor):
        grads = torch.autograd.grad(loss, leaves + parameters, allow_unused=True)
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    needs = [isinstance(o, torch.Tensor) and o.requires_grad for o in outs]
    return [outs, list(grads), buffers, tensors(args), needs]


def same(a: Any, b: Any, tolerance: float) -> None:
    a, b = torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x.detach(), y.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert x == y


def check(
    fn: Callable[..., Any],
    *batches: tuple[Any, ...],
    backend: Backend | None = None,
    tolerance: float = 1e-12,
    **compile: Any,
) -> Backend:
    """`fn` compiled equals `fn` eager on every batch."""
    backend = backend or Backend()
    twin = copy.deepcopy(fn)
    compiled = torch.compile(fn, backend=backend, **compile)
    for batch in batches:
        expected = run(twin, twin, _copied(batch))
        actual = run(compiled, fn, _copied(batch))
        same(expected, actual, tolerance)
    return backend


def _copied(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    def copied(a: Any) -> Any:
        return a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a

    return tuple(copied(a) for a in batch)


def refused(fn: Callable[..., Any], *batch: Any, id: str, code: str | None = None) -> CannotCapture:
    """`fn` is refused at the line that contains `code`, and runs right unmodified."""
    backend = check(fn, batch, backend=Backend(refusals_allowed=True))
    refusal = backend.refusal
    assert refusal.id == id
    if code is not None:
        assert refusal.line is not None and code in refusal.line.code
        assert refusal.line.file == __file__
    return refusal


def f64(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


# --- a whole model ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.heads, self.drop = heads, nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / 2.0
        scores = scores.masked_fill(~(torch.tril(torch.ones(n, n, dtype=torch.bool)) & mask[:, None, None, :]), -1e9)
        x = x + self.out((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(b, n, d))
        x = self.drop(x)
        x *= mask.unsqueeze(-1)
        return x


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids != 0
        x = self.items(ids) * 2.0
        x += self.positions(torch.arange(ids.shape[1]))[None]
        for block in self.blocks:
            x = block(x, mask)
        logits = x @ self.items.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


def ids(b: int, n: int) -> torch.Tensor:
    lengths = torch.randint(2, n + 1, (b, 1))
    return torch.randint(1, 20, (b, n)) * (torch.arange(n) < lengths)


def test_transformer_trains_as_eager_with_composites_kept_and_user_lines():
    backend = check(Model().double(), (ids(3, 7),), (ids(3, 7),))
    assert len(backend.captured) == 1
    wanted = {aten.linear.default, aten.layer_norm.default, aten.softmax.int, aten.matmul.default,
              aten.embedding.default, aten.cross_entropy_loss.default}  # fmt: skip
    assert wanted <= set(backend.targets)
    graph = backend.captured[0].graph
    (first, *_) = graph.find_nodes(op="call_function", target=aten.layer_norm.default)
    line = line_of(first)
    assert line is not None and line.file == __file__ and "self.norm(x)" in line.code
    assert first.meta["nn_module_stack"]
    assert not any(n.name.startswith("l_") for n in graph.find_nodes(op="placeholder"))


def test_inference_equals_eager():
    model = Model().double().eval()
    with torch.no_grad():
        check(model, (ids(3, 7),))
    torch._dynamo.reset()
    with torch.inference_mode():
        backend = check(model, (ids(3, 7),))
    assert backend.captured


def test_new_lengths_do_not_recompile():
    model, backend = Model().double(), Backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    first = ids(3, 7)
    torch._dynamo.mark_dynamic(first, 0)
    torch._dynamo.mark_dynamic(first, 1)
    for batch in (first, ids(4, 9), ids(5, 12)):
        same(run(model, model, (batch,)), run(compiled, model, (batch,)), 1e-12)
    assert len(backend.captured) == 1
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in backend.captured[0].graph.find_nodes(op="placeholder"))


def test_several_graphs_per_model():
    def step(x):
        y = torch.tanh(x)
        torch._dynamo.graph_break()
        with torch.no_grad():
            z = torch.sin(y)
            torch._dynamo.graph_break()
            z = z * 2
        return (y * z).sum()

    backend = check(step, (f64(4),))
    assert len(backend.captured) >= 3


def test_captured_module_trains_directly_under_eager_autograd():
    check(Model().double(), (ids(3, 7),), backend=Backend(aot=False))


# --- writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aot", [True, False])
def test_batch_norm_statistics_are_stored(aot: bool):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(self.norm(x)).relu()

    model = Net().double()
    backend = check(model, (f64(5, 4),), (f64(5, 4),), backend=Backend(aot=aot))
    assert backend.targets.count(aten.copy_.default) == 3
    torch._dynamo.reset()
    assert aten.copy_.default not in check(model.eval(), (f64(5, 4),)).targets


def test_writes_to_inputs():
    def counter(x, count, cache):
        count += 1
        cache[:, 1:3] = x.detach()[:, :2]
        return x * cache.sum() + count

    backend = check(counter, (f64(2, 3), torch.zeros((), dtype=torch.int64), f64(2, 5, grad=False)))
    assert backend.targets.count(aten.copy_.default) == 2


def test_write_with_gradient_into_an_input_without():
    def fill(x, buffer):
        buffer[0] = x.sum() * 2
        return buffer * 3

    check(fill, (f64(3), f64(3, grad=False)))


def test_in_place_on_an_input_that_is_not_a_leaf():
    backend = Backend()

    def inner(h, w):
        h.mul_(2)
        y = h * w
        h.add_(1)
        return y

    inner = torch.compile(inner, backend=backend)

    def outer(x, w, f):
        h = x * 3
        y = f(h, w)
        return (y + h.sin()).sum()

    eager = lambda h, w: (h.mul_(2), h.clone() * w, h.add_(1))[1]  # noqa: E731
    x, w = f64(4), f64(4)
    expected = torch.autograd.grad(outer(x, w, eager), (x, w))
    actual = torch.autograd.grad(outer(x, w, inner), (x, w))
    same(expected, actual, 1e-12)
    assert aten.copy_.default in backend.targets


@pytest.mark.parametrize("aot", [True, False])
def test_in_place_ops_that_need_the_old_value_for_their_gradient(aot: bool):
    def body(h, w):
        h.mul_(w)
        h.view(-1).clamp_(-0.5, 0.5)
        return h.sin() * w

    compiled = torch.compile(body, backend=Backend(aot=aot))
    x, w = f64(2, 3), f64(2, 3)

    def grads(f):
        h = x * 1
        return torch.autograd.grad((f(h, w) + h).sum(), (x, w))

    same(grads(body), grads(compiled), 1e-12)


@pytest.mark.parametrize("name", ["eq_", "ne_", "ge_", "gt_", "le_", "lt_"])
def test_floats_that_a_comparison_overwrites_have_a_gradient_of_zeros(name: str):
    def body(x, w):
        y, z = x * 1, x * 1
        getattr(y, name)(0.1)
        getattr(z, name)(w)
        return y + z

    x, w = f64(2, 3), f64(3)
    results = [f(x, w) for f in (body, torch.compile(body, backend=Backend()))]
    gradients = [torch.autograd.grad(r.sum(), (x, w)) for r in results]  # which raises where there is none
    same(results[0], results[1], 0)
    same(gradients[0], gradients[1], 0)


def test_parts_of_complex_numbers_are_written():
    def low_pass(x):
        spectrum = torch.fft.rfft(x, dim=1)
        spectrum[:, 2:] = 0
        spectrum[:, 0, ::2] *= 1j
        spectrum[..., -1] = spectrum[..., 0].conj()
        return torch.fft.irfft(spectrum, n=x.shape[1], dim=1)

    check(low_pass, (f64(2, 6, 4),))


def test_written_input_is_returned_as_itself():
    def step(x, cache):
        cache.add_(x)
        return cache, cache * 2

    compiled = torch.compile(step, backend=Backend())
    x, cache = torch.ones(2), torch.zeros(2)
    out, twice = compiled(x, cache)
    assert out is cache and cache.tolist() == [1, 1] and twice.tolist() == [2, 2]


def test_exponential_average_of_parameters():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3, 3))

        def forward(self, x):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(self.linear.weight, alpha=0.1)
            return self.linear(x) @ self.mean

    backend = check(Net().double(), (f64(2, 3),), (f64(2, 3),))
    assert aten.detach.default in backend.targets


def test_write_in_a_graph_that_ends_with_gradients_off():
    def step(x, mean):
        y = x * 2
        torch.set_grad_enabled(False)
        mean.mul_(0.9).add_(x)
        return y

    with torch.set_grad_enabled(True):
        x, mean = f64(3), f64(3, grad=False)
        twin = mean.clone()
        y = torch.compile(step, backend=Backend())(x, mean)
    same(mean, twin * 0.9 + x, 1e-12)
    assert y.requires_grad and not mean.requires_grad


class Clamped(nn.Module):
    """`write` is called under no_grad with the parameter, before or after it is used."""

    def __init__(self, write: Callable[[torch.Tensor], Any], use: Callable[..., Any], first: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([7.0, 1.0, -2.0], dtype=torch.float64))
        self.write, self.use, self.first = write, use, first

    def forward(self, x):
        before = self.scale if self.first else self.use(x, self.scale)
        with torch.no_grad():
            self.write(self.scale)
        return self.use(x, self.scale) if self.first else before


@pytest.mark.parametrize("aot", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.clamp_(0, 4.0),
        lambda p: p.data.clamp_(0, 4.0),
        lambda p: p.detach().clamp_(0, 4.0),
        lambda p: p.copy_(p / p.norm()),
        lambda p: p[0].zero_(),
        lambda p: p.mul_(0.5).add_(1),
        lambda p: p.masked_fill_(p > 3, 3.0),
        lambda p: p.lerp_(torch.ones(3, dtype=torch.float64), 0.1),
    ],
)
def test_parameter_written_under_no_grad_before_its_use(write, aot: bool):
    model = Clamped(write, lambda x, p: (x * p.exp()).sum() + (p * p).sum())
    batches = [(f64(3),) for _ in range(3)]
    backend = check(model, *batches, backend=Backend(aot))
    assert len(backend.captured) == 1 and aten.copy_.default not in backend.targets
    twin = Clamped(write, model.use)
    for _ in batches:
        twin(f64(3))
    same(twin.scale, model.scale, 1e-12)
    assert bool(model.scale._version) == bool(twin.scale._version)


def test_two_parameters_are_written_from_each_others_old_values():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3).double()), nn.Parameter(torch.full((3,), 2.0).double())
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            with torch.no_grad():
                self.steps += 1
                old = self.a.clone()
                self.a.lerp_(self.b, 0.25)
                self.b.lerp_(old, 0.5 / self.steps)
            return (x * self.a * self.b.exp()).sum()

    backend = check(Net(), (f64(3),), (f64(3),), (f64(3),))
    assert len(backend.captured) == 1


def test_parameter_written_after_its_use_is_refused_and_fails_as_in_eager():
    model = Clamped(lambda p: p.clamp_(0, 4.0), lambda x, p: (x * p.exp()).sum(), first=False)
    backend = Backend(refusals_allowed=True)
    torch.compile(model, backend=backend)(f64(3))
    assert backend.refusal.id == "mutates-parameter" and "clamp_" in backend.refusal.line.code
    torch._dynamo.reset()
    squared = Clamped(lambda p: p.clamp_(0, 4.0), lambda x, p: (x * p * p).sum(), first=False)
    for run in (squared, torch.compile(squared, backend="turbogr")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(f64(3)).backward()


def test_parameter_written_from_a_draw_or_read_before_the_write_is_refused():
    def noisy(p):
        p.add_(torch.rand(3, dtype=torch.float64))

    refused(Clamped(noisy, lambda x, p: (x * p).sum()), f64(3), id="mutates-parameter", code="p.add_")
    torch._dynamo.reset()

    class Early(Clamped):
        def forward(self, x):
            first = self.scale[0]
            with torch.no_grad():
                self.scale.clamp_(0, 4.0)
            return (x * first).sum() + self.scale.sum()

    refused(Early(None, None), f64(3), id="mutates-parameter", code="clamp_")


def test_hidden_write_to_an_intermediate_is_refused():
    def data(x):
        h = x * 2
        h.detach().mul_(3)
        return h * h.clone()

    def attribute(x):
        h = x * 2
        h.data.mul_(3)
        return h * h.clone()

    def off(x):
        h = x * 2
        with torch.no_grad():
            h[h > 1] = 0.5
        return h + x

    refused(data, f64(3), id="write-hidden-from-autograd", code="mul_(3)")
    torch._dynamo.reset()
    refused(attribute, f64(3), id="write-hidden-from-autograd", code="data.mul_(3)")
    torch._dynamo.reset()
    refused(off, f64(3), id="write-hidden-from-autograd", code="h[h > 1]")


@pytest.mark.parametrize("name, given", [("logical_or_", 1), ("logical_not_", 0), ("normal_", 0)])
def test_writes_that_have_no_gradient_are_refused(name: str, given: int):
    """Eager keeps the gradient of what is overwritten by a logical op, and has none for what is drawn."""

    def step(x):
        return getattr(x * 2, name)(*[x.detach() > 0] * given).sum()

    refused(step, f64(3), id="write-hidden-from-autograd", code="getattr")


def test_aliased_inputs_of_which_one_is_written_are_refused():
    def step(a, b):
        a.add_(1)
        return a * b

    backend = Backend(refusals_allowed=True)
    compiled = torch.compile(step, backend=backend)
    base = torch.arange(4.0)
    twin = base.clone()
    same(step(twin[:3], twin[1:]), compiled(base[:3], base[1:]), 0)
    same(twin, base, 0)
    assert backend.refusal.id == "aliased-inputs"


def test_view_of_a_written_input_is_refused():
    def step(x):
        x.add_(1)
        return x[0]

    refused(step, f64(3, grad=False), id="returns-view-of-written-input")


def test_input_with_a_new_shape_in_place_is_refused():
    with pytest.raises(CannotCapture) as caught, FakeTensorMode() as mode:
        value = mode.from_tensor(torch.empty(2, 3))
        capture(dynamo_like(lambda gm, x: gm.graph.call_method("t_", (x,)), value), [value])
    assert caught.value.id == "reshapes-input"


# --- outputs ------------------------------------------------------------------------------------------


def test_outputs_alias_as_in_eager():
    def step(x, y):
        h = x * 2
        return x, x[0], h, h, h.view(-1), y.t()

    x, y = torch.ones(2, 3), torch.ones(2, 3)
    outs = torch.compile(step, backend=Backend())(x, y)
    assert outs[0] is x and outs[2] is outs[3]
    x.add_(1)
    assert outs[1].tolist() == [2, 2, 2]
    outs[2].zero_()
    assert outs[4].sum() == 0
    y.zero_()
    assert outs[5].sum() == 0
    check(step, (f64(2, 3), f64(2, 3)))


def test_outputs_that_are_no_tensors():
    def step(x, n):
        return x * n, n, None, x.shape[0], "name"

    check(step, (f64(4), 3))
    torch._dynamo.reset()
    check(step, (f64(4), 3), (f64(5), 4), (f64(6), 5), dynamic=True)


def test_no_outputs():
    def step(count):
        count += 1

    check(step, (torch.zeros(2),))


def test_constants_are_real_and_fresh():
    def step(x):
        weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
        returned = torch.tensor([5.0])
        return x * weights, returned, returned[0]

    compiled = torch.compile(step, backend=Backend())
    compiled(f64(2))[1].zero_()
    assert compiled(f64(2))[1].item() == 5.0
    check(step, (f64(2),))


# --- grad modes ---------------------------------------------------------------------------------------


def test_no_grad_becomes_detach():
    def step(x, w):
        with torch.no_grad():
            table = torch.cos(x * w)
            with torch.enable_grad():
                inner = (x * table).sin()
            late = inner * 2
        with torch.set_grad_enabled(False):
            y = torch.exp(x)
        return table * w + inner * w, late, y, late + x

    backend = check(step, (f64(3), f64(3)))
    assert aten.detach.default in backend.targets


def test_everything_under_no_grad():
    def step(x, w):
        with torch.no_grad():
            return x * w

    backend = check(step, (f64(3), f64(3)))
    with torch.no_grad():
        torch._dynamo.reset()
        backend = check(step, (f64(3), f64(3)))
    assert aten.detach.default not in backend.targets


def test_views_under_no_grad():
    def step(x):
        with torch.no_grad():
            row = x[0]
        return row * x

    check(step, (f64(2, 3),))


def test_detach_of_what_has_no_gradient_is_dropped():
    def step(x, mask):
        return x * (mask * 2).detach()

    assert aten.detach.default not in check(step, (f64(3), f64(3, grad=False))).targets
    assert aten.detach.default in check(step, (f64(3), f64(3))).targets


def test_inference_mode_inside():
    def step(x, n):
        with torch.inference_mode():
            size = (n * 2).sum()
        return x * int(x.shape[0]) + size.clone()

    check(step, (f64(3), f64(3, grad=False)))


def test_gradients_switched_on_inside_a_graph_without_are_refused():
    def step(x, w):
        with torch.enable_grad():
            y = x * w
        return y * 2

    backend = Backend(refusals_allowed=True)
    with torch.no_grad():
        torch.compile(step, backend=backend)(f64(3), f64(3))
    assert backend.refusal.id == "grad-enabled-inside" and "x * w" in backend.refusal.line.code


# --- autocast -----------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        h = self.norm(self.a(x))
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ self.b.weight.float()
        s = torch.einsum("bd,cd->bc", h, x).softmax(-1) @ self.drop(self.b(h))
        return F.scaled_dot_product_attention(s[None], s[None], s[None]).sum(), s


def test_autocast_region():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mixed()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                loss, s = self.inner(x)
            return loss * 2, s

    backend = check(Outer(), (torch.randn(4, 8, requires_grad=True),), tolerance=0.0)
    assert not any("autocast" in str(t) for t in backend.targets)
    assert not torch.is_autocast_enabled("cpu")
    linears = backend.captured[0].graph.find_nodes(op="call_function", target=aten.linear.default)
    assert {n.meta["val"].dtype for n in linears} == {torch.bfloat16}


@pytest.mark.parametrize("aot", [True, False])
def test_autocast_around_the_graph(aot: bool):
    with torch.autocast("cpu", torch.bfloat16):
        check(Mixed(), (torch.randn(4, 8, requires_grad=True),), backend=Backend(aot=aot), tolerance=0.0)


# --- dropout, views, constructors ---------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("train", [True, False])
def test_write_after_dropout(p: float, train: bool):
    def step(x):
        h = x * 2
        y = F.dropout(h, p, train)
        y *= 3
        return y, h

    backend = check(step, (f64(50),), backend=Backend(aot=False))
    assert (aten.dropout.default in backend.targets) == (p > 0 and train)


def test_module_dropout_draws_the_same_numbers():
    backend = check(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)).double(), (f64(5, 4),), backend=Backend(aot=False))
    assert aten.dropout.default in backend.targets


def test_reshape_of_attention_output():
    def step(q):
        o = F.scaled_dot_product_attention(q, q, q)
        return o.transpose(1, 2).reshape(2, 5, 8) * 2

    check(step, (f64(2, 2, 5, 4),))


def test_legacy_constructors_are_casts():
    def step(x, n):
        return torch.DoubleTensor(x.numpy()) * torch.LongTensor(n.numpy())

    backend = check(step, (f64(3, grad=False), torch.arange(3)))
    assert backend.captured


def test_legacy_constructors_of_numbers():
    def step(x):
        return x / (x.sum() + torch.FloatTensor([1e-8])) + torch.LongTensor([[1, 2, 3]]) + torch.Tensor((1, 2.5, 3))

    backend = check(step, (f64(2, 3),))
    assert backend.captured


def test_numpy_code():
    def step(x, ids):
        seen = torch.LongTensor(ids.numpy() + 1)
        return x[seen] * 2

    check(step, (f64(6), torch.tensor([0, 2, 3])))


def test_type_as_and_broadcast_then_write():
    def step(x, y):
        a, b = torch.broadcast_tensors(x * 1, y)
        c = (x * 2).type_as(x)
        d = c.type_as(x)
        d += 1
        return a + b + c

    check(step, (f64(3), f64(3)))


# --- data-dependent sizes -----------------------------------------------------------------------------

DATA_DEPENDENT = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


def test_boolean_indexing_and_nonzero():
    def step(x, mask):
        rows = x[mask]
        where = mask.nonzero().squeeze(1)
        picked = x.index_select(0, where)
        return (rows * picked).sum() + rows.shape[0]

    model, backend = step, Backend()
    with torch._dynamo.config.patch(**DATA_DEPENDENT):
        batches = [(f64(6, 2), torch.rand(6) > t) for t in (0.2, 0.5, 0.7)]
        check(model, *batches, backend=backend, fullgraph=True)
    assert len(backend.captured) == 1
    assert "unbacked_bindings" in " ".join(k for n in backend.captured[0].graph.nodes for k in n.meta)


def test_item_keeps_its_runtime_assert():
    def step(x, n):
        k = n.item()
        torch._check(k >= 1)
        torch._check(k <= 4)
        return x[:k].sum() * k

    backend = Backend()
    with torch._dynamo.config.patch(**DATA_DEPENDENT):
        check(step, (f64(4), torch.tensor(2)), (f64(4), torch.tensor(3)), backend=backend, fullgraph=True)
        assert len(backend.captured) == 1
        assert aten._assert_scalar.default in backend.targets
        with pytest.raises(RuntimeError):
            torch.compile(step, backend=backend, fullgraph=True)(f64(4), torch.tensor(7))


def test_refusal_after_data_dependent_sizes_leaves_nothing_behind():
    def step(x, mask):
        rows = x[mask]
        return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (rows,)).sum()

    with torch._dynamo.config.patch(**DATA_DEPENDENT):
        refused(step, f64(6), torch.arange(6) % 2 == 0, id="higher-order-op")


def test_captured_module_keeps_no_input_alive():
    backend = Backend(aot=False)
    compiled = torch.compile(lambda x: x * 2, backend=backend)
    x = torch.ones(3)
    compiled(x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None and backend.captured


# --- subgraphs ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.layers, self.on = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), on

    def block(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x

    def forward(self, x):
        if self.on:
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        else:
            x = self.block(x)
        return torch.cos(x).sum()


def test_checkpoint_keeps_its_meaning():
    def saved(on: bool) -> set[str]:
        torch._dynamo.reset()
        backend = check(Checkpointed(on).double(), (f64(5, 4),))
        (backward,) = backend.backwards
        return {str(n.target) for n in backward.graph.nodes}

    # cos(layer(x)) is sin's derivative; checkpointing computes sin and the layers again, otherwise they are saved
    recomputed = {"aten.sin.default", "aten.addmm.default"}
    assert recomputed <= saved(True)
    assert "aten.addmm.default" not in saved(False)


def test_selective_checkpoint_is_refused():
    from functools import partial

    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    class Net(Checkpointed):
        def forward(self, x):
            contexts = partial(create_selective_checkpoint_contexts, [aten.mm.default])
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False, context_fn=contexts).sum()

    refused(Net(True).double(), f64(5, 4), id="selective-checkpoint")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Gelu(torch.autograd.Function):
    """Saves a value of its own, and takes a number."""

    @staticmethod
    def forward(ctx, x, slope):
        gate = torch.sigmoid(slope * x)
        ctx.save_for_backward(x, gate)
        ctx.slope = slope
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * gate * (1 + ctx.slope * x * (1 - gate)), None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


class Decayed(torch.autograd.Function):
    """A gradient where that of the result is zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad + 0.1 * x


class Scaled(torch.autograd.Function):
    """Several results, of which one has no gradient; a parameter; sums over all rows."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        y, most = x * weight, x.argmax(-1)
        ctx.mark_non_differentiable(most)
        return y, y.sum(-1), most

    @staticmethod
    def backward(ctx, grad, rows, _):
        x, weight = ctx.saved_tensors
        grad = grad + rows[..., None]
        return grad * weight, 3 * (grad * x).sum((0, 1))


def own(backend: Backend) -> list[Any]:
    return [t for t in backend.targets if "function" in str(getattr(t, "namespace", ""))]


@pytest.mark.parametrize("aot", [True, False])
@pytest.mark.parametrize(
    ("apply", "pointwise"),
    [
        (lambda x: Doubled.apply(x.sin()).sum(), True),
        (lambda x: Gelu.apply(x.sin(), 1.702).sum(), True),
        (lambda x: Reversed.apply(x.sin()).exp().sum(), True),
        (lambda x: Decayed.apply(x.sin()).sum(), False),
        (lambda x: [t * 2 for t in Scaled.apply(x.sin(), x[0, 0] + 2)], False),
    ],
)
def test_autograd_function_is_an_op_with_its_own_gradient(apply, pointwise: bool, aot: bool):
    backend = check(apply, (f64(2, 3, 4),), (f64(3, 5, 4),), (f64(4, 6, 4),), backend=Backend(aot))
    assert len(backend.captured) == 2  # static sizes, then any
    assert {torch.Tag.pointwise in op.tags for op in own(backend)} == {pointwise}
    assert len(own(backend)) == 2


def test_autograd_function_inside_of_a_checkpoint():
    def step(x):
        return torch.utils.checkpoint.checkpoint(lambda a: Gelu.apply(a.sin(), 1.0).cos(), x, use_reentrant=False)

    assert len(own(check(step, (f64(3, 4),)))) == 1


def test_functions_that_differ_in_a_number_are_different_ops():
    backend = check(lambda x: Gelu.apply(x, 1.0) + Gelu.apply(x, 2.0) + Gelu.apply(x * 3, 1.0), (f64(3),))
    assert len(own(backend)) == 3 and len(set(own(backend))) == 2


def test_cond_is_refused():
    def step(x):
        return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (x,))

    refused(step, f64(3), id="higher-order-op")


def test_function_transforms_are_refused_and_leave_no_mode_behind():
    refused(lambda x: torch.vmap(lambda a: a.sin().sum() * a)(x), f64(2, 3), id="function-transform")
    torch._dynamo.reset()
    refused(lambda x: torch.func.grad(lambda a: (a**3).sum())(x), f64(3, grad=False), id="function-transform")
    torch._dynamo.reset()
    check(lambda x: x * 2, (f64(3),))


def test_ops_that_write_to_an_intermediate_are_refused():
    @torch.library.custom_op("turbogr_test::increment", mutates_args=("x",))
    def increment(x: torch.Tensor) -> None:
        x.add_(1)

    def step(x):
        h = x * 2
        increment(h)
        return h

    refused(step, f64(3, grad=False), id="unknown-node", code="increment(h)")


def test_embedding_that_renormalises_its_table():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, max_norm=1.0)

        def forward(self, ids):
            return self.table(ids).sin()

    model = Net().double()
    backend = check(model, (torch.tensor([1, 2]),), (torch.tensor([3, 3]),))
    assert len(backend.captured) == 1 and model.table.weight[1:4].norm(dim=1).max() < 1 + 1e-6


def test_attention_modules():
    check(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double(), (f64(2, 5, 4),))
    torch._dynamo.reset()
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    check(lambda x, m: attention(x, x, x, key_padding_mask=m), (f64(2, 5, 4), mask))


def dynamo_like(build: Callable[[fx.GraphModule, fx.Node], fx.Node], value: torch.Tensor) -> fx.GraphModule:
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    x = gm.graph.placeholder("x")
    x.meta["example_value"] = value
    gm.graph.output((build(gm, x),))
    gm.recompile()
    return gm


def test_constants_of_the_module_are_kept_as_they_are():
    table = torch.arange(3.0)

    def build(gm: fx.GraphModule, x: fx.Node) -> fx.Node:
        gm.register_buffer("table", table)
        return gm.graph.call_function(torch.add, (x, gm.graph.get_attr("table")))

    with FakeTensorMode() as mode:
        value = mode.from_tensor(torch.ones(3))
        module = capture(dynamo_like(build, value), [value]).module
    assert module.table is table
    assert module(torch.ones(3))[0].tolist() == [1, 2, 3]


def test_fake_constants_are_refused():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        value, hidden = mode.from_tensor(torch.ones(3)), mode.from_tensor(torch.ones(3))
        gm = dynamo_like(lambda gm, x: gm.graph.call_function(lambda a: a + hidden, (x,)), value)
        with pytest.raises(CannotCapture) as caught:
            capture(gm, [value])
    assert caught.value.id == "fake-constant"


def test_unexpected_errors_become_refusals():
    gm = dynamo_like(lambda gm, x: gm.graph.call_function(torch.matmul, (x, "no tensor")), torch.empty(2))
    with pytest.raises(CannotCapture) as caught:
        capture(gm, [torch.empty(2)])
    assert caught.value.id == "not-traceable" and "\n" not in caught.value.reason


def test_custom_ops_stay_whole():
    @torch.library.custom_op("turbogr_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, g: g * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = check(lambda x: twice(x).sum(), (f64(3),))
    assert torch.ops.turbogr_test.twice.default in backend.targets


@pytest.mark.parametrize(
    ("name", "readable"),
    [
        ("l_ids_", "ids"),
        ("l_self_modules_layers_modules_0_modules_norm_parameters_weight_", "layers_0_norm_weight"),
        ("l_self_modules_norm_buffers_running_mean_", "norm_running_mean"),
        ("l_model_modules_items_parameters_weight_", "model_items_weight"),
        ("l_batch_past_ids_", "batch_past_ids"),
        ("l_0_", "l_0_"),
        ("s77", "s77"),
    ],
)
def test_inputs_are_named_as_the_user_would(name, readable):
    assert readable_name(name) == readable
