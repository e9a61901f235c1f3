"""Each rule of attention by evaluation: a program that it accepts, and the counter-example that its condition excludes.

Accepted programs are run densely by their normal form, against eager, on batches that differ from the one they were
recognised on: right and left pads, holes, full and empty sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .harness import Blindness, NormalForm, Refused, attentions, compare, traced
from .packed import compare_packed

INF, LOWEST = math.inf, torch.finfo(torch.float64).min
B, N, D = 4, 6, 4
TRIANGLE = torch.ones(N, N, dtype=torch.bool).tril()


def batch(kind: str = "right", seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Inputs by the name under which a program asks for them."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([6, 3, 1, 4])
    columns = torch.arange(N)
    valid = {
        "right": columns < lengths[:, None],
        "left": columns >= N - lengths[:, None],
        "holes": torch.rand(B, N, generator=g) < 0.5,
        "full": torch.ones(B, N, dtype=torch.bool),
        "empty": columns < (lengths - 3).clamp(min=0)[:, None],
    }[kind]

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "q": floats(B, N, D), "k": floats(B, N, D), "v": floats(B, N, D), "scale": floats(1), "head": floats(B, 1, 1),
        "rel": floats(2 * N - 1), "bias": floats(B, N, N), "key_bias": floats(B, N), "sink": floats(1, 1, 1),
        "ids": torch.randint(1, 9, (B, N), generator=g) * valid, "valid": valid, "keep": valid.to(dtype),
        "pairs": torch.rand(B, N, N, generator=g) < 0.7, "tri": TRIANGLE.clone(),
        "weight": torch.rand(B, N, generator=g, dtype=torch.float64).to(dtype) + 0.5,
        "times": torch.randint(0, 1000, (B, N), generator=g), "table": floats(8),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def wide_numbers():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


KINDS = ("right", "left", "holes", "full", "empty")


class Case:
    """A program of named inputs."""

    def __init__(self, program: Callable[..., Tensor]) -> None:
        self.program = program
        self.names = program.__code__.co_varnames[: program.__code__.co_argcount]

    def inputs(self, kind: str, seed: int, dtype: torch.dtype = torch.float64) -> list[Any]:
        given = batch(kind, seed, dtype)
        return [given[name] for name in self.names]

    def recognised(self, seen: bool = True, dtype: torch.dtype = torch.float64) -> Any:
        inputs = self.inputs("right", 0, dtype)
        module = traced(self.program, inputs)
        (found,) = attentions(module, inputs if seen else None)
        return module, found


def accepted(program: Callable[..., Tensor], **expected: Any) -> NormalForm:
    """Recognised, and right wherever its checks let it run; runs on one kind of batch at least."""
    case = Case(program)
    module, form = case.recognised()
    assert isinstance(form, NormalForm), f"{form} at {form.node}"
    ran = 0
    for seed, kind in enumerate(KINDS):
        inputs = case.inputs(kind, seed + 1)
        found, packed = compare(module, form, inputs), compare_packed(module, form, inputs)
        assert "DIFFERENT" not in found + packed, f"{kind}: {found}, {packed}\n{form}"
        ran += found in ("same", "random")
    assert ran, f"no batch passes the checks of\n{form}"
    for name, wanted in expected.items():
        assert getattr(form, name) == wanted, f"{name} of\n{form}"
    return form


def refused(program: Callable[..., Tensor], reason: str) -> Refused:
    _, found = Case(program).recognised()
    assert isinstance(found, Refused), f"accepted:\n{found}"
    assert reason in str(found), found
    return found


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(1, 2) / 2


def text(form: NormalForm) -> str:
    return str(form.visible)


# --- 1-6: what removes a score -------------------------------------------------------------------------


def test_fill_with_infinity():
    def program(q, k, v, ids):
        return scores(q, k).masked_fill((ids == 0)[:, None], -INF).softmax(-1) @ v

    form = accepted(program, blind=Blindness.NAN, removed_by={"infinity"}, assumptions=())
    assert text(form) == "keys !arg3_1[b0, k]==0"


def test_fill_with_the_lowest_number_needs_no_assumption():
    def program(q, k, v, ids):
        return scores(q, k).masked_fill((ids == 0)[:, None], LOWEST).softmax(-1) @ v

    accepted(program, blind=Blindness.AVERAGE, removed_by={"fill-lowest"}, assumptions=())


def test_lowest_number_of_another_dtype_is_a_large_number_only():
    low = torch.finfo(torch.float16).min

    def program(q, k, v, ids):
        return scores(q, k).masked_fill((ids == 0)[:, None], low).softmax(-1) @ v

    form = accepted(program, removed_by={"fill"})
    assert len(form.assumptions) == 1 and "4096" in form.assumptions[0]


@pytest.mark.parametrize("low", [-1e4, -65504.0, -1e9, -(2.0**32) + 1])
def test_fill_with_a_large_number(low):
    def program(q, k, v, ids):
        return scores(q, k).masked_fill((ids == 0)[:, None], low).softmax(-1) @ v

    form = accepted(program, blind=Blindness.AVERAGE, removed_by={"fill"})
    assert any("log_sum" in str(check) for check in form.checks)


@pytest.mark.parametrize("low", [-1.0, -50.0, -3e3, -8937.0])
def test_a_number_that_is_not_low_enough_is_visible(low):
    def program(q, k, v, ids):
        return scores(q, k).masked_fill((ids == 0)[:, None], low).softmax(-1) @ v

    refused(program, "scores are replaced")


@pytest.mark.parametrize("low", [-1e4, -1e9, -INF, LOWEST])
def test_add_a_large_number(low):
    def program(q, k, v, ids):
        return (scores(q, k) + torch.where(ids == 0, low, 0.0)[:, None]).softmax(-1) @ v

    accepted(program)


def test_add_a_small_number_is_a_bias():
    def program(q, k, v, ids):
        return (scores(q, k) + torch.where(ids == 0, -50.0, 0.0)[:, None]).softmax(-1) @ v

    form = accepted(program)
    assert text(form) == "all pairs" and len(form.biases) == 1


def test_a_mask_is_worth_what_arrives_at_the_softmax():
    def scaled(q, k, v, ids):
        return ((scores(q, k) + (ids == 0).double()[:, None] * -1e4) / 1024).softmax(-1) @ v

    def negated(q, k, v, ids):
        return (scores(q, k).masked_fill((ids == 0)[:, None], -1e9) * -1).softmax(-1) @ v

    form = accepted(scaled)
    assert text(form) == "all pairs"  # pads weigh e^-9.8
    refused(negated, "scores are replaced")


def test_removed_in_several_ways():
    def program(q, k, v, ids, pairs):
        s = scores(q, k) + (ids == 0).double()[:, None] * -1e9
        return s.masked_fill(~pairs, -2e9).masked_fill(~TRIANGLE, -INF).softmax(-1) @ v

    form = accepted(program, removed_by={"add", "fill", "infinity"}, blind=Blindness.AVERAGE)
    assert "distance 0..inf" in text(form)


def test_all_scores_removed():
    def program(q, k, v):
        return scores(q, k).masked_fill(torch.ones(N, dtype=torch.bool), -INF).softmax(-1) @ v

    refused(program, "all scores are removed")


# --- 7-11: sums and products -----------------------------------------------------------------------------


def test_a_term_of_the_query_cancels():
    def program(q, k, v, weight):
        s = scores(q, k)
        return (s - s.amax(-1, keepdim=True).detach() + weight[:, :, None]).softmax(-1) @ v

    assert not accepted(program).biases


def test_a_term_of_the_query_on_some_keys_does_not_cancel():
    def program(q, k, v, weight, ids):
        s = scores(q, k)
        return torch.where((ids != 0)[:, None], s + weight[:, :, None], s).softmax(-1) @ v

    assert len(accepted(program).biases) == 1

    def of_scores(q, k, v, ids):
        s = scores(q, k)
        return torch.where((ids != 0)[:, None], s - s.amax(-1, keepdim=True), s).softmax(-1) @ v

    refused(of_scores, "a statistic of scores that some keys do not share")


def test_statistics_of_rows_that_are_large():
    """Found by programs at random: what a maximum is where no score is left."""

    def filled_above(q, k, v):
        s = scores(q, k).masked_fill(~TRIANGLE, 1e9)
        return (-(s - s.amax(-1, keepdim=True))).softmax(-1) @ v

    def overflows(q, k, v):
        s = scores(q, k).masked_fill(~TRIANGLE.tril(-1), LOWEST)
        return ((s - s.amax(-1, keepdim=True)) * 2).softmax(-1).nan_to_num(0.0) @ v

    def hidden_otherwise(q, k, v, ids):
        s = scores(q, k)
        return (s - s.masked_fill((ids == 0)[:, None], -1e9).amax(-1, keepdim=True)).softmax(-1) @ v

    def sum_of_hidden(q, k, v):
        s = scores(q, k).masked_fill(~TRIANGLE, -INF)
        return (s - s.sum(-1, keepdim=True)).softmax(-1) @ v

    refused(filled_above, "a large number was added and taken away")
    refused(sum_of_hidden, "a large number was added and taken away")
    refused(overflows, "overflows beside a statistic")
    refused(hidden_otherwise, "hidden otherwise")


def test_a_large_term_of_the_query_swallows_scores():
    def program(q, k, v, keep):
        return (scores(q, k) + (1 - keep)[:, :, None] * -1e9).softmax(-1) @ v

    found = Case(program).recognised()[1]
    if isinstance(found, NormalForm):  # queries that are masked are blind, never shifted
        assert "queries" in text(found)
        accepted(program)


def test_a_term_of_the_query_counts_before_a_pointwise_activation():
    def statistic(q, k, v):
        s = scores(q, k)
        return F.silu(s - s.amax(-1, keepdim=True)) @ v

    def term(q, k, v, weight):
        return F.silu(scores(q, k) + weight[:, :, None]) @ v

    refused(statistic, "before a pointwise activation")
    assert len(accepted(term).biases) == 1


def test_constants_add_up_unless_digits_are_lost():
    def small(q, k, v):
        return F.silu((scores(q, k) + 3.0) - 2.0) @ v

    def large(q, k, v):
        return ((scores(q, k) - 1e9) + 1e9).softmax(-1) @ v

    assert len(accepted(small).biases) == 1
    refused(large, "a large number was added and taken away")


def test_coefficients_multiply_within_reason():
    def program(q, k, v):
        return (scores(q, k) * 0.5 / 4 * 3).softmax(-1) @ v

    def extreme(q, k, v):
        return (scores(q, k) * 1e-13 * 1e13).softmax(-1) @ v

    assert accepted(program).scale == pytest.approx(0.5 * 0.5 / 4 * 3)
    refused(extreme, "digits are lost")


def test_zero_times_a_score_is_a_visible_zero():
    def program(q, k, v, ids):
        return (scores(q, k) * (ids != 0)[:, None]).softmax(-1) @ v

    refused(program, "scores are replaced")


def test_alpha_counts_on_both_sides():
    def program(q, k, v, key_bias):
        return torch.add(key_bias[:, None], scores(q, k), alpha=0.25).softmax(-1) @ v

    form = accepted(program)
    assert form.scale == pytest.approx(0.125) and str(form.biases[0]).startswith("1·")


def test_a_parameter_with_a_large_factor_is_no_bias():
    def program(q, k, v, key_bias):
        return (scores(q, k) - 1e9 * key_bias[:, None]).softmax(-1) @ v

    refused(program, "not known to be small")


def test_gradients_that_stop_stay_stopped():
    def program(q, k, v, key_bias, head):
        return (scores(q, k) * head.detach() + key_bias.detach()[:, None]).softmax(-1) @ v

    assert len(accepted(program).biases) == 1


# --- 12, 13: factors and biases --------------------------------------------------------------------------


def test_factors_of_queries_and_of_keys():
    def program(q, k, v, weight, scale, head):
        return (scores(q, k) * weight[:, :, None] * weight[:, None] * scale / head.exp()).softmax(-1) @ v

    assert len(accepted(program).score_factors) == 4

    def pairs(q, k, v, bias):
        return (scores(q, k) * bias).softmax(-1) @ v

    refused(pairs, "scores times a tensor of pairs")


def test_different_biases_for_some_pairs():
    def program(q, k, v, bias, ids):
        s = scores(q, k)
        return torch.where((ids != 0)[:, None], s + bias, s + 1.0).softmax(-1) @ v

    def scaled(q, k, v, ids):
        s = scores(q, k)
        return torch.where((ids != 0)[:, None], s, s * 2).softmax(-1) @ v

    def weighed(q, k, v, ids):
        w = scores(q, k).softmax(-1)
        return torch.where((ids != 0)[:, None], w, w * 2) @ v

    accepted(program)
    refused(scaled, "scaled or computed differently")
    refused(weighed, "weights are scaled differently")


# --- 14: pointwise activations ---------------------------------------------------------------------------


ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid, "squared_relu": lambda x: F.relu(x).square(), "relu": F.relu}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_pointwise_activation_of_masked_scores(name):
    activation = ACTIVATIONS[name]

    def filled(q, k, v, ids):
        return activation(scores(q, k).masked_fill((ids == 0)[:, None], -1e9)) @ v

    def times(q, k, v, ids):
        return activation(scores(q, k)) * (ids != 0)[:, None] / N @ v

    for program in (filled, times):
        assert text(accepted(program, activation=name, blind=Blindness.ZERO)) == "keys !arg3_1[b0, k]==0"


def test_silu_of_minus_infinity_is_nan():
    def program(q, k, v, ids):
        return F.silu(scores(q, k).masked_fill((ids == 0)[:, None], -INF)) @ v

    refused(program, "replaced by a number: nan")


def test_silu_of_minus_fifty_is_not_zero():
    def program(q, k, v, ids):
        return F.silu(scores(q, k).masked_fill((ids == 0)[:, None], -50.0)) @ v

    refused(program, "replaced by a number")


# --- 15-18: after the softmax ------------------------------------------------------------------------------


def test_masked_again():
    def product(q, k, v, ids):
        seen = (ids != 0)[:, None]
        return (scores(q, k).masked_fill(~seen, -1e9).softmax(-1) * seen) @ v

    def filled(q, k, v, ids):
        seen = (ids != 0)[:, None]
        return scores(q, k).masked_fill(~seen, -INF).softmax(-1).masked_fill(~seen, 0.0) @ v

    for program in (product, filled):
        accepted(program, blind=Blindness.ZERO)

    def times_nan(q, k, v, ids):
        seen = (ids != 0)[:, None]
        return (scores(q, k).masked_fill(~seen, -INF).softmax(-1) * seen) @ v

    accepted(times_nan, blind=Blindness.NAN)


def test_a_blind_average_may_be_nan():
    """Removed by a large number and by infinity: where infinity alone is left, 0 times the weights is NaN."""

    def program(q, k, v, ids, pairs):
        seen = (ids != 0)[:, None] & pairs
        s = scores(q, k).masked_fill(~pairs, -1e9).masked_fill((ids == 0)[:, None], -INF)
        return (s.softmax(-1) * seen) @ v

    accepted(program, blind=Blindness.AVERAGE)


def test_masked_after_the_softmax_only():
    def values(q, k, v, ids):
        return (scores(q, k).softmax(-1) * (ids != 0)[:, None]) @ v

    def queries(q, k, v, ids):
        return (scores(q, k).masked_fill((ids == 0)[:, None], -1e9).softmax(-1) * (ids != 0)[..., None]) @ v

    def pairs(q, k, v):
        return (scores(q, k).softmax(-1) * TRIANGLE) @ v

    form = accepted(values)
    assert form.values_kept is not None and form.queries_kept is None
    form = accepted(queries)
    assert form.queries_kept is not None and form.values_kept is None and form.exempt is not None
    refused(pairs, "pair by pair")


def test_factors_after_the_softmax():
    def program(q, k, v, ids, weight):
        lengths = (ids != 0).sum(1).clamp(min=1)
        w = scores(q, k).masked_fill((ids == 0)[:, None], -1e9).softmax(-1)
        return (w * weight[:, None] / lengths[:, None, None]) @ v

    assert len(accepted(program).post_factors) == 2

    def pairs(q, k, v, bias):
        return (scores(q, k).softmax(-1) * bias) @ v

    refused(pairs, "weights times a tensor of pairs")


def test_a_factor_that_is_infinite_is_noticed():
    def program(q, k, v, ids, weight):
        return (scores(q, k).masked_fill((ids == 0)[:, None], -1e9).softmax(-1) * weight[:, None]) @ v

    case = Case(program)
    module, form = case.recognised()
    assert isinstance(form, NormalForm)
    inputs = case.inputs("right", 1)
    assert compare(module, form, inputs) == "same"
    inputs[-1] = inputs[-1].clone()
    inputs[-1][1, 5] = INF  # of a pad: eager has 0 · inf
    assert "is finite" in compare(module, form, inputs)


def test_added_to_weights():
    def program(q, k, v):
        return (scores(q, k).softmax(-1) + 1e-3) @ v

    refused(program, "a number is added to weights")


def test_a_divisor_of_zero_is_noticed():
    def program(q, k, v, ids):
        return (F.silu(scores(q, k)) * (ids != 0)[:, None] / (ids != 0).sum(1)[:, None, None]) @ v

    case = Case(program)
    module, form = case.recognised()
    assert isinstance(form, NormalForm)
    assert compare(module, form, case.inputs("right", 1)) == "same"
    assert "not zero" in compare(module, form, case.inputs("empty", 1))


# --- 19-21: NaN and clamps ---------------------------------------------------------------------------------


def test_cleaned_weights():
    def program(q, k, v, ids):
        return scores(q, k).masked_fill((ids == 0)[:, None], -INF).softmax(-1).nan_to_num(0.0) @ v

    accepted(program, blind=Blindness.ZERO)

    def by_hand(q, k, v, ids):
        e = scores(q, k).masked_fill((ids == 0)[:, None], -INF).exp()
        return (e / e.sum(-1, keepdim=True)).nan_to_num(0.0) @ v

    refused(by_hand, "may be NaN")


def test_clamps():
    def beyond(q, k, v, ids):
        s = (scores(q, k) + torch.where(ids == 0, LOWEST, 0.0)[:, None]).clamp(min=LOWEST)
        return s.clamp(-1e5, 1e5).softmax(-1) @ v

    def within(q, k, v):
        return scores(q, k).clamp(-2, 2).softmax(-1) @ v

    def of_weights(q, k, v):
        return scores(q, k).softmax(-1).clamp(0, 1) @ v

    def crossed(q, k, v, ids):
        return F.relu(scores(q, k).masked_fill((ids == 0)[:, None], -INF).clamp(5e4, -1e5) + 1e5 + 1) @ v

    accepted(beyond)
    accepted(of_weights, assumptions=())
    refused(within, "clamp of scores at -2")
    refused(crossed, "replaced by a number: 1.0")


# --- 22-24: written out ------------------------------------------------------------------------------------


def test_softmax_written_out():
    def shifted(q, k, v, ids):
        s = scores(q, k).masked_fill((ids == 0)[:, None], -1e9)
        e = (s - s.max(-1, keepdim=True).values).exp()
        return e / e.sum(-1, keepdim=True) @ v

    def plain(q, k, v, ids):
        e = scores(q, k).masked_fill((ids == 0)[:, None], -INF).exp()
        return e / e.sum(-1, keepdim=True) @ v

    assert not any("overflow" in a for a in accepted(shifted, blind=Blindness.AVERAGE).assumptions)
    assert any("overflow" in a for a in accepted(plain, blind=Blindness.NAN).assumptions)


def test_a_maximum_over_hidden_scores_too_may_underflow():
    def program(q, k, v, ids):
        s = scores(q, k)
        e = (s - s.amax(-1, keepdim=True)).exp().masked_fill((ids == 0)[:, None], 0.0)
        return e / e.sum(-1, keepdim=True) @ v

    assert any("overflow" in a for a in accepted(program).assumptions)


def test_silu_written_out():
    def program(q, k, v, ids):
        s = scores(q, k)
        return s * torch.sigmoid(s) * (ids != 0)[:, None] @ v

    def other(q, k, v):
        s = scores(q, k)
        return s * torch.sigmoid(2 * s) @ v

    accepted(program, activation="silu")
    refused(other, "scores times scores")


def test_renormalised():
    def program(q, k, v, ids):
        w = scores(q, k).softmax(-1) * (ids != 0)[:, None]
        return w / (w.sum(-1, keepdim=True) + 1e-9) @ v

    refused(program, "divided")


def test_a_sum_in_another_dtype_is_not_that_of_a_softmax():
    def program(q, k, v):
        weights = scores(q, k).exp()
        return weights / weights.sum(-1, keepdim=True, dtype=torch.float32) @ v

    refused(program, "dtype")


# --- 25: dropout -------------------------------------------------------------------------------------------


def test_dropout_is_a_factor():
    def program(q, k, v, ids):
        seen = (ids != 0)[:, None]
        return F.dropout(scores(q, k).masked_fill(~seen, -1e9).softmax(-1), 0.3) * seen * 2 @ v

    form = accepted(program, blind=Blindness.ZERO)
    assert form.dropout is not None and form.dropout.p == 0.3 and form.post_scale == 2

    def before(q, k, v):
        return F.dropout(scores(q, k), 0.3).softmax(-1) @ v

    def twice(q, k, v):
        return F.dropout(F.dropout(scores(q, k).softmax(-1), 0.3), 0.3) @ v

    def of_a_sum(q, k, v):
        return F.dropout(scores(q, k).softmax(-1) + 1e-3, 0.3) @ v

    refused(before, "dropout of scores before the activation")
    refused(of_a_sum, "dropout")
    refused(twice, "two dropouts")


# --- 26-28: casts and positions ----------------------------------------------------------------------------


def test_casts_fold_masks():
    def widened(q, k, v, ids):
        s = scores(q.float(), k.float()).masked_fill((ids == 0)[:, None], torch.finfo(torch.float32).min)
        return s.double().softmax(-1) @ v

    def narrowed(q, k, v, ids):
        s = scores(q, k) + torch.where(ids == 0, torch.finfo(torch.float32).min, 0.0)[:, None].bfloat16()
        return s.softmax(-1) @ v

    assert accepted_in_float(widened).removed_by == {"fill"}
    assert accepted(narrowed).removed_by == {"infinity"}


def accepted_in_float(program: Callable[..., Tensor]) -> NormalForm:
    case = Case(program)
    module, form = case.recognised()
    assert isinstance(form, NormalForm), form
    for kind in KINDS:
        found = compare(module, form, case.inputs(kind, 2), 1e-5)
        assert not found.startswith("DIFFERENT"), found
    return form


@pytest.mark.parametrize(
    "step", [lambda s: s.long().double(), lambda s: s.floor(), lambda s: s.abs(), lambda s: s**3, lambda s: (s > 0) * s,
             lambda s: s.detach(), lambda s: torch.div(s, 0.5, rounding_mode="floor"), lambda s: s.round(decimals=2)]
)  # fmt: skip
def test_scores_that_are_changed_otherwise(step):
    def program(q, k, v):
        return step(scores(q, k)).softmax(-1) @ v

    refused(program, "")


def test_positions_need_a_wide_dtype():
    def narrow(q, k, v):
        at = (torch.arange(N) * 60).to(torch.int8)
        return scores(q, k).masked_fill(at[None, :] > at[:, None], -1e9).softmax(-1) @ v

    def wide(q, k, v):
        at = torch.arange(N, dtype=torch.bfloat16)
        return scores(q, k).masked_fill(at[None, :] > at[:, None], -1e9).softmax(-1) @ v

    def wrapped(q, k, v):
        at = torch.arange(N, dtype=torch.uint8) - 3  # 253 and more in the first columns
        return scores(q, k).masked_fill((at > 1)[None, None], -1e9).softmax(-1) @ v

    assert text(accepted(wide)) == "distance 0..inf"
    assert text(accepted(narrow)) != "distance 0..inf"
    assert text(accepted(wrapped)) == "keys !sub[k]>1"


def test_positions_with_a_common_factor():
    def program(q, k, v):
        at = 2 * torch.arange(N)
        return scores(q, k).masked_fill(at[None, :] >= at[:, None] + 1, -1e9).softmax(-1) @ v

    def shifted(q, k, v):
        at = 2 * torch.arange(N)
        return scores(q, k).masked_fill(at[None, :] >= at[:, None] - 1, -1e9).softmax(-1) @ v

    assert text(accepted(program)) == "distance 0..inf"
    assert text(accepted(shifted)) == "distance 1..inf"


def test_bytes_wrap():
    def program(q, k, v, ids):
        below = (ids != 0).to(torch.uint8) - 1  # 255 where it was 0
        return scores(q, k).masked_fill((below > 0)[:, None], -1e9).softmax(-1) @ v

    assert text(accepted(program)) == "keys !arg3_1[b0, k]==0"


def test_one_row_of_a_triangle_is_about_columns():
    def program(q, k, v):
        return scores(q, k).masked_fill(~torch.ones(1, N, dtype=torch.bool).tril(2), -1e9).softmax(-1) @ v

    assert text(accepted(program)) == "keys !k>=3"


# --- 29, 30: caps and sinks --------------------------------------------------------------------------------


def test_cap():
    def program(q, k, v, ids):
        s = torch.tanh(scores(q, k) / 5) * 5
        return s.masked_fill((ids == 0)[:, None], -1e9).softmax(-1) @ v

    assert accepted(program, scale=5.0).cap == pytest.approx(0.1)

    def masked_before(q, k, v, ids):
        return (torch.tanh(scores(q, k).masked_fill((ids == 0)[:, None], -1e9) / 5) * 5).softmax(-1) @ v

    def biased(q, k, v, key_bias):
        return (torch.tanh(scores(q, k) + key_bias[:, None]) * 5).softmax(-1) @ v

    def of_swallowed(q, k, v):
        return (torch.tanh(((scores(q, k) - 1e9) + 1e9) / 5) * 5).softmax(-1) @ v

    refused(of_swallowed, "a large number was added and taken away")
    refused(masked_before, "scores are replaced")
    refused(biased, "a cap of more than scaled scores")


def test_sink():
    def program(q, k, v, ids, sink):
        s = scores(q, k).masked_fill((ids == 0)[:, None], -1e9)
        return torch.cat([s, sink.expand(B, N, 1)], -1).softmax(-1)[..., :-1] @ v

    form = accepted(program, blind=Blindness.ZERO)
    assert form.sink is not None

    def shifted(q, k, v, ids, sink):
        s = torch.cat([scores(q, k).masked_fill((ids == 0)[:, None], -1e9), sink.expand(B, N, 1)], -1)
        return (s - s.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v

    assert accepted(shifted).sink is not None

    def otherwise(q, k, v, sink):
        s = scores(q, k)
        return torch.cat([s - s.amax(-1, keepdim=True), sink.expand(B, N, 1)], -1).softmax(-1)[..., :-1] @ v

    refused(otherwise, "shifted otherwise")


# --- every argument is accounted for -----------------------------------------------------------------------


def test_softmax_in_another_dtype():
    def program(q, k, v, ids):
        return scores(q, k).masked_fill((ids == 0)[:, None], -1e9).softmax(-1, dtype=torch.float32).double() @ v

    form = accepted_in_float(program)
    assert any("float32" in a for a in form.assumptions)


def test_softmax_over_queries():
    def program(q, k, v):
        return scores(q, k).softmax(1) @ v

    refused(program, "another dim than the keys")


def test_scores_of_other_pairs():
    def program(q, k, v):
        return scores(q, k).roll(1, -1).softmax(-1) @ v

    def flipped(q, k, v):
        return scores(q, k).flip(-1).softmax(-1) @ v

    def of_the_next_query(q, k, v):
        return F.pad(scores(q, k)[:, 1:], [0, 0, 0, 1]).softmax(-1) @ v

    def both_ways(q, k, v):
        s = scores(q, k)
        return (s + s.transpose(1, 2)).softmax(-1) @ v

    def turned(q, k, v):
        return scores(q, k).transpose(1, 2).softmax(-1) @ v

    refused(program, "roll")
    refused(flipped, "scores of other pairs")
    refused(of_the_next_query, "scores of other pairs")
    refused(both_ways, "read in two ways")
    accepted(turned)


# --- speculation -------------------------------------------------------------------------------------------


def test_speculated_masks_are_checked():
    def program(q, k, v, tri, keep):
        s = scores(q, k).masked_fill(~tri, -1e9)
        return (s + (1 - keep)[:, None] * -1e9).softmax(-1) @ v

    case = Case(program)
    module, form = case.recognised()
    assert isinstance(form, NormalForm) and len(form.speculations) == 2
    assert "distance 0..inf" in text(form) and "keys" in text(form)
    inputs = case.inputs("right", 3)
    assert compare(module, form, inputs) == "same"
    inputs[3] = torch.ones(N, N, dtype=torch.bool)
    assert "as it was" in compare(module, form, inputs)
    inputs = case.inputs("right", 3)
    inputs[4] = inputs[4] * 0.5
    assert "0 or 1" in compare(module, form, inputs)


def test_what_the_batch_at_hand_contradicts_is_not_taken():
    """A tensor of 0 and -1e9 is no bias, though it could be one for all that the graph says."""

    def program(q, k, v, keep):
        return (scores(q, k) + keep[:, None]).softmax(-1) @ v

    inputs = Case(program).inputs("right", 0)
    inputs[-1] = torch.where(inputs[-1] == 1, 0.0, -1e9)
    (form,) = attentions(traced(program, inputs), inputs)
    assert isinstance(form, NormalForm) and form.removed_by == {"add"} and len(form.speculations) == 1


def test_speculation_takes_pairs_apart():
    """A product of two masks of rows, as DeBERTa's: pairs as they are, or keys and queries."""

    def program(q, k, v, keep):
        return scores(q, k).masked_fill(keep[:, None] * keep[:, :, None] == 0, -1e9).softmax(-1) @ v

    form = accepted(program)
    assert form.opaque == 0 and "keys" in text(form) and "queries" in text(form)


def test_nothing_is_speculated_about_what_gradients_reach():
    def program(q, k, v, keep):
        return (scores(q, k) + (1 - keep)[:, None] * -1e9).softmax(-1) @ v

    inputs = Case(program).inputs("right", 0)
    (found,) = attentions(traced(program, inputs), inputs)
    assert isinstance(found, NormalForm) and len(found.speculations) == 1
    inputs[-1] = inputs[-1].clone().requires_grad_()
    (found,) = attentions(traced(program, inputs), inputs)
    assert isinstance(found, Refused)


def test_one_value_is_no_mask():
    """A bias that has not been trained yet, say."""

    def program(q, k, v, keep):
        return (scores(q, k) + keep[:, None] * -1e9).softmax(-1) @ v

    inputs = Case(program).inputs("right", 0)
    inputs[-1] = torch.zeros(B, N, dtype=torch.float64)
    (found,) = attentions(traced(program, inputs), inputs)
    assert isinstance(found, Refused)


def test_terms_that_grow_are_noticed():
    def program(q, k, v, weight):
        return (scores(q, k) + weight[:, None].log()).softmax(-1) @ v

    case = Case(program)
    module, form = case.recognised()
    assert isinstance(form, NormalForm)
    inputs = case.inputs("right", 1)
    assert compare(module, form, inputs) == "same"
    inputs[-1] = torch.zeros_like(inputs[-1])  # a mask after all
    assert "<= 4096" in compare(module, form, inputs)


# --- blind queries -----------------------------------------------------------------------------------------


def test_a_later_batch_with_a_blind_query():
    """Band and pairs together hide all keys, though neither does alone."""

    def program(q, k, v, pairs):
        return scores(q, k).masked_fill(~TRIANGLE, -1e9).masked_fill(~pairs, -1e9).softmax(-1) @ v

    case = Case(program)
    module, form = case.recognised()
    assert isinstance(form, NormalForm)
    inputs = case.inputs("right", 1)
    inputs[-1] = torch.ones_like(inputs[-1])
    assert compare(module, form, inputs) == "same"
    inputs[-1][:, 0, 0] = False
    inputs[-1][:, 1:] = False
    assert compare(module, form, inputs) == "blind"


# --- half types --------------------------------------------------------------------------------------------


HALVES = {torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("low", ["infinity", "lowest", "large"])
@pytest.mark.parametrize("way", ["fill", "add"])
def test_half_types(dtype, low, way):
    """In halves too; the lowest number of fp16 is a large number only, since scores may come near it."""
    number = {"infinity": -INF, "lowest": torch.finfo(dtype).min, "large": -1e4}[low]

    def program(q, k, v, ids, key_bias):
        s = q @ k.transpose(1, 2) * 0.1 + key_bias[:, None]
        pad = (ids == 0)[:, None]
        s = (
            s.masked_fill(pad, number)
            if way == "fill"
            else s + torch.zeros(pad.shape, dtype=s.dtype).masked_fill(pad, number)
        )
        return s.softmax(-1) @ v

    case = Case(program)
    module, form = case.recognised(dtype=dtype)
    assert isinstance(form, NormalForm), form
    assert form.scale == torch.tensor(0.1).float().item()
    free = low == "infinity" or (low == "lowest" and dtype == torch.bfloat16)
    assert any("scores with" in a for a in form.assumptions) != free, form
    for kind in KINDS:
        inputs = case.inputs(kind, 1, dtype)
        found = [compare(module, form, inputs, HALVES[dtype]), compare_packed(module, form, inputs, HALVES[dtype])]
        assert not any("DIFFERENT" in f for f in found), (kind, found)


def test_mixed_precision():
    """Products in bf16, softmax in fp32, weights rounded: as autocast writes it."""

    def program(q, k, v, ids):
        s = (q.bfloat16() @ k.bfloat16().transpose(1, 2)).float() / 2
        w = s.masked_fill((ids == 0)[:, None], torch.finfo(torch.float32).min).softmax(-1, dtype=torch.float32)
        return w.bfloat16() @ v.bfloat16()

    case = Case(program)
    module, form = case.recognised(dtype=torch.float32)
    assert isinstance(form, NormalForm) and form.removed_by == {"fill-lowest"}
    assert any("bfloat16" in a for a in form.assumptions)
    assert compare(module, form, case.inputs("right", 1, torch.float32), 4e-2) == "same"


def test_data_that_is_rounded_stays_what_it_is():
    def program(q, k, v, key_bias):
        return (scores(q, k) + key_bias.bfloat16().double()[:, None]).softmax(-1) @ v

    accepted(program)


def test_nothing_is_speculated_about_random_numbers():
    def program(q, k, v, keep):
        return (scores(q, k) + (torch.rand_like(keep) < 0.5).double()[:, None]).softmax(-1) @ v

    _, form = Case(program).recognised()
    assert isinstance(form, NormalForm) and not form.speculations


def test_a_query_that_sees_itself_is_never_blind():
    def causal(q, k, v):
        return scores(q, k).masked_fill(~TRIANGLE, -1e9).softmax(-1) @ v

    def diagonal(q, k, v, ids):
        seen = (TRIANGLE & (ids != 0)[:, None]) | torch.eye(N, dtype=torch.bool)
        return scores(q, k).masked_fill(~seen, -INF).softmax(-1) @ v

    def strict(q, k, v):
        return scores(q, k).masked_fill(~TRIANGLE.tril(-1), -1e9).softmax(-1) @ v

    def few_keys(q, k, v):
        return (q @ k[:, :3].transpose(1, 2)).masked_fill(~TRIANGLE.T[:, :3], -1e9).softmax(-1) @ v[:, :3]

    for program in (causal, diagonal):
        assert not any("sees a key" in str(c) for c in accepted(program, blind=Blindness.NEVER).checks)
    for program in (strict, few_keys):
        accepted(program, blind=Blindness.AVERAGE)
