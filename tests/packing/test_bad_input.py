"""Inputs that no data loader should deliver: what eager gives, or the error that eager raises; never anything else.

Packing turns data into indices. Whatever the data says, an index must not leave its tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import turbogr_compile
from turbogr_compile.runtime.statistics import statistics
from turbogr_compile.testing import Flops

ITEMS, DIM, B, N = 30, 8, 4, 10
ROADS = {"eager": {"target": "eager"}, "aten": {"codegen": "aten"}}
both_roads = pytest.mark.parametrize("road", ROADS)
one_road = pytest.mark.parametrize("road", ["eager"])  # where the target makes no difference


class Model(nn.Module):
    """One layer of attention; how validity reaches it differs per method."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, DIM)
        self.positions = nn.Embedding(N, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.register_buffer("causal", torch.ones(N, N, dtype=torch.bool).tril())

    def attend(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / DIM**0.5).masked_fill(~visible, -1e9)
        return x + self.out(scores.softmax(-1) @ v)

    def score(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((x @ self.items.weight.T).flatten(0, 1), targets.flatten(), ignore_index=-100)

    def by_ids(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.items(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.score(self.attend(x, self.causal & (ids != 0)[:, None, :]), targets)

    def by_lengths(self, ids: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        x = (self.items(ids) + self.positions(torch.arange(ids.shape[1]))) * valid.unsqueeze(-1)
        x = self.attend(x, self.causal & valid[:, None, :])
        loss = F.cross_entropy((x @ self.items.weight.T).transpose(1, 2), targets.clamp(min=0), reduction="none")
        return (loss * valid).sum() / valid.sum().clamp(min=1)

    def last_row(self, ids: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        x = self.attend(self.items(ids), self.causal & valid[:, None, :])
        last = x[torch.arange(len(ids)), lengths - 1]
        return F.cross_entropy(last @ self.items.weight.T, label)

    def gathered_row(self, ids: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        x = self.attend(self.items(ids), self.causal & valid[:, None, :])
        last = x.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, DIM)).squeeze(1)
        return F.cross_entropy(last @ self.items.weight.T, label)

    def by_mask(self, x: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        return self.score(self.attend(x, self.causal & (mask != 0)[:, None, :]), targets)

    def by_factor(self, x: Tensor, mask: Tensor) -> Tensor:
        """A 0/1 mask multiplies: pads count nothing."""
        x = x + self.out(torch.tanh(self.qkv(x)[..., :DIM]))
        return (x.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)

    def by_key_factor(self, x: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """The mask as a penalty of -1e9 per missing unit."""
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) + (1.0 - mask[:, None, :]) * -1e9
        scores = scores.masked_fill(~self.causal, -1e9)
        return self.score(x + self.out(scores.softmax(-1) @ v), targets)


class Batch:
    """A good batch, to be spoilt."""

    def __init__(self, seed: int = 0, b: int = B) -> None:
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, N // 2, (b,), generator=g)
        self.valid = torch.arange(N) < self.lengths[:, None]
        items = torch.randint(1, ITEMS + 1, (b, N), generator=g)
        self.ids = torch.where(self.valid, items, 0)
        self.targets = torch.where(self.valid, items.roll(1, 1), -100)
        self.label = items[:, 0]
        self.x = torch.randn(b, N, DIM, generator=g)


# --- running both ----------------------------------------------------------------------------------------


def outcome(loss_of: Callable[..., Tensor], model: Model, args: tuple[Tensor, ...]) -> Any:
    """Loss and gradients, or the error."""
    model.zero_grad(set_to_none=True)
    try:
        loss = loss_of(*args)
        loss.backward()
    except Exception as error:
        return error
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


class Both:
    """A model in eager, and one method of its copy compiled."""

    def __init__(self, method: str, road: str) -> None:
        torch.manual_seed(1)
        self.method, self.eager = method, Model()
        self.model = copy.deepcopy(self.eager)
        self._others = set(map(id, statistics()))
        self.run = turbogr_compile.compile(getattr(self.model, method), on_error="raise", **ROADS[road])
        self._earlier = 0

    def again(self) -> Both:
        """The same compiled code for another test; fallbacks are counted from now on."""
        self._earlier += self.fallbacks
        return self

    @property
    def fallbacks(self) -> int:
        return sum(sum(s.fallbacks.values()) for s in statistics() if id(s) not in self._others) - self._earlier

    def same(self, *args: Tensor, where_finite: bool = False) -> Any:
        """Eager's outcome; the compiled one must be the same: numbers, not-a-numbers, or an error.

        `where_finite`: only numbers count. What eager turns into nan on rows that nobody reads is never computed.
        """
        expected = outcome(getattr(self.eager, self.method), self.eager, args)
        actual = outcome(self.run, self.model, args)
        if isinstance(expected, Exception):
            assert isinstance(actual, Exception), f"eager raises {expected!r}, compiled code gives {actual['loss']}"
            return expected
        if isinstance(actual, Exception):
            raise actual
        for name, wanted in expected.items():
            counts = wanted.isfinite() if where_finite else torch.ones_like(wanted, dtype=torch.bool)
            found, wanted = actual[name][counts], wanted[counts]
            text = f"{name}: {found} instead of {wanted}"
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, equal_nan=True, msg=text)
        return expected


@pytest.fixture
def both(road: str) -> Iterator[Callable[[str], Both]]:
    """Compiled by the first batch of the test."""
    compiled.clear()
    torch._dynamo.reset()
    yield lambda method: Both(method, road)
    torch._dynamo.reset()


compiled: dict[tuple[str, str], Both] = {}


@pytest.fixture
def seen(road: str) -> Callable[[str], Both]:
    """Compiled by a good batch, which is the first of each of these tests; then they share what was compiled."""

    def pair(method: str) -> Both:
        if (method, road) not in compiled:
            compiled[method, road] = Both(method, road)
        return compiled[method, road].again()

    return pair


# --- lengths ---------------------------------------------------------------------------------------------


@one_road
@pytest.mark.parametrize("bad", [N, N + 1, 10 * N, 2**40, 0, -1, -N, -(2**40)])
def test_lengths_of_a_mask(seen: Any, bad: int) -> None:
    """`arange < length` takes any number: rows end where the batch ends."""
    pair, good = seen("by_lengths"), Batch()
    pair.same(good.ids, good.lengths, good.targets)
    lengths = good.lengths.clone()
    lengths[1] = bad
    pair.same(good.ids, lengths, good.targets)
    pair.same(good.ids, torch.full_like(lengths, bad), good.targets)
    pair.same(good.ids, good.lengths, good.targets)
    assert pair.fallbacks <= 1


@both_roads
@pytest.mark.parametrize("method", ["last_row", "gathered_row"])
@pytest.mark.parametrize("bad", [N, N + 1, 10 * N, 0, -1, -N - 1])
def test_lengths_as_an_index(seen: Any, method: str, bad: int) -> None:
    """`length - 1` is an index: eager wraps the negative ones of advanced indexing and raises for what is outside."""
    pair, good = seen(method), Batch()
    pair.same(good.ids, good.lengths, good.label)
    lengths = good.lengths.clone()
    lengths[1] = bad
    found = pair.same(good.ids, lengths, good.label)
    assert isinstance(found, Exception) == (bad > N or bad - 1 < (-N if method == "last_row" else 0))


@one_road
def test_bad_lengths_at_first(both: Any) -> None:
    """What is seen while compiling is bad; later batches are not."""
    pair, good = both("by_lengths"), Batch()
    pair.same(good.ids, torch.full_like(good.lengths, N + 3), good.targets)
    pair.same(good.ids, -good.lengths, good.targets)
    pair.same(good.ids, good.lengths, good.targets)


# --- masks -----------------------------------------------------------------------------------------------


@one_road
@pytest.mark.parametrize("shape", [(B, N - 1), (B, N + 1), (B - 1, N), (N,), (B, N, 1), (B, 1)])
def test_mask_of_another_shape(both: Any, shape: tuple[int, ...]) -> None:
    """Some broadcast, some raise: as in eager, whether or not a good one came first."""
    pair, good = both("by_mask"), Batch()
    pair.same(good.x, torch.ones(shape, dtype=torch.bool), good.targets)
    pair.same(good.x, good.valid, good.targets)
    pair.same(good.x, torch.ones(shape, dtype=torch.bool), good.targets)


@one_road
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
def test_mask_of_another_type(both: Any, dtype: torch.dtype) -> None:
    pair, good = both("by_mask"), Batch()
    pair.same(good.x, good.valid, good.targets)
    pair.same(good.x, good.valid.to(dtype), good.targets)
    pair.same(good.x, good.valid.to(dtype) * 2, good.targets)


@one_road
@pytest.mark.parametrize("method", ["by_factor", "by_key_factor"])
@pytest.mark.parametrize("value", [2.0, 0.5, -1.0, float("nan"), float("inf")])
def test_mask_that_later_holds_other_numbers(seen: Any, method: str, value: float) -> None:
    """Compiled when it held 0 and 1 only."""
    pair, good = seen(method), Batch()
    rest = (good.targets,) if method == "by_key_factor" else ()
    mask = good.valid.float()
    for _ in range(2):
        pair.same(good.x, mask, *rest)
    spoilt = mask.clone()
    spoilt[1, -1] = value
    pair.same(good.x, spoilt, *rest)
    pair.same(good.x, mask, *rest)


# --- values ----------------------------------------------------------------------------------------------


@one_road
@pytest.mark.parametrize("method", ["by_mask", "by_factor", "by_key_factor"])
@pytest.mark.parametrize(
    "value, where",
    [
        (float("nan"), "pad"),
        (float("inf"), "pad"),
        (-float("inf"), "pad"),
        (1e30, "pad"),
        (float("nan"), "row"),
        (float("inf"), "row"),
    ],
)
def test_values_that_are_not_finite(seen: Any, method: str, value: float, where: str) -> None:
    """0 * nan is nan: pads with such values reach the loss in eager, and so they must.
    A finite pad that overflows on the way to the loss need not."""
    pair, good = seen(method), Batch()
    rest = () if method == "by_factor" else (good.targets,)
    mask = good.valid if method == "by_mask" else good.valid.float()
    pair.same(good.x, mask, *rest)
    spoilt = good.x.clone()
    spoilt[1, -1 if where == "pad" else 0] = value
    pair.same(spoilt, mask, *rest, where_finite=value == 1e30)
    pair.same(good.x, mask, *rest)


@one_road
@pytest.mark.parametrize("where", ["pad", "row"])
def test_parameters_that_are_not_finite(both: Any, where: str) -> None:
    """The row of the pad id, or of an item, holds nan."""
    pair, good = both("by_ids"), Batch()
    pair.same(good.ids, good.targets)
    spoilt = 0 if where == "pad" else int(good.ids[0, 0])
    with torch.no_grad():
        for model in (pair.eager, pair.model):
            model.items.weight[spoilt] = float("nan")
    found = pair.same(good.ids, good.targets, where_finite=True)
    assert found["loss"].isnan() and outcome(pair.run, pair.model, (good.ids, good.targets))["loss"].isnan()


@both_roads
@pytest.mark.parametrize("bad", [ITEMS + 1, 10**6, -1, -(10**6), 2**40])
@pytest.mark.parametrize("where", ["row", "pad"])
def test_ids_out_of_range(seen: Any, bad: int, where: str) -> None:
    """Eager raises. A pad with such an id may be skipped, since nothing reads it: an error or the finite result."""
    pair, good = seen("by_lengths"), Batch()
    pair.same(good.ids, good.lengths, good.targets)
    ids = good.ids.clone()
    ids[1, 0 if where == "row" else -1] = bad
    if where == "row":
        assert isinstance(pair.same(ids, good.lengths, good.targets), IndexError)
    else:
        clean = outcome(pair.eager.by_lengths, pair.eager, (good.ids, good.lengths, good.targets))
        actual = outcome(pair.run, pair.model, (ids, good.lengths, good.targets))
        assert isinstance(actual, IndexError) or torch.isclose(actual["loss"], clean["loss"])
    pair.same(good.ids, good.lengths, good.targets)


@one_road
@pytest.mark.parametrize("bad", [ITEMS + 1, -1, 10**6])
def test_targets_out_of_range(seen: Any, bad: int) -> None:
    pair, good = seen("by_ids"), Batch()
    pair.same(good.ids, good.targets)
    targets = good.targets.clone()
    targets[1, 0] = bad
    assert isinstance(pair.same(good.ids, targets), Exception)
    pair.same(good.ids, good.targets)


# --- empty batches ---------------------------------------------------------------------------------------


@both_roads
@pytest.mark.parametrize("first", ["good", "empty"])
def test_all_rows_are_pads(both: Any, first: str) -> None:
    pair, good = both("by_ids"), Batch()
    empty = torch.zeros_like(good.ids), torch.full_like(good.targets, -100)
    batches = [(good.ids, good.targets), empty, (good.ids, good.targets), empty]
    for args in batches if first == "good" else batches[1:]:
        pair.same(*args)


@both_roads
@pytest.mark.parametrize("first", [B, 0])
def test_no_sequence_at_all(both: Any, first: int) -> None:
    """A mean over nothing is nan, in eager too."""
    pair = both("by_lengths")
    for b in (first, B - first, B, 0):
        batch = Batch(0, b)
        pair.same(batch.ids, batch.lengths, batch.targets)


# --- what the program changes after compiling ---------------------------------------------------------------


@both_roads
@pytest.mark.parametrize("change", ["all", "diagonal", "random"])
def test_causal_buffer_is_overwritten(both: Any, change: str) -> None:
    pair, good = both("by_ids"), Batch()
    pair.same(good.ids, good.targets)
    other = {
        "all": torch.ones(N, N, dtype=torch.bool),
        "diagonal": torch.eye(N, dtype=torch.bool),
        "random": torch.rand(N, N, generator=torch.Generator().manual_seed(0)) > 0.5,
    }[change]
    for model in (pair.eager, pair.model):
        model.causal.copy_(other)
    pair.same(good.ids, good.targets)
    for model in (pair.eager, pair.model):
        model.causal.copy_(torch.ones(N, N, dtype=torch.bool).tril())
    pair.same(good.ids, good.targets)


@one_road
def test_causal_buffer_is_replaced(both: Any) -> None:
    pair, good = both("by_ids"), Batch()
    pair.same(good.ids, good.targets)
    for model in (pair.eager, pair.model):
        model.causal = torch.ones(N, N, dtype=torch.bool)
    pair.same(good.ids, good.targets)


@both_roads
def test_inputs_are_written_between_forward_and_backward(both: Any) -> None:
    """Eager does not read ids again, or raises if it does; packed code may not read rows that were never there."""
    pair, good = both("by_ids"), Batch()
    pair.same(good.ids, good.targets)

    def gradient(loss_of: Callable[..., Tensor], model: Model) -> Any:
        ids = good.ids.clone()
        model.zero_grad(set_to_none=True)
        loss = loss_of(ids, good.targets)
        ids.zero_()
        try:
            loss.backward()
        except RuntimeError as error:
            return error
        assert model.qkv.weight.grad is not None
        return model.qkv.weight.grad.clone()

    expected, actual = gradient(pair.eager.by_ids, pair.eager), gradient(pair.run, pair.model)
    if not isinstance(expected, Exception) and not isinstance(actual, Exception):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


# --- rows packed by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offsets",
    [[0, 3, 3, 5, 9], [1, 2, 4, 6, 7], [0, 11, 11, 11, 11], [0, 0, 0, 0, 0]],
    ids=["good", "late-start", "longer-than-N", "empty"],
)
def test_offsets_of_hand_packed_rows(offsets: list[int]) -> None:
    """Only where fbgemm is installed. Offsets that decrease or exceed the rows are outside of what its ops define."""
    pytest.importorskip("fbgemm_gpu")
    torch._dynamo.reset()
    ops, layer = torch.ops.fbgemm, nn.Linear(DIM, DIM)

    def by_offsets(rows: Tensor, at: Tensor) -> Tensor:
        x = ops.jagged_to_padded_dense(rows, [at], [N], 0.0)
        packed, _ = ops.dense_to_jagged(torch.tanh(layer(x)), [at], len(rows))
        return packed.square().sum()

    run = turbogr_compile.compile(by_offsets, target="eager", on_error="raise")
    rows = torch.randn(12, DIM, generator=torch.Generator().manual_seed(0))
    for at in (torch.tensor([0, 3, 3, 5, 12]), torch.tensor(offsets)):
        torch.testing.assert_close(run(rows, at), by_offsets(rows, at))


def test_hand_packed_rows_under_autocast() -> None:
    """Only where fbgemm is installed. The padded islands between its ops go, as they do without autocast."""
    pytest.importorskip("fbgemm_gpu")
    ops, layer = torch.ops.fbgemm, nn.Linear(DIM, DIM)
    rows, at = torch.randn(12, DIM, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 3, 5, 12])

    def step(rows: Tensor, at: Tensor, cast: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            x = ops.jagged_to_padded_dense(rows, [at], [N], 0.0)
            packed, _ = ops.dense_to_jagged(torch.tanh(layer(x)), [at], len(rows))
            return packed.square().sum()

    executed = []
    for cast in (False, True):
        torch._dynamo.reset()
        run = turbogr_compile.compile(step, target="eager", on_error="raise")
        results = []
        for loss_of in (run, step, run):
            layer.zero_grad()
            with Flops() as flops:
                loss = loss_of(rows, at, cast)
                loss.backward()
            results.append((loss.detach(), layer.weight.grad))
        torch.testing.assert_close(results[2], results[1], rtol=1e-2, atol=1e-2)
        executed.append(flops.total)
    assert executed[0] == executed[1]
