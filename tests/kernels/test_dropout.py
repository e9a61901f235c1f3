"""The hash behind dropout: the same numbers as its description, and as good as random ones."""

from __future__ import annotations

import pytest
import torch

from turbogr_compile.kernels.dropout import bits, gain, kept, mix

COLUMNS = torch.arange(256)
MASK = 0xFFFFFFFF


def described(seed: int, *numbers: int) -> int:
    """The module's docstring, once more, on Python's integers."""
    state = 0x9E3779B9
    for number in (seed, seed >> 32, *numbers):
        state ^= number & MASK
        state ^= state >> 16
        state = state * 0x21F0AAAD & MASK
        state ^= state >> 15
        state = state * 0x735A2D97 & MASK
        state ^= state >> 15
    return state


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3, 2**63 - 1, -1, -(2**63)])
def test_bits_are_those_of_the_description(seed):
    queries, keys = torch.tensor([0, 7, 2**31]), torch.tensor([0, 5, 2**32 - 1, 2**33])
    found = bits(seed, 3, 2, queries, keys)
    assert found.tolist() == [[described(seed, 3, 2, q, k) for k in keys.tolist()] for q in queries.tolist()]


def test_known_numbers():
    """Written down so that kernels in other languages can be held against them."""
    assert [mix(x) for x in (0, 1, MASK)] == [0, 0x86D2FA73, 0x99B5E683]
    assert bits(42, 0, 0, torch.arange(2), torch.arange(2)).tolist() == [
        [2727615831, 3869206381],
        [4139070999, 96769251],
    ]


def test_a_row_alone_gets_what_it_gets_in_company():
    everything = kept(5, 1, 2, COLUMNS, COLUMNS, 0.3)
    some = torch.tensor([3, 200, 17])
    assert torch.equal(kept(5, 1, 2, some, COLUMNS[100:], 0.3), everything[:, some, 100:])


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_mean_and_variance(probability):
    """Rows, columns and the whole drop as often as coins would: within 5 standard deviations."""
    mask = kept(11, 0, 4, COLUMNS, COLUMNS, probability).double()
    deviation = (probability * (1 - probability)) ** 0.5
    assert abs(mask.mean() - (1 - probability)) < 5 * deviation / mask.numel() ** 0.5
    for dim in (1, 2):
        means = mask.mean(dim)
        assert (means - (1 - probability)).abs().max() < 5 * deviation / 256**0.5
        assert means.std().item() == pytest.approx(deviation / 256**0.5, rel=0.15)
    assert mask.mean() * gain(probability) == pytest.approx(1.0, rel=0.05)


def test_every_bit_is_fair():
    found = bits(3, 0, 0, COLUMNS, COLUMNS)
    shares = torch.stack([((found >> b) & 1).double().mean() for b in range(32)])
    assert (shares - 0.5).abs().max() < 5 * 0.5 / found.numel() ** 0.5


def test_neighbours_are_independent():
    """One step in any of the five numbers changes half of the coins."""
    base = kept(9, 4, 2, COLUMNS, COLUMNS, 0.5)
    others = {
        "seed": kept(10, 4, 2, COLUMNS, COLUMNS, 0.5),
        "high half of the seed": kept(9 + 2**32, 4, 2, COLUMNS, COLUMNS, 0.5),
        "sequence": kept(9, 5, 2, COLUMNS, COLUMNS, 0.5),
        "head": base.flip(0),
        "query": base.roll(1, 1),
        "key": base.roll(1, 2),
        "query and key": base.roll((1, 1), (1, 2)),
        "transposed": base.transpose(1, 2) ^ torch.eye(256).bool(),
        "sequence for head": kept(9, 2, 2, COLUMNS, COLUMNS, 0.5),
    }
    for what, other in others.items():
        agree = (base == other).double().mean().item()
        assert abs(agree - 0.5) < 0.01, what


def test_rows_of_a_block_are_not_linear_in_each_other():
    """A weak hash of (query, key) repeats itself: rank of the centred coins tells."""
    coins = kept(1, 0, 1, COLUMNS, COLUMNS, 0.5)[0].double() - 0.5
    largest = torch.linalg.svdvals(coins)
    assert torch.linalg.matrix_rank(coins) >= 254
    assert largest[0] < 1.2 * 0.5 * 2 * 256**0.5  # a random matrix has 2 · sigma · sqrt(n)


@pytest.mark.parametrize("probability, share", [(0.0, 1.0), (1.0, 0.0)])
def test_ends_are_exact(probability, share):
    assert kept(0, 0, 2, COLUMNS, COLUMNS, probability).double().mean() == share


def test_gain_is_finite_where_all_is_dropped():
    assert gain(1.0) == 0.0 and gain(0.0) == 1.0 and gain(0.75) == 4.0
