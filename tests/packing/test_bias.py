"""Biases of attention: by position and by time without a tensor of pairs, however they are written; others as ever."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import turbogr_compile
from turbogr_compile import Instrument, Role
from turbogr_compile.passes.rows.attention.bias import by_distance
from turbogr_compile.passes.rows.attention.times import bucket_bounds

B, N, D, H = 5, 13, 8, 2  # no other size is a multiple of N
PIPELINE = "remove-noops, fold-views, eliminate-common, pack-rows"
# Arguments of turbogr::jagged_attention.
PLACES = {"pairs": 9, "position": 10, "time": 11}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


# --- spellings: by position ------------------------------------------------------------------------------


def distance(n: int = N) -> Tensor:
    at = torch.arange(n)
    return at[:, None] - at[None, :]


class Bias(nn.Module):
    """Adds to scores (B, H, N, N), given times (B, N)."""

    size: tuple[int, ...] = (2 * N - 1,)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(self.size, dtype=torch.float64))


class PadRepeatSlice(Bias):
    """Published HSTU code."""

    def forward(self, times):
        spread = F.pad(self.table[: 2 * N - 1], [0, N]).repeat(N)
        spread = spread[..., :-N].reshape(1, N, 3 * N - 2)
        r = (2 * N - 1) // 2
        return spread[:, :, r:-r].unsqueeze(1)


class Indexed(Bias):
    def forward(self, times):
        return self.table[distance() + N - 1]


class IndexedInALongerTable(Bias):
    size = (101,)

    def forward(self, times):
        return self.table[50 - distance()].expand(times.shape[0], 1, N, N)


class ByHead(Bias):
    size = (H, 2 * N - 1)

    def forward(self, times):
        return self.table[:, distance() + N - 1]


class ByHeadGathered(Bias):
    size = (2 * N - 1, H)

    def forward(self, times):
        flat = (distance() + N - 1).reshape(-1, 1).expand(-1, H)
        return self.table.gather(0, flat).view(N, N, H).permute(2, 0, 1).unsqueeze(0)


class Clipped(Bias):
    """Distances beyond 3 are 3."""

    size = (7, H)

    def forward(self, times):
        return F.embedding(distance().clamp(-3, 3) + 3, self.table).permute(2, 0, 1)[None]


class Buckets(Bias):
    """T5: near distances exactly, far ones logarithmically, the future in buckets of its own."""

    size = (16, H)

    def forward(self, times):
        past = (distance() < 0).long() * 8
        far = distance().abs()
        large = 4 + (torch.log(far.double().clamp(min=1) / 4) / 1.3 * 4).long().clamp(max=3)
        return F.embedding(past + torch.where(far < 4, far, large), self.table).permute([2, 0, 1]).unsqueeze(0)


class Unfolded(Bias):
    def forward(self, times):
        return self.table.unfold(0, N, 1).flip(0)


class Mirrored(Bias):
    """The same for past and future, written without an absolute value."""

    size = (N,)

    def forward(self, times):
        return torch.cat([self.table.flip(0), self.table[1:]])[distance() + N - 1]


class OnlyNear(Bias):
    """Nothing beyond a distance of 4."""

    size = (9,)

    def forward(self, times):
        return F.pad(self.table, [N - 5, N - 5])[distance() + N - 1]


class StackedRows(Bias):
    def forward(self, times):
        return torch.stack([self.table[N - 1 - i : 2 * N - 1 - i] for i in range(N)])


class Scaled(Bias):
    def forward(self, times):
        return 0.25 * (self.table[distance() + N - 1] / 3.0)


class MadeFromTheTable(Bias):
    """The table is a result itself."""

    def forward(self, times):
        return (self.table.tanh() * 2)[distance() + N - 1]


class Frozen(Bias):
    def __init__(self) -> None:
        super().__init__()
        self.table.requires_grad_(False)

    def forward(self, times):
        return self.table[distance() + N - 1]


class TwoTables(Bias):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.randn(5, H, dtype=torch.float64))

    def forward(self, times):
        near = F.embedding(distance().clamp(-2, 2) + 2, self.second).permute(2, 0, 1)
        return self.table[distance() + N - 1] - near


class Slopes(Bias):
    """No table at all."""

    size = ()

    def forward(self, times):
        slopes = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64)
        return self.table * 0 - slopes[:, None, None] * distance().abs()


BY_POSITION = [
    PadRepeatSlice, Indexed, IndexedInALongerTable, ByHead, ByHeadGathered, Clipped, Buckets, Unfolded, Mirrored,
    OnlyNear, Scaled, MadeFromTheTable, Frozen, TwoTables,
]  # fmt: skip


# --- spellings: by time ----------------------------------------------------------------------------------


class Time(Bias):
    size = (24,)

    def gap(self, times: Tensor) -> Tensor:
        return times[:, :, None] - times[:, None, :]

    def buckets(self, times: Tensor) -> Tensor:
        return (torch.log(self.gap(times).abs().clamp(min=1)) / 0.301).long().clamp(0, 23)

    def forward(self, times):
        return self.table[self.buckets(times)].unsqueeze(1)


class TimeOfTheNext(Time):
    """Published HSTU code: row i asks with the time of row i + 1."""

    def gap(self, times):
        extended = torch.cat([times, times[:, N - 1 : N]], dim=1)
        return extended[:, 1:].unsqueeze(2) - extended[:, :-1].unsqueeze(1)

    def forward(self, times):
        flat = torch.index_select(self.table, 0, self.buckets(times).view(-1))
        return flat.view(-1, N, N).unsqueeze(1)


class TimeBackwards(Time):
    """The sign of the difference does not matter."""

    def gap(self, times):
        return times[:, None, :] - times[:, :, None]


class TimeByHead(Time):
    size = (24, H)

    def forward(self, times):
        return F.embedding(self.buckets(times), self.table).permute(0, 3, 1, 2)


class TimeInDays(Time):
    def buckets(self, times):
        return torch.div(self.gap(times).abs(), 86400, rounding_mode="floor").clamp(max=20)


class TimeByRoot(Time):
    """The bucket of equal times is not the first, and the last ones are never reached."""

    def buckets(self, times):
        return ((self.gap(times).abs() + 1).double().sqrt() * 0.01 + 3).floor().int().clamp(max=15)


class TimeOfValidRows(Time):
    """Times of pads are zeroed before the rest."""

    def forward(self, times):
        return super().forward(times * (times > 0))


class TimeAndPosition(TimeOfTheNext):
    def __init__(self) -> None:
        super().__init__()
        self.position = PadRepeatSlice()

    def forward(self, times):
        return (self.position(times) + super().forward(times)) * 0.5


class TimeAndPositionInOne(TimeAndPosition):
    """Published HSTU code: heads are added to the sum."""

    def forward(self, times):
        flat = torch.index_select(self.table, 0, self.buckets(times).view(-1))
        return (self.position(times).squeeze(1) + flat.view(-1, N, N)).unsqueeze(1)


class FlatSum(TimeAndPosition):
    """Summed before anything has the shape of pairs."""

    def forward(self, times):
        flat = torch.index_select(self.table, 0, self.buckets(times).view(-1))
        return (flat * 2 + flat.tanh()).view(-1, 1, N, N) + self.position(times)


BY_TIME = [Time, TimeOfTheNext, TimeBackwards, TimeByHead, TimeInDays, TimeByRoot, TimeOfValidRows]


# --- spellings that need all pairs -----------------------------------------------------------------------


class PairTable(Bias):
    size = (N * N,)

    def forward(self, times):
        return self.table.view(N, N)


class ByKey(Bias):
    size = (N,)

    def forward(self, times):
        return self.table[None, :].expand(N, N)


class AlmostByDistance(Bias):
    """One pair differs."""

    def forward(self, times):
        at = distance() + N - 1
        return self.table[at + (torch.arange(N * N).view(N, N) == 2 * N + 1)]


class SquashedPairs(Bias):
    """A function of pairs, not of the table."""

    def forward(self, times):
        return self.table[distance() + N - 1].tanh()


class Stopped(Bias):
    """Its table gets no gradient."""

    def forward(self, times):
        return self.table[distance() + N - 1].detach() + self.table.sum() * 0


class FirstIsPadding(Bias):
    """Row 0 of the table gets no gradient."""

    size = (2 * N - 1, 1)

    def forward(self, times):
        return F.embedding(distance().abs(), self.table, padding_idx=0).squeeze(-1)


class OfTheBatch(Bias):
    """The distance counts where the data says so."""

    def forward(self, times):
        return self.table[distance() + N - 1] * (times[:, None, None, :] % 2 == 0)


class SignedTime(Time):
    def buckets(self, times):
        return (self.gap(times) // 86400).clamp(0, 23)


class TimeOfDay(Time):
    """Not monotone."""

    def buckets(self, times):
        return self.gap(times).abs() % 24


class TimeReversed(Time):
    def buckets(self, times):
        return 23 - super().buckets(times)


class FractionalTime(Time):
    def gap(self, times):
        return super().gap(times.double() / 7)


PER_PAIR = [
    PairTable, StackedRows, AlmostByDistance, SquashedPairs, Stopped, FirstIsPadding, OfTheBatch, SignedTime, TimeOfDay,
    TimeReversed, FractionalTime,
]  # fmt: skip


class SecondTime(Time):
    """The kernel takes one; both are right."""

    def __init__(self) -> None:
        super().__init__()
        self.second = TimeByHead()

    def forward(self, times):
        return super().forward(times) + self.second(times)


class PairsAndPosition(Bias):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = PairTable()

    def forward(self, times):
        return self.table[distance() + N - 1] + 2 * self.pairs(times)


class AnyLength(Time):
    """Position and time in sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.position = IndexedInALongerTable()

    def forward(self, times):
        return super().forward(times) + self.position.table[distance(times.shape[1]) + 50]


# --- the model -------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, bias: Bias, softmax: bool) -> None:
        super().__init__()
        self.bias, self.softmax = bias, softmax
        self.items = nn.Embedding(30, D)
        self.mixed = nn.Linear(D, 3 * D)
        self.double()

    def forward(self, ids: Tensor, times: Tensor) -> Tensor:
        valid = ids != 0
        x = self.items(ids)
        q, k, v = (t.reshape(*ids.shape, H, D // H).transpose(1, 2) for t in self.mixed(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * 0.5 + self.bias(times)
        seen = torch.tril(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)) & valid[:, None, None, :]
        weights = scores.masked_fill(~seen, -1e9).softmax(-1) if self.softmax else F.silu(scores) / 7 * seen
        out = (weights @ v).transpose(1, 2).reshape(*ids.shape, D)
        return ((x + out).pow(3).mean(-1) * valid).sum()


class LastRowsAsk(nn.Module):
    """Five queries per sequence, in columns of their own, that read all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.asked, self.read = nn.Embedding(30, D), nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.table, self.time = nn.Parameter(torch.randn(3 * N)), Time()
        self.double()

    def forward(self, ids: Tensor, times: Tensor) -> Tensor:
        valid, x = ids != 0, self.items(ids)
        q = self.asked(x[:, -5:]).reshape(-1, 5, H, D // H).transpose(1, 2)
        k, v = (t.reshape(-1, N, H, D // H).transpose(1, 2) for t in self.read(x).chunk(2, -1))
        gaps = (times[:, -5:, None] - times[:, None, :]).abs()
        by_time = self.time.table[torch.log1p(gaps.double()).long().clamp(max=23)].unsqueeze(1)
        by_position = self.table[torch.arange(5)[:, None] - torch.arange(N) + N]
        weights = F.silu(q @ k.transpose(-1, -2) + by_position + by_time) * valid[:, None, None, :]
        out = (weights @ v).transpose(1, 2).reshape(-1, 5, D)
        return (out.pow(2).mean(-1) * valid[:, -5:]).sum()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([N, 1, 7, 4, 10])[torch.randperm(B, generator=g)]
    valid = torch.arange(N) < lengths[:, None]
    ids = torch.randint(1, 30, (B, N), generator=g) * valid
    apart = torch.exp(torch.rand(B, N, generator=g) * 14).long() - 1
    return ids, (apart.cumsum(1) + 1_600_000_000) * valid


class Kept(Instrument):
    """The packed graph."""

    def finish(self, run: Any) -> None:
        if run.role is Role.CAPTURED:
            self.graph = run.graph

    @property
    def biases(self) -> set[str]:
        (node,) = (n for n in self.graph.nodes if "jagged_attention" in str(n.target))
        return {name for name, place in PLACES.items() if node.args[place] is not None}

    @property
    def pairs(self) -> list[str]:
        """Values that are computed per pair of columns."""
        calls = [n for n in self.graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], Tensor)]
        return [f"{n}: {list(n.meta['val'].shape)}" for n in calls if is_of_pairs(n.meta["val"])]


def is_of_pairs(value: Tensor) -> bool:
    return all(isinstance(s, int) for s in value.shape) and value.numel() % N**2 == 0 and value.numel() > 0


class PairsMade(TorchDispatchMode):
    """Tensors of pairs that a step makes, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        self.found += [f"{func}: {list(x.shape)}" for x in made if isinstance(x, Tensor) and is_of_pairs(x)]
        return result


def gradients(step: Any, model: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    loss = step(*inputs)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


RAGGED = tuple(batch(seed) for seed in range(3))


def check(bias: Bias, softmax: bool, batches: Sequence[tuple[Tensor, Tensor]] = RAGGED) -> tuple[Kept, list[str]]:
    return check_model(Model(bias, softmax), batches)


def check_model(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Kept, list[str]]:
    """Compare with eager; the packed graph, and the tensors of pairs that a step on the last batch made."""
    reference, kept, made = copy.deepcopy(model), Kept(), PairsMade()
    older = turbogr_compile.statistics()  # of graphs that other tests keep alive
    step = turbogr_compile.compile(model, target="eager", pipeline=PIPELINE, on_error="raise", instruments=(kept,))
    for inputs in batches:
        loss, expected = gradients(reference, reference, inputs)
        got, actual = gradients(step, model, inputs)
        torch.testing.assert_close(got, loss, rtol=1e-11, atol=0)
        for name, gradient in expected.items():
            assert gradient is not None, name
            assert gradient.abs().max() > 0 or isinstance(getattr(model, "bias", None), Stopped | Slopes), name
            found = actual[name] if actual[name] is not None else torch.zeros_like(gradient)
            torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    with made:
        gradients(step, model, inputs)
    mine = [s for s in turbogr_compile.statistics() if s not in older]
    assert mine and not any(s.fallbacks for s in mine)
    return kept, made.found


@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "silu"])
@pytest.mark.parametrize("bias", BY_POSITION, ids=lambda b: b.__name__)
def test_bias_by_position(bias, softmax):
    kept, made = check(bias(), softmax)
    assert kept.biases == {"position"}
    assert not kept.pairs
    assert not made


@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "silu"])
@pytest.mark.parametrize("bias", BY_TIME, ids=lambda b: b.__name__)
def test_bias_by_time(bias, softmax):
    kept, made = check(bias(), softmax)
    assert kept.biases == {"time"}
    assert not kept.pairs
    assert not made


@pytest.mark.parametrize("bias", [TimeAndPosition, TimeAndPositionInOne])
def test_bias_by_both(bias):
    kept, made = check(bias(), softmax=False)
    assert kept.biases == {"position", "time"}
    assert not kept.pairs
    assert not made


@pytest.mark.parametrize("bias", PER_PAIR, ids=lambda b: b.__name__)
def test_bias_of_pairs(bias):
    kept, made = check(bias(), softmax=False)
    assert kept.biases == {"pairs"}
    assert kept.pairs
    assert made


def test_a_second_bias_by_time_is_one_of_pairs():
    kept, _ = check(SecondTime(), softmax=True)
    assert kept.biases == {"time", "pairs"}


def test_a_bias_of_keys_is_never_one_of_pairs():
    kept, made = check(ByKey(), softmax=False)
    assert kept.biases == {"pairs"}
    assert not kept.pairs and not made


@pytest.mark.parametrize(("bias", "others"), [(PairsAndPosition, {"position"}), (FlatSum, {"position", "time"})])
def test_only_the_rest_of_a_sum_is_of_pairs(bias, others):
    kept, _ = check(bias(), softmax=True)
    assert kept.biases == {*others, "pairs"}


def test_constant_bias_by_position():
    kept, _ = check(Slopes(), softmax=True)
    assert "position" in kept.biases


def test_queries_in_columns_of_their_own():
    kept, made = check_model(LastRowsAsk(), [(ids.flip(1), times.flip(1)) for ids, times in RAGGED])
    assert kept.biases == {"position", "time"}
    assert not made


def test_batches_of_any_size():
    batches = [(ids[:size], times[:size]) for size, (ids, times) in zip((5, 4, 3), RAGGED, strict=True)]
    kept, made = check(TimeAndPositionInOne(), softmax=False, batches=batches)
    assert kept.biases == {"position", "time"}
    assert not made


def test_sequences_of_any_length():
    """Which distances a table is asked for is not known: pairs, and right."""
    batches = [(ids[:, :size], times[:, :size]) for size, (ids, times) in zip((13, 11, 9), RAGGED, strict=True)]
    kept, _ = check(AnyLength(), softmax=False, batches=batches)
    assert kept.biases == {"pairs", "time"}


# --- the parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 5), (5, 3), (1, 4), (4, 1), (1, 1)])
def test_by_distance(queries, keys):
    apart = torch.arange(queries)[:, None] - torch.arange(keys)
    pairs = 100 + apart
    entries = by_distance(pairs)
    most = max(queries, keys)
    assert entries.shape == (2 * most - 1,)
    assert torch.equal(entries[apart + most - 1], pairs)
    if queries > 1 and keys > 1:
        pairs[-1, -1] += 1
        assert by_distance(pairs) is None


FUNCTIONS = {
    "identity": lambda x: x,
    "days": lambda x: x // 86400,
    "log": lambda x: (x.clamp(min=1).log() / 0.301).long(),
    "log-1": lambda x: ((x + 1).log() / 0.301).long(),
    "from-3": lambda x: (x.float() / 50).sqrt().floor().long() + 3,
    "jumps": lambda x: (x.clamp(max=1000) // 500) * 4,
    "minus-infinity": lambda x: (x.double().log() * 2).long().clamp(min=1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bucket_bounds(name):
    """Buckets of small and of large gaps are those of the function itself."""
    bucket, entries = FUNCTIONS[name], 40
    first, bounds, most = bucket_bounds(bucket, entries)
    gaps = torch.cat([torch.arange(5000), torch.logspace(3, 18, 3001, dtype=torch.float64).long()])
    gaps = torch.cat([gaps, *(torch.tensor(bounds)[:, None] + torch.tensor([-1, 0, 1])).unbind(1)]).clamp(min=0)
    wanted = bucket(gaps)
    within = wanted < entries
    found = first + torch.bucketize(gaps, torch.tensor(bounds), right=True)
    assert torch.equal(found[within], wanted[within])
    assert torch.equal(within, gaps <= most) if most is not None else within.all()


@pytest.mark.parametrize("bucket", [lambda x: -x, lambda x: 5 - x.clamp(max=5), lambda x: x * 0 + 2, lambda x: x - 1])
def test_no_bucket_bounds(bucket):
    """A function that falls, that is constant, or that starts below 0."""
    assert bucket_bounds(bucket, 40) is None
