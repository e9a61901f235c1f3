"""Any model of the zoo on any ragged batch: loss and gradients are eager's, and new lengths compile nothing.

A failure prints the spec; `FOUND` keeps the ones that have been wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from turbogr_compile import Instrument
from turbogr_compile.show.recording import Recording

from .batches import SHAPES, batch
from .harness import Compiled
from .zoo import SLOT, Spec

SIZES = [(4, 6, 8), (3, 7, 8), (8, 8, 8), (1, 5, 8), (2, 12, 4), (5, 3, 8)]  # B, N, D; equal, one, smaller, larger
PROPERTY = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)  # fmt: skip

# What most published models do, drawn as often as everything else together.
COMMON: dict[str, list[str]] = {
    "mask": ["causal", "key", "causal-key", "tril-of-keys"],
    "weigh": ["additive-1e4", "fill-inf", "fill-1e9", "silu"],
    "attend": ["manual", "hstu", "sdpa", "mha"],
    "readout": ["rows", "shifted", "gather", "index", "boolean", "masked-mean"],
    "loss": ["ce-ignore", "ce-labels", "ce-masked", "ce-weighted", "bce-indexed", "sampled"],
    "after": ["none", "times", "times-in-place"],
}


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    standard = {f.name: f.default for f in fields(Spec)}
    chosen: dict[str, str] = {}
    for slot, idioms in SLOT.items():
        usual = st.sampled_from(COMMON.get(slot, [standard[slot]]))
        chosen[slot] = draw(usual | st.sampled_from(list(idioms)))
    return Spec(**chosen, layers=draw(st.sampled_from([1, 2]))).mended()


kinds = st.lists(st.sampled_from(list(SHAPES)), min_size=3, max_size=3)
sizes = st.sampled_from(SIZES)


def check(spec: Spec, size: tuple[int, int, int], kinds: Sequence[str], *more: Instrument) -> list[str]:
    """Compare on a batch of each kind, one compilation for all; what eager itself could not compute."""
    b, n, d = size
    compiled = Compiled(spec.model(n, d), more=more)
    found = [compiled.compare(batch(kind, seed, b, n, spec.pad)).poisoned for seed, kind in enumerate(kinds)]
    return [f or "compared" for f in found]


def explore(examples: int) -> Counter[str]:
    results: Counter[str] = Counter()

    @settings(PROPERTY, max_examples=examples)
    @given(specs(), sizes, kinds)
    def any_model_gives_what_eager_gives(spec: Spec, size: tuple[int, int, int], kinds: list[str]) -> None:
        note(f"{spec}  B, N, D = {size}  {kinds}")
        results.update(check(spec, size, kinds))

    any_model_gives_what_eager_gives()
    return results


def assert_mostly_compared(results: Counter[str]) -> None:
    """Batches on which eager is not a number prove little; they must stay the exception."""
    assert results["compared"] > 0.7 * results.total(), results


def test_any_model_gives_what_eager_gives():
    assert_mostly_compared(explore(25))


@pytest.mark.slow
def test_many_models_give_what_eager_gives():
    assert_mostly_compared(explore(600))


# Published models in the words of the zoo.
PUBLISHED = {
    "SASRec": "position=times-valid entry=times attend=mha-float-mask mask=causal feed=conv-1 after=times-in-place"
    " readout=rows loss=bce-indexed",
    "SASRec, gathered": "norm=layer mask=tril-of-keys weigh=additive-1e4 heads=permute feed=erf-gelu readout=gather",
    "BERT4Rec": "mask=key weigh=additive-1e4 feed=erf-gelu readout=one-hot loss=ce-weighted head=linear",
    "HSTU": "entry=times-in-place attend=hstu mask=causal bias=toeplitz-time feed=none after=times readout=shifted"
    " loss=sampled",
    "language model": "table=padding-idx valid=mask-int-bool position=none norm=rms attend=sdpa heads=grouped-expand"
    " feed=gated readout=shifted loss=ce-labels",
    "rotary": "position=none norm=rms-module heads=rotary feed=gated readout=shifted loss=ce-labels",
    "item and action": "frame=interleaved mask=causal-key readout=rows loss=ce-weighted",
    "target at the end": "frame=target mask=key readout=masked-mean loss=ce-plain head=linear",
    "candidates": "position=reversed mask=key readout=target-attention loss=bce-masked extra=actions",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name):
    """And recorded, which looks at every rewrite: whoever dumps graphs gets the same numbers."""
    spec, recording = Spec.parse(PUBLISHED[name]), Recording()
    assert "compared" in check(spec, (4, 8, 8), list(SHAPES), recording)
    assert any(step["status"] == "changed" for record in recording.records for step in record["steps"])


# Sizes, and kinds of batches.
FOUND: dict[str, tuple[tuple[int, int, int], list[str]]] = {
    "attend=sdpa-float bias=toeplitz layers=1": ((4, 6, 8), ["right"]),
    "valid=not-eq readout=boolean layers=1": ((4, 6, 8), ["right", "graded"]),
    "readout=boolean layers=1": ((4, 6, 8), ["right", "graded"]),
    "readout=nonzero layers=1": ((4, 6, 8), ["right", "graded"]),
    "readout=boolean loss=ce-labels layers=1": ((1, 5, 8), ["some-empty", "left"]),
    "norm=over-rows weigh=relu-squared layers=1": ((5, 3, 8), ["length-one"]),
    "attend=hstu readout=softmax-pool layers=1": ((3, 7, 8), ["some-empty"]),
    "mix=gru readout=softmax-pool layers=1": ((4, 6, 8), ["right", "some-empty"]),
    "weigh=softmax-then-times": ((8, 8, 8), ["right"]),
    "attend=hstu mask=causal layers=1": ((4, 6, 8), ["right", "left"]),
}


@pytest.mark.parametrize("text", FOUND)
def test_model_that_has_gone_wrong(text):
    check(Spec.parse(text), *FOUND[text])


@settings(PROPERTY, max_examples=50)
@given(specs())
def test_a_spec_is_made_again_from_its_text(spec):
    assert Spec.parse(str(spec)) == spec == spec.mended()
