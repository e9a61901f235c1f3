"""AdamW on bf16 in one pass: the numbers of its reference, and chance that depends on places and the seed alone."""

from __future__ import annotations

import pytest
import torch

from turbogr_compile.kernels import adamw as module


def tensors(count: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(count)
    value, gradient, mean = (torch.randn(count, generator=made).bfloat16() for _ in range(3))
    return [value, gradient, mean * 0.1, torch.rand(count, generator=made).bfloat16() * 0.01]


def updated(count: int, seed: int = 12345678901234567, step: int = 7) -> list[torch.Tensor]:
    given = tensors(count)
    module.adamw_by_chance(*given, step, 1e-2, 0.9, 0.999, 1e-8, 0.01, seed)
    return given


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33, 70_001])
def test_the_kernel_is_its_reference(count: int, monkeypatch):
    """Sums in fp32 may be rounded otherwise, which moves what is rounded by chance once in many thousand times.

    Where terms cancel, that is all that is left: 2^-24 of numbers below one.
    """
    found = updated(count)
    monkeypatch.setattr(module, "library", lambda dtype: None)
    monkeypatch.setattr(module, "CHUNK", 1000)
    for mine, expected in zip(found, updated(count), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2**-7, atol=2**-24)
        assert (mine != expected).sum() <= 1 + count // 2000


@pytest.mark.parametrize("kernels", [True, False])
def test_rounded_by_chance_it_is_right_on_average(kernels: bool, monkeypatch):
    """Each seed is another chance: their mean is the value before it was rounded."""
    if not kernels:
        monkeypatch.setattr(module, "library", lambda dtype: None)
    exact = [x.double() for x in tensors(50)]
    value, gradient, mean, square = exact
    mean, square = mean.lerp(gradient, 0.1), square * 0.999 + gradient.square() * 0.001
    step = mean / (1 - 0.9**7) / ((square / (1 - 0.999**7)).sqrt() + 1e-8)
    expected = value * (1 - 1e-4) - 1e-2 * step, mean, square
    every = [updated(50, seed) for seed in range(4000)]
    for i, wanted in zip((0, 2, 3), expected, strict=True):
        found = torch.stack([one[i].double() for one in every])
        assert ((found.mean(0) - wanted).abs() <= 2**-8 * wanted.abs() * 5 / 4000**0.5).all()


def test_what_is_not_finite_stays():
    given = [x.clone() for x in tensors(40)]
    given[1][3], given[1][4] = float("inf"), float("nan")
    module.adamw_by_chance(*given, 1, 1e-2, 0.9, 0.999, 1e-8, 0.01, 5)
    assert given[2][3] == float("inf") and given[2][4].isnan() and given[0][5:].isfinite().all()


def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    alone = updated(70_001)
    monkeypatch.setattr(module.cpu, "threads_for", lambda numbers: 3)
    assert all(map(torch.equal, alone, updated(70_001)))


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between them."""
    return torch.stack([x, torch.full_like(x, 99.0)], 1)[:, 0]


@pytest.mark.parametrize("kernels", [True, False])
def test_numbers_may_lie_apart(kernels: bool, monkeypatch):
    if not kernels:
        monkeypatch.setattr(module, "library", lambda dtype: None)
    expected, given = updated(33), [apart(x) for x in tensors(33)]
    module.adamw_by_chance(*given, 7, 1e-2, 0.9, 0.999, 1e-8, 0.01, 12345678901234567)
    assert all(map(torch.equal, given, expected))
    assert all((x._base[:, 1] == 99).all() for x in given)


def test_one_number_may_stand_for_a_whole_gradient():
    value, _, mean, square = tensors(33)
    one = torch.ones((), dtype=torch.bfloat16).expand(33)
    found = [[x.clone() for x in (value, gradient, mean, square)] for gradient in (one, one.contiguous())]
    found[0][1] = one
    for given in found:
        module.adamw_by_chance(*given, 7, 1e-2, 0.9, 0.999, 1e-8, 0.01, 5)
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("kernels", [True, False])
def test_who_has_saved_a_parameter_is_told(kernels: bool, monkeypatch):
    if not kernels:
        monkeypatch.setattr(module, "library", lambda dtype: None)
    weight = torch.nn.Parameter(tensors(33)[0])
    loss = weight.square().sum()
    with torch.no_grad():
        module.adamw_by_chance(weight, *tensors(33)[1:], 7, 1e-2, 0.9, 0.999, 1e-8, 0.01, 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
