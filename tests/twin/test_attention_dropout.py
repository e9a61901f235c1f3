"""Dropout of attention weights in the AscendC kernels: the pairs that kernels/dropout.py drops, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from turbogr_compile.kernels import dropout as dropping
from turbogr_compile.kernels import jagged_attention as kernel
from turbogr_compile.kernels.twin import attention, device
from turbogr_compile.kernels.twin.launch import reports

from .attention_cases import BF16, F16, F32, FAR, INDEX, Case, check_backward, check_forward, run_backward

ops = torch.ops.turbogr
BOTH = pytest.mark.parametrize("activation", ["silu", "softmax"])
OPEN = (-FAR, FAR)


# --- which pairs -------------------------------------------------------------------------------------


def weights(a: kernel.Inputs, cores: int = 2) -> Tensor:
    """(Tq, H, longest): of the pairs of a query with the keys of its sequence, all of them alike before dropout."""
    lengths = a.key_offsets.diff()
    places = torch.cat([torch.arange(int(n)) for n in lengths])
    values = torch.nn.functional.one_hot(places, int(lengths.max())).float()[:, None]
    alike = a._replace(value=values, scale=0.0, post_scale=1.0, activation="softmax")
    return attention.jagged_attention(*alike, cores=cores, index=INDEX[F32])[0]


def drawn(a: kernel.Inputs) -> Tensor:
    """The same by kernels/dropout.py: whether a pair stays."""
    lengths = a.key_offsets.diff().tolist()
    found = torch.zeros(sum(lengths), a.query.shape[1], max(lengths), dtype=torch.bool)
    for index, (first, length) in enumerate(zip(a.key_offsets.tolist(), lengths, strict=False)):
        own = a.key_columns[first : first + length]
        kept = dropping.kept(int(a.dropout_seed), index, a.query.shape[1], own, own, a.dropout)
        found[first : first + length, :, :length] = kept.transpose(0, 1)
    return found


@pytest.mark.parametrize("first", [0, 65_500, 3 * 65_536 - 20, 2**24 - 300])
@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_the_pairs_are_those_of_the_reference(first, holes):
    for dropout in (0.1, 0.5, 0.500001, 0.93):
        a = Case((64, 0, 41), dtype=F32, window=OPEN, dropout=dropout, holes=holes, first=first).inputs()
        assert torch.equal(weights(a) != 0, drawn(a))


def test_the_limit_is_exact():
    """Bits at the limit stay, those just below it do not; at either end of the numbers and around the middle."""
    a = Case((48,), heads=1, dtype=F32, window=OPEN, dropout=0.5).inputs()
    bits = dropping.bits(int(a.dropout_seed), 0, 0, a.key_columns, a.key_columns)
    order = bits.flatten().sort().values
    middle = int((order < 2**31).sum())
    for place in (0, 1, middle - 1, middle, order.numel() // 3, order.numel() - 1):
        for limit in (int(order[place]), int(order[place]) + 1):
            found = weights(a._replace(dropout=limit / 2**32))[:, 0] != 0
            assert torch.equal(found, bits >= limit)


def test_rates_at_both_ends():
    a = Case((48,), dtype=F32, window=OPEN, dropout=0.5).inputs()
    assert (weights(a._replace(dropout=0.0)) == 1 / 48).all()
    assert (weights(a._replace(dropout=1e-11)) != 0).all()  # rounds to none of 2^32
    assert (weights(a._replace(dropout=1 - 1e-11)) == 0).all()
    assert (weights(a._replace(dropout=1.0)) == 0).all()
    assert (weights(a._replace(dropout_seed=None)) == 1 / 48).all()


def test_each_seed_sequence_and_head_draws_for_itself():
    a = Case((40, 40), dtype=F32, window=OPEN, dropout=0.5).inputs()
    first = weights(a) != 0
    high = weights(a._replace(dropout_seed=a.dropout_seed + 2**40)) != 0
    low = weights(a._replace(dropout_seed=a.dropout_seed + 1)) != 0
    for other in (high, low, first.roll(40, 0), first.roll(1, 1)):
        assert 0.4 < (first != other).float().mean() < 0.6


# --- results and gradients ---------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "dtype, dropout, options",
    [
        (F16, 0.2, {}),
        (BF16, 0.5, {"window": OPEN, "holes": True, "bias": "hqk"}),
        (F32, 0.7, {"window": (0, 60), "valid": True, "position": 4, "time": 1}),
        (F16, 0.3, {"pair_mask": "sqk", "window": (-5, 100)}),
        (F32, 1.0, {}),
    ],
    ids=str,
)
def test_against_the_reference(activation, dtype, dropout, options):
    case = Case((0, 1, 130, 31, 270), heads=4, groups=2, depth=32, dtype=dtype, activation=activation, **options)
    case = Case(**{**case.__dict__, "dropout": dropout})
    check_forward(case)
    check_backward(case, deterministic=dtype == F16)


@BOTH
def test_the_number_of_cores_changes_nothing(activation):
    case = Case((257, 0, 31, 140), heads=2, groups=2, activation=activation, dropout=0.25)
    first = [*attention.jagged_attention(*case.inputs(), cores=1), *run_backward(case, 1, deterministic=True)]
    for cores in (2, 20, 48):
        again = [*attention.jagged_attention(*case.inputs(), cores=cores)]
        again += run_backward(case, cores, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@BOTH
def test_gradients_go_through_the_kernels(activation):
    a = Case((40, 0, 17), dtype=F32, activation=activation, dropout=0.4).inputs()

    def run() -> list[Tensor]:
        leaves = {name: getattr(a, name).clone().requires_grad_() for name in ("query", "key", "value")}
        ops.jagged_attention(*a._replace(**leaves))[0].square().sum().backward()
        return [leaf.grad for leaf in leaves.values()]

    with device(cores=4) as twin:
        found = run()
    assert twin.ran == ["jagged_attention", "jagged_attention_backward"]
    for x, y in zip(found, run(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


# --- what it would cost ------------------------------------------------------------------------------


def test_a_pair_costs_about_33_instructions_more():
    """Each is a 64th of a cycle; edges and the preparation of rows and keys come on top."""
    case = Case((1024,), heads=1, groups=1, depth=64, window=OPEN)
    busy = []
    for dropout in (0.0, 0.1):
        with reports() as seen:
            attention.jagged_attention(*Case(**{**case.__dict__, "dropout": dropout}).inputs(), cores=2)
        busy.append(sum(core["busy"]["V"] for core in seen[0].cores) / 1024**2)
    assert 33 / 64 < busy[1] - busy[0] < 36 / 64
