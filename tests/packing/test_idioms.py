"""Every idiom of the zoo in an otherwise standard model: what eager gives, without the arithmetic that padding costs.

How much must go is measured against eager itself: the batch is right-padded, and each of its sequences alone, without
padding, is what a packed step may cost. Demand often removes more (rows that no loss reads), never less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from .batches import SHAPES, batch
from .harness import Compiled, flops, flops_of_sequences, step
from .test_property import COMMON
from .zoo import SLOT, Spec

B, N, D = 6, 16, 8
SLACK = 1.05


@dataclass(frozen=True)
class Expected:
    """`at_most`, `at_least`: FLOPs relative to the unpadded sequences."""

    why: str
    at_most: float | None = None
    at_least: float = 0.0


def packed(why: str = "", at_most: float = SLACK) -> Expected:
    return Expected(why, at_most)


def refused(why: str) -> Expected:
    """Pads reach the loss: their rows must be computed."""
    return Expected(why, at_least=1.2)


def unclaimed(why: str) -> Expected:
    """Right, and whatever it costs."""
    return Expected(why)


# Everything that is not listed is packed completely.
EXPECTED: dict[str, Expected] = {
    "valid=lengths-inclusive": packed("one row more than the loss reads", 1.45),
    "valid=lengths-left": unclaimed("the mask contradicts the data: rows that are read see no key"),
    "valid=nonzero-row": unclaimed("validity depends on a parameter"),
    "valid=seen-so-far": unclaimed("every row after the first is valid"),
    "mix=mixer": refused("a linear layer over all rows"),
    "mix=masked-mixer": unclaimed("zero rows enter a linear layer over all rows"),
    "mix=shift-next": packed("one row more per layer", 1.45),
    "mix=shift-roll": packed("the first row reads the last", 1.45),
    "mix=mean": unclaimed("a mean over embedded pads, which costs no products before the first layer"),
    "mix=running-mean": unclaimed("a running sum over rows"),
    "mix=flip": unclaimed("row i reads row N - 1 - i"),
    "mix=over-batch": unclaimed("a mean over the column of embedded rows, which costs no products either"),
    "norm=over-rows": refused("statistics over rows"),
    "norm=batch": refused("statistics over rows"),
    "mask=none": refused("pads are attended to"),
    "mask=strict": refused("the first row sees no key: large negative numbers average over all"),
    "mask=outer-product": unclaimed("the mask is a matrix product"),
    "mask=first-open": unclaimed("column 0 is seen, valid or not"),
    "weigh=softmax-then-times": refused("pads are in the denominator"),
    "weigh=softmax-times-renormalised": unclaimed("pads are in a denominator that cancels"),
    "weigh=exponentials": unclaimed("a softmax written out"),
    "weigh=soft-1": refused("a penalty of 1 is no mask"),
    "weigh=relu-squared": unclaimed("an activation without a kernel"),
    "weigh=sigmoid": unclaimed("an activation without a kernel"),
    "weigh=sigmoid-of-filled": unclaimed("an activation without a kernel"),
    "weigh=silu-by-count": unclaimed("divided by the number of visible keys"),
    "feed=function-decaying": refused("its backward pulls at pads too"),
    "feed=conv-3": packed("a row reads its neighbours, pads among them", 1.45),
    "readout=last-two": packed("a sequence of one item has one row", 1.1),
    "readout=max-pool": unclaimed("a maximum over rows"),
    "readout=plain-mean": refused("the mean is over pads too"),
    "readout=plain-max": refused("the maximum is over pads too"),
    "readout=sum-over-lengths": refused("the sum is over pads too"),
    "loss=ce-class-weights": unclaimed("the mean is weighted by class"),
    "loss=ce-soft": refused("targets that are shares are never ignored"),
    "loss=ce-plain": refused("pads have a class like every item"),
    "loss=ce-banned": unclaimed("logits are written in place"),
    "loss=in-batch": unclaimed("the targets of pads are negatives"),
    "loss=mean-of-all": refused("the mean is over pads too"),
}  # fmt: skip


# The standard model, and each idiom alone in it.
IDIOMS = dict.fromkeys(
    dataclasses.replace(Spec(), **{slot: idiom}).mended() for slot, known in SLOT.items() for idiom in known
)


def expected_of(spec: Spec) -> Expected:
    choices = str(spec).split()
    return next((e for choice, e in EXPECTED.items() if choice in choices), packed())


def _cases() -> Iterator[Any]:
    """One layer and two; what is not common and not refused takes its time elsewhere."""
    common = {f"{slot}={idiom}" for slot, usual in COMMON.items() for idiom in usual}
    for layers in (1, 2):
        for spec in IDIOMS:
            soon = layers == 1 and (set(str(spec).split()) <= {*common, "standard"} or expected_of(spec).at_least)
            chosen = dataclasses.replace(spec, layers=layers)
            yield pytest.param(chosen, id=str(chosen), marks=() if soon else pytest.mark.slow)


def test_expectations_name_idioms():
    assert {Spec.parse(name) for name in EXPECTED} <= set(IDIOMS)


def test_alone_is_what_eager_makes_of_a_sequence_in_a_padded_batch():
    """The yardstick: the standard model does not see its padding."""
    spec, padded = Spec(loss="ce-sum"), batch("graded", 0, B, N)
    whole = step(spec.model(N, D), padded) * (padded.targets != 0).sum()
    model = spec.model(N, D)
    parts = [(step(model, (one := padded.alone(row))), (one.targets != 0).sum()) for row in range(B)]
    assert torch.allclose(whole, sum(loss * count for loss, count in parts))


@pytest.fixture(scope="module", params=_cases())
def compiled(request) -> Compiled:
    """Compiled once for all that is asked about an idiom."""
    return Compiled(request.param.model(N, D))


def test_is_what_eager_gives(compiled):
    """On every kind of batch, with one compilation."""
    for kind in SHAPES:
        compiled.compare(batch(kind, 1, B, N, compiled.spec.pad))


def test_costs_no_padding(compiled):
    spec, expected = compiled.spec, expected_of(compiled.spec)
    ragged = batch("graded", 0, B, N, spec.pad)
    compiled.compare(ragged)  # compiles, where this test runs alone
    found, alone = flops(compiled.run, compiled.model, ragged), flops_of_sequences(spec, ragged, D)
    padded = flops(step, compiled.reference, ragged)
    told = f"{spec}: {found / alone:.2f} of the unpadded sequences, {found / padded:.2f} of eager ({expected.why})"
    assert found <= padded, told
    assert expected.at_most is None or found <= expected.at_most * alone, told
    assert found >= expected.at_least * alone, told
