"""Packed training under everything that surrounds a model: precision, gradient modes, checkpoints, sizes, threads.

Each case compares with eager under the same surroundings, and with it that packing really happened: attention became
jagged, and no batch fell back.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import turbogr_compile
from turbogr_compile import GraphRun, Instrument, Role
from turbogr_compile.runtime.statistics import statistics
from turbogr_compile.testing import Flops

ITEMS, DIM, HEADS, LAYERS, B, N = 40, 16, 2, 2, 4, 12
ROADS = {"eager": {"target": "eager"}, "aten": {"codegen": "aten"}}
both_roads = pytest.mark.parametrize("road", ROADS)


# --- models ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Softmax attention over earlier valid keys, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        B, N, _ = x.shape
        q, k, v = (t.reshape(B, N, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        causal = torch.ones(N, N, dtype=torch.bool, device=x.device).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=causal & valid[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).reshape(B, N, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Pointwise(nn.Module):
    """SiLU attention with a relative position bias, as HSTU has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.uvqk, self.out = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)
        self.bias = nn.Parameter(0.1 * torch.randn(4 * N - 1))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        B, N, _ = x.shape
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, -1)
        q, k, v = (t.reshape(B, N, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        column = torch.arange(N, device=x.device)
        bias = self.bias[column[:, None] - column[None, :] + self.bias.numel() // 2]
        causal = torch.ones(N, N, dtype=torch.bool, device=x.device).tril()
        weights = F.silu(q @ k.transpose(-1, -2) + bias) / N * (causal & valid[:, None, None, :])
        mixed = (weights @ v).transpose(1, 2).reshape(B, N, -1)
        return x + self.out(u * self.out_norm(mixed))


class Recommender(nn.Module):
    def __init__(self, layer: type[nn.Module], around: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, DIM, padding_idx=0)
        self.positions = nn.Embedding(2 * N, DIM)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.around = around  # how a layer is called

    def encode(self, x: Tensor, valid: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = self.around(layer, x, valid) if self.around else layer(x, valid)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encode(self.items(ids), ids != 0)

    def score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = hidden @ self.items.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.score(self(ids), targets)

    def loss_of_embedded(self, x: Tensor, valid: Tensor, targets: Tensor) -> Tensor:
        return self.score(self.encode(x, valid), targets)


LAYER = {"softmax": Block, "silu": Pointwise}
both_layers = pytest.mark.parametrize("layer", LAYER)
# What is under test is not the layer: the other one is for `make test-all`.
one_layer = pytest.mark.parametrize("layer", ["silu", pytest.param("softmax", marks=pytest.mark.slow)])
# Each layer once and each road once.
layers_and_roads = pytest.mark.parametrize(
    ("layer", "road"),
    [
        ("softmax", "eager"),
        ("silu", "aten"),
        pytest.param("softmax", "aten", marks=pytest.mark.slow),
        pytest.param("silu", "eager", marks=pytest.mark.slow),
    ],
)


def recommender(layer: str, around: Callable[..., Tensor] | None = None) -> Recommender:
    torch.manual_seed(7)
    return Recommender(LAYER[layer], around)


def batch(seed: int = 0, b: int = B, n: int = N) -> tuple[Tensor, Tensor]:
    """Ids padded on the right with 0, and the item that follows each."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max(n // 2, 1) + 1, (b, 1), generator=g)
    items = torch.randint(1, ITEMS + 1, (b, n + 1), generator=g)
    valid = torch.arange(n) < lengths
    return torch.where(valid, items[:, :-1], 0), torch.where(valid, items[:, 1:], 0)


# --- comparing -------------------------------------------------------------------------------------------


class Attentions(Instrument):
    """How many jagged attentions each captured graph has after its passes."""

    def __init__(self) -> None:
        self.per_graph: list[int] = []

    def finish(self, run: GraphRun) -> None:
        if run.role is Role.CAPTURED:
            op = torch.ops.turbogr.jagged_attention.default
            self.per_graph.append(len(run.graph.find_nodes(op="call_function", target=op)))


class Packed:
    """Functions compiled in one test: what their graphs became and how their calls went."""

    def __init__(self) -> None:
        self.attentions = Attentions()
        self._others = set(map(id, statistics()))
        self._kept: list[Any] = []

    def compile(self, fn: Any, road: str, dynamic: bool | None = None, **options: Any) -> Any:
        compiled = turbogr_compile.compile(
            fn, dynamic=dynamic, on_error="raise", instruments=(self.attentions,), **ROADS[road], **options
        )
        self._kept.append(compiled)
        return compiled

    @property
    def fallbacks(self) -> dict[str, int]:
        return {r: c for s in statistics() if id(s) not in self._others for r, c in s.fallbacks.items()}

    def check(self) -> None:
        """Every graph is packed, and so was every batch. Dynamo may compile a graph with symbols twice."""
        assert self.attentions.per_graph and set(self.attentions.per_graph) == {LAYERS}, self.attentions.per_graph
        assert not self.fallbacks


@pytest.fixture
def packed() -> Iterator[Packed]:
    torch._dynamo.reset()
    gc.collect()
    yield Packed()
    torch._dynamo.reset()


def trained(loss_of: Callable[..., Tensor], model: nn.Module, *args: Any) -> dict[str, Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(*args)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def assert_close(expected: dict[str, Tensor], actual: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Relative to the largest value of each tensor, and to a thousandth of the largest of all."""
    assert expected.keys() == actual.keys()
    largest = max(v.abs().max().item() for v in expected.values())
    for name, wanted in expected.items():
        found = actual[name]
        assert found.dtype == wanted.dtype, name
        allowed = tolerance * max(wanted.abs().max().item(), 1e-3 * largest)
        assert (wanted.double() - found.double()).abs().max().item() <= allowed, name


def compare(packed: Packed, model: Recommender, road: str, *args: Any, tolerance: float = 1e-5, **options: Any) -> None:
    reference = copy.deepcopy(model)
    compiled = packed.compile(model.loss, road, **options)
    assert_close(trained(reference.loss, reference, *args), trained(compiled, model, *args), tolerance)


# --- precision -------------------------------------------------------------------------------------------


@one_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("road, where", [("eager", "around"), ("aten", "around"), ("aten", "inside")])
def test_autocast(packed: Packed, layer: str, road: str, dtype: torch.dtype, where: str) -> None:
    """Autocast halves differ by rounding from each other, and no more from full precision than eager's do."""
    model, reference = recommender(layer), recommender(layer)
    exact = trained(reference.loss, reference, *batch())

    def inside(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model.loss(*args)

    compiled = packed.compile(inside if where == "inside" else model.loss, road)

    def around(*args: Tensor) -> Tensor:
        if where == "inside":
            return compiled(*args)
        with torch.autocast("cpu", dtype):
            return compiled(*args)

    def eager(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return reference.loss(*args)

    expected, found = trained(eager, reference, *batch()), trained(around, model, *batch())
    packed.check()
    for name, wanted in expected.items():
        assert found[name].dtype == wanted.dtype, name
        scale = exact[name].abs().max()
        mine, theirs = ((x[name] - exact[name]).abs().max() / scale for x in (found, expected))
        assert mine <= 3 * theirs + 16 * torch.finfo(dtype).eps, (name, mine, theirs)


@pytest.mark.parametrize("op", [F.prelu, torch.linalg.vecdot])
def test_masks_that_autocast_leaves_alone(op: Callable[..., Tensor]) -> None:
    """Rows are told as the program says, also where whoever calls it has autocast on: bfloat16 has no 257."""
    table, put = torch.randn(300, DIM, requires_grad=True), torch.randn(DIM, DIM)
    ids = torch.tensor([[250, 257, 0, 0], [259, 255, 257, 0]])

    def step(ids: Tensor, table: Tensor) -> Tensor:
        x = F.embedding(ids, table) @ put
        with torch.autocast("cpu", enabled=False):
            numbers = ids.float() if op is F.prelu else ids.float()[..., None]
            valid = op(numbers, numbers.new_ones(1)) > 256
        return ((x.float().tanh() + 1) * valid[..., None]).sum()

    torch._dynamo.reset()
    others = turbogr_compile.statistics()  # what other tests left behind
    run = turbogr_compile.compile(step, target="eager", on_error="raise", worth="always", verify="fast")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(ids, table), step(ids, table))
    (mine,) = (s for s in turbogr_compile.statistics() if not any(s is other for other in others))
    assert (mine.calls, mine.fallbacks) == (1, {})


@pytest.mark.parametrize("projected", [False, True], ids=["rows", "projected"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_under_autocast(kind: type[nn.RNNBase], projected: bool) -> None:
    """Packed as without autocast, of eager's types, and no further from full precision."""
    torch.manual_seed(0)
    items, put, layer = nn.Embedding(ITEMS + 1, DIM), nn.Linear(DIM, DIM), kind(DIM, DIM, 2, batch_first=True)
    parameters = [*items.parameters(), *layer.parameters()]
    ids, targets = batch()

    def step(ids: Tensor, targets: Tensor, cast: bool) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            x = items(ids)
            states, _ = layer(put(x) if projected else x)
            scores = (states @ items.weight.T).float()
            return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=0), states[:, :1]

    def gradients(loss_of: Callable[..., tuple[Tensor, Tensor]], cast: bool) -> tuple[list[Tensor], torch.dtype]:
        loss, states = loss_of(ids, targets, cast)
        return [*torch.autograd.grad(loss, parameters), loss.detach()], states.dtype

    torch._dynamo.reset()
    # What waits has the type that torch's fake of the layer says, which is not always that of the layer.
    run = turbogr_compile.compile(step, target="eager", on_error="raise", deferral=False)
    executed = []
    for cast in (False, True):
        gradients(run, cast)
        with Flops() as flops:
            found, kind_of = gradients(run, cast)
        executed.append(flops.total)
        (exact, _), (expected, wanted) = gradients(step, False), gradients(step, cast)
        assert kind_of == wanted
        for x, y, z in zip(found, expected, exact, strict=True):
            mine, theirs = ((t - z).abs().max() / z.abs().max() for t in (x, y))
            assert mine <= 3 * theirs + 16 * torch.finfo(torch.bfloat16 if cast else torch.float32).eps
    assert executed[0] == executed[1]


@both_roads
@one_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=["f64", "bf16", "fp16"])
def test_model_of_another_type(packed: Packed, layer: str, road: str, dtype: torch.dtype) -> None:
    model = recommender(layer).to(dtype)
    compare(packed, model, road, *batch(), tolerance=max(1e-12, 32 * torch.finfo(dtype).eps))
    packed.check()


# --- gradient modes --------------------------------------------------------------------------------------


@both_roads
@one_layer
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no-grad", "inference"])
def test_without_gradients(packed: Packed, layer: str, road: str, mode: Callable[[], Any]) -> None:
    model = recommender(layer).eval()
    compiled = packed.compile(model.loss, road)
    with mode():
        for seed in range(3):
            torch.testing.assert_close(compiled(*batch(seed)), model.loss(*batch(seed)))
    packed.check()


@both_roads
def test_evaluation_then_training(packed: Packed, road: str) -> None:
    model = recommender("silu")
    reference = copy.deepcopy(model)
    compiled = packed.compile(model.loss, road)
    for seed in range(2):
        with torch.no_grad():
            torch.testing.assert_close(compiled(*batch(seed)), reference.loss(*batch(seed)))
        assert_close(trained(reference.loss, reference, *batch(seed)), trained(compiled, model, *batch(seed)))
    packed.check()


@both_roads
@one_layer
def test_gradients_accumulate(packed: Packed, layer: str, road: str) -> None:
    model = recommender(layer)
    reference = copy.deepcopy(model)
    compiled = packed.compile(model.loss, road)
    for seed in range(4):
        (reference.loss(*batch(seed)) / 4).backward()
        (compiled(*batch(seed)) / 4).backward()
    assert_close(*({n: p.grad for n, p in m.named_parameters()} for m in (reference, model)))
    packed.check()


@both_roads
def test_two_steps_before_one_backward(packed: Packed, road: str) -> None:
    """What the backward of a batch needs is its own, not that of the last call."""
    model = recommender("softmax")
    reference = copy.deepcopy(model)
    compiled = packed.compile(model.loss, road)
    pairs = [
        trained(lambda a, b, f=f: f(*a) + 2 * f(*b), m, batch(1), batch(2))
        for f, m in ((reference.loss, reference), (compiled, model))
    ]
    assert_close(*pairs)
    packed.check()


@both_roads
@one_layer
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_the_model(packed: Packed, layer: str, road: str, reentrant: bool) -> None:
    """Capture has checkpointed parts inlined or refuses them; either way results are eager's."""

    def around(layer: nn.Module, x: Tensor, valid: Tensor) -> Tensor:
        return checkpoint(layer, x, valid, use_reentrant=reentrant)

    model = recommender(layer, around)
    compare(packed, model, road, *batch())
    assert not packed.fallbacks


@layers_and_roads
def test_checkpoint_around_the_compiled_step(packed: Packed, layer: str, road: str) -> None:
    model = recommender(layer)
    reference = copy.deepcopy(model)
    compiled = packed.compile(model.loss, road)
    actual = trained(lambda *a: checkpoint(compiled, *a, use_reentrant=False), model, *batch())
    assert_close(trained(reference.loss, reference, *batch()), actual)
    packed.check()


@layers_and_roads
def test_frozen_parameters(packed: Packed, layer: str, road: str) -> None:
    model = recommender(layer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or name == "norm.weight")
    compare(packed, model, road, *batch())
    packed.check()


@layers_and_roads
def test_embedded_rows_as_input(packed: Packed, layer: str, road: str) -> None:
    """A padded float input that requires a gradient: rows that nothing reads have a zero gradient, as in eager."""
    model = recommender(layer)
    ids, targets = batch()
    given = torch.randn(B, N, DIM, generator=torch.Generator().manual_seed(3))

    def step(loss_of: Callable[..., Tensor]) -> dict[str, Tensor]:
        x = given.clone().requires_grad_()
        found = trained(loss_of, model, x, ids != 0, targets)
        assert x.grad is not None
        return {**found, "x": x.grad}

    expected = {n: v.clone() for n, v in step(model.loss_of_embedded).items()}
    assert_close(expected, step(packed.compile(model.loss_of_embedded, road)))
    assert not expected["x"][ids == 0].any()
    packed.check()


@both_roads
def test_a_gradient_of_a_gradient_is_eagers_or_an_error(packed: Packed, road: str) -> None:
    model = recommender("silu")
    ids, targets = batch()

    def penalty(loss_of: Callable[..., Tensor]) -> Tensor:
        (g,) = torch.autograd.grad(loss_of(ids, targets), [model.items.weight], create_graph=True)
        return torch.autograd.grad(g.square().sum(), [model.items.weight])[0]

    expected = penalty(model.loss)
    try:
        actual = penalty(packed.compile(model.loss, road))
    except (RuntimeError, NotImplementedError):
        return
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


# --- sizes and layouts -----------------------------------------------------------------------------------


@both_roads
@one_layer
def test_symbolic_sizes(packed: Packed, layer: str, road: str) -> None:
    model = recommender(layer)
    reference = copy.deepcopy(model)
    compiled = packed.compile(model.loss, road, dynamic=True)
    for seed, (b, n) in enumerate([(4, 12), (3, 9), (7, 16), (2, 5)]):
        args = batch(seed, b, n)
        assert_close(trained(reference.loss, reference, *args), trained(compiled, model, *args))
    packed.check()


@both_roads
def test_sizes_that_turn_out_to_change(packed: Packed, road: str) -> None:
    """Compiled for one size first; Dynamo compiles again with symbols."""
    model = recommender("softmax")
    reference = copy.deepcopy(model)
    compiled = packed.compile(model.loss, road)
    for seed, (b, n) in enumerate([(4, 12), (4, 9), (6, 16), (4, 12)]):
        args = batch(seed, b, n)
        assert_close(trained(reference.loss, reference, *args), trained(compiled, model, *args))
    packed.check()


@one_layer
@pytest.mark.parametrize("b, n", [(1, N), (B, 1), (1, 1), (B, 2)])
def test_smallest_sizes(packed: Packed, layer: str, b: int, n: int) -> None:
    """Nothing is padded in some of these: what matters is that results are eager's."""
    compare(packed, recommender(layer), "aten", *batch(0, b, n))


@layers_and_roads
def test_inputs_that_are_not_contiguous(packed: Packed, layer: str, road: str) -> None:
    ids, targets = batch(0, B, N)
    across = ids.T.contiguous().T
    every_other = torch.stack([targets, targets + 1], -1).flatten(1)[:, ::2]
    assert not across.is_contiguous() and not every_other.is_contiguous()
    compare(packed, recommender(layer), road, across, every_other)
    packed.check()


@both_roads
def test_narrow_ids(packed: Packed, road: str) -> None:
    ids, targets = batch()
    compare(packed, recommender("softmax"), road, ids.int(), targets)
    packed.check()


# --- life of a program -----------------------------------------------------------------------------------


@layers_and_roads
def test_training_takes_the_same_course(packed: Packed, layer: str, road: str) -> None:
    model = recommender(layer)
    reference = copy.deepcopy(model)
    compiled = packed.compile(model.loss, road)
    courses = []
    for loss_of, trainee in ((reference.loss, reference), (compiled, model)):
        optimizer = torch.optim.AdamW(trainee.parameters(), lr=1e-2)
        losses = []
        for step in range(20):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(*batch(step % 5))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        courses.append(losses)
    assert courses[0][-1] < 0.5 * courses[0][0]
    assert courses[1] == pytest.approx(courses[0], rel=2e-3)
    packed.check()


@both_roads
def test_copied_model(packed: Packed, road: str) -> None:
    """A copy of a compiled module has parameters of its own."""
    model = recommender("silu")
    compiled = packed.compile(model, road, padded_outputs="unspecified")
    compiled(batch()[0]).sum().backward()
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        other.items.weight.mul_(2)
    ids = batch(1)[0]
    valid = ids != 0
    torch.testing.assert_close(other(ids)[valid], copy.deepcopy(other)._orig_mod(ids)[valid])
    torch.testing.assert_close(compiled(ids)[valid], model(ids)[valid])


@layers_and_roads
def test_strict_outputs(packed: Packed, layer: str, road: str) -> None:
    """The model alone, loss outside: pad rows of the result are eager's too."""
    model = recommender(layer)
    reference = copy.deepcopy(model)
    compiled = packed.compile(model, road)
    torch.testing.assert_close(compiled(batch()[0]), reference(batch()[0]))
    expected = trained(lambda i, t: reference.score(reference(i), t), reference, *batch())
    assert_close(expected, trained(lambda i, t: model.score(compiled(i), t), model, *batch()))
    assert not packed.fallbacks


@layers_and_roads
def test_unspecified_outputs(packed: Packed, layer: str, road: str) -> None:
    model = recommender(layer)
    reference = copy.deepcopy(model)
    compiled = packed.compile(model, road, padded_outputs="unspecified")
    ids = batch()[0]
    torch.testing.assert_close(compiled(ids)[ids != 0], reference(ids)[ids != 0])
    expected = trained(lambda i, t: reference.score(reference(i), t), reference, *batch())
    assert_close(expected, trained(lambda i, t: model.score(compiled(i), t), model, *batch()))
    packed.check()


@both_roads
def test_two_models_in_turns(packed: Packed, road: str) -> None:
    models = [recommender("softmax"), recommender("silu")]
    references = [copy.deepcopy(m) for m in models]
    compiled = [packed.compile(m.loss, road) for m in models]
    for seed in range(3):
        for model, reference, run in zip(models, references, compiled, strict=True):
            assert_close(trained(reference.loss, reference, *batch(seed)), trained(run, model, *batch(seed)))
    packed.check()


@both_roads
def test_threads_share_compiled_code(packed: Packed, road: str) -> None:
    """Row indices of one thread's batch are not those of another's."""
    model = recommender("softmax")
    batches = [batch(seed) for seed in range(8)]
    with torch.no_grad():
        expected = [model.loss(*b) for b in batches]
    compiled = packed.compile(model.loss, road)
    with torch.no_grad():
        compiled(*batches[0])
    wrong: list[str] = []

    def work(start: int) -> None:
        with torch.no_grad():
            for i in range(24):
                which = (start + i) % len(batches)
                found = compiled(*batches[which])
                if not torch.allclose(found, expected[which]):
                    wrong.append(f"batch {which}: {found} instead of {expected[which]}")

    threads = [threading.Thread(target=work, args=(2 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, "\n".join(wrong[:3])
    packed.check()


def test_another_process_gives_the_same_loss(packed: Packed) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from packing import test_modes as t\n"
        "print(t.loss_and_a_gradient(t.Packed()))\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[1])]
    elsewhere = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    here = loss_and_a_gradient(packed)
    assert elsewhere.strip() == here
    model = recommender("silu")
    expected = trained(model.loss, model, *batch())
    assert tuple(map(float, here.split())) == pytest.approx(
        (expected["loss"].item(), expected["items.weight"].abs().sum().item()), rel=1e-4
    )


def loss_and_a_gradient(packed: Packed) -> str:
    """All digits of both."""
    model = recommender("silu")
    found = trained(packed.compile(model.loss, "aten"), model, *batch())
    return f"{found['loss'].item()} {found['items.weight'].abs().sum().item()}"


# --- Inductor --------------------------------------------------------------------------------------------


@pytest.mark.slow
@both_layers
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(packed: Packed, layer: str, dynamic: bool) -> None:
    model = recommender(layer)
    reference = copy.deepcopy(model)
    compiled = turbogr_compile.compile(
        model.loss, dynamic=dynamic, on_error="raise", codegen="inductor", instruments=(packed.attentions,)
    )
    for seed in range(3):
        assert_close(trained(reference.loss, reference, *batch(seed)), trained(compiled, model, *batch(seed)), 1e-4)
    packed.check()


@pytest.mark.slow
@both_layers
def test_inductor_under_autocast(packed: Packed, layer: str) -> None:
    model, reference = recommender(layer), recommender(layer)
    compiled = turbogr_compile.compile(
        model.loss, on_error="raise", codegen="inductor", instruments=(packed.attentions,)
    )

    def cast(loss_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss_of(*args)

        return run

    expected, found = trained(cast(reference.loss), reference, *batch()), trained(cast(compiled), model, *batch())
    packed.check()
    assert found["loss"].item() == pytest.approx(expected["loss"].item(), rel=2e-2)
