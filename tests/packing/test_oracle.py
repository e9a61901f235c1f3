"""What the analysis calls undemanded does not matter: disturbing it moves neither loss nor gradients.

Shares nothing with the rewriter: the padded graph is disturbed, at all values at once, so that two values which are
each irrelevant only thanks to the other are found out. Elements are scaled by random factors below one: a variance
stays positive, a probability below one, a masked score far below the others, and a row that is known to be zero, which
a packed graph puts back as zero, stays zero. As a control, the same to what is demanded must be seen.

A batch that a run-time check sends to the padded graph is left out: nothing is claimed about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import turbogr_compile
from turbogr_compile import GraphRun, Instrument, Step, _torch
from turbogr_compile.passes.rows.analysis import analyse
from turbogr_compile.runtime.statistics import statistics

from .batches import SHAPES, Batch, batch
from .harness import TOLERANCE, step
from .test_idioms import EXPECTED, IDIOMS
from .test_property import PROPERTY, PUBLISHED, kinds, sizes, specs
from .zoo import Model, Spec

Masks = Mapping[fx.Node, Tensor]


class BeforePacking(Instrument):
    """The graphs that the packing pass got, each with the arguments it was compiled for."""

    def __init__(self) -> None:
        self.found: list[tuple[fx.GraphModule, list[Any]]] = []

    def before(self, run: GraphRun, step: Step) -> None:
        if step.pass_.name == "pack-rows" and run.examples is not None:
            self.found.append((fx.GraphModule(run.module, _torch.copy_graph(run.graph)), list(run.examples)))


@dataclass
class Captured:
    """The padded graph of a step, and its inputs for each batch that takes the packed graph."""

    module: fx.GraphModule
    calls: list[list[Any]]
    refused: int  # batches that a run-time check sent to the padded graph


def captured(model: Model, batches: Sequence[Batch]) -> Captured | None:
    """None where Dynamo cuts the step into several graphs, or capture refuses it."""
    torch._dynamo.reset()
    watch = BeforePacking()
    compiled = turbogr_compile.compile(step, target="eager", on_error="raise", instruments=(watch,))
    taken, refused = [], 0
    for one in batches:
        before = _fallbacks()
        compiled(model, one)
        if _fallbacks() > before:
            refused += 1
        else:
            taken.append(one)
    if len(watch.found) != 1:
        return None
    module, examples = watch.found[0]
    names = {id(value): name for name, value in zip(Batch._fields, batches[0], strict=True)}
    calls = [[getattr(one, names[id(x)]) if id(x) in names else x for x in examples] for one in taken]
    return Captured(module, calls, refused)


def _fallbacks() -> int:
    return sum(s.fallbacks.total() for s in statistics())


class Disturbed(fx.Interpreter):
    """Scales chosen elements of values as they are computed."""

    def __init__(self, module: fx.GraphModule, masks: Masks, seed: int) -> None:
        super().__init__(module)
        self.masks, self.random = masks, torch.Generator().manual_seed(seed)
        self.extra_traceback = False
        self.disturbed = 0

    def run_node(self, n: fx.Node) -> Any:
        value, mask = super().run_node(n), self.masks.get(n)
        if mask is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        factors = torch.rand(value.shape, generator=self.random, dtype=torch.float64) * 0.8 + 0.1
        self.disturbed += bool((mask & (value != 0)).any())
        return value * torch.where(mask, factors, 1.0).to(value.dtype)


@dataclass
class Seen:
    """Results and gradients of one run."""

    values: list[Tensor]
    gradients: list[Tensor]
    disturbed: int

    @property
    def finite(self) -> bool:
        return all(bool(v.isfinite().all()) for v in (*self.values, *self.gradients))

    def distance(self, other: Seen) -> float:
        scale = max(g.abs().max().item() for g in (*self.values, *self.gradients))
        pairs = zip((*self.values, *self.gradients), (*other.values, *other.gradients), strict=True)
        return max((a - b).abs().nan_to_num(torch.inf).max().item() for a, b in pairs) / max(scale, 1e-12)


def run(module: fx.GraphModule, inputs: Sequence[Any], masks: Masks, seed: int = 0) -> Seen:
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    interpreter = Disturbed(module, masks, seed)
    outputs = pytree.tree_leaves(interpreter.run(*inputs))
    sources = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    seeds = [torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).reshape(o.shape) for o in sources]
    gradients = torch.autograd.grad(sources, leaves, seeds, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]
    return Seen([o.detach() for o in sources], found, interpreter.disturbed)


@dataclass
class Verdicts:
    """On how many batches something could be checked, how many values were disturbed, what was seen of it."""

    compared: int = 0
    refused: int = 0  # the compiled step would take the padded graph
    poisoned: int = 0  # eager is not a number
    disturbed: int = 0
    controls: int = 0
    seen: int = 0


def check(model: Model, batches: Sequence[Batch]) -> Verdicts:
    verdicts = Verdicts()
    found = captured(model, batches)
    if found is None:
        return verdicts
    verdicts.refused = found.refused
    for inputs in found.calls:
        # The analysis sees what it sees in a compiler: the batch that came first.
        masks = analyse(found.module.graph, found.calls[0]).undemanded(inputs)
        plain = run(found.module, inputs, {})
        if not plain.finite:
            verdicts.poisoned += 1
            continue
        verdicts.compared += 1
        for seed in range(2):
            noisy = run(found.module, inputs, masks, seed)
            verdicts.disturbed += noisy.disturbed
            moved = plain.distance(noisy)
            assert moved <= TOLERANCE, f"{model.spec}: {culprit(found.module, inputs, masks, plain, seed)}"
        _control(found.module, inputs, masks, plain, verdicts)
    return verdicts


def culprit(module: fx.GraphModule, inputs: Sequence[Any], masks: Masks, plain: Seen, seed: int) -> str:
    """The values whose disturbance alone is seen; else the shortest run of values, in order, that is."""
    alone = [n for n in masks if plain.distance(run(module, inputs, {n: masks[n]}, seed)) > TOLERANCE]
    if alone:
        return f"a disturbance of undemanded rows of {', '.join(f'%{n.name}' for n in alone)} is seen"
    nodes = list(masks)
    count = next(
        k for k in range(1, len(nodes) + 1)
        if plain.distance(run(module, inputs, {n: masks[n] for n in nodes[:k]}, seed)) > TOLERANCE
    )  # fmt: skip
    return f"a disturbance of undemanded rows of %{nodes[count - 1].name} is seen together with those before it"


def _control(module: fx.GraphModule, inputs: Sequence[Any], masks: Masks, plain: Seen, verdicts: Verdicts) -> None:
    """A disturbance of all that is demanded of a value is seen, for about ten values."""
    nodes = [n for n, mask in masks.items() if n.op == "call_function" and mask.any() and not mask.all()]
    for node in nodes[:: max(1, len(nodes) // 10)]:
        noisy = run(module, inputs, {node: ~masks[node]})
        if noisy.disturbed:
            verdicts.controls += 1
            verdicts.seen += plain.distance(noisy) > 1e3 * TOLERANCE


def assert_sharp(verdicts: Verdicts) -> None:
    """Something was disturbed, and the oracle would have noticed."""
    assert verdicts.compared >= 3, verdicts
    assert verdicts.disturbed > 0, verdicts
    assert verdicts.seen >= 0.6 * verdicts.controls > 0, verdicts


NARROWED = {str(spec): spec for spec in IDIOMS if str(spec) not in EXPECTED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name):
    spec = Spec.parse(PUBLISHED[name])
    assert_sharp(check(spec.model(8, 8), [batch(kind, 1, 4, 8, spec.pad) for kind in SHAPES]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROWED)
def test_idiom(name):
    spec = NARROWED[name]
    assert_sharp(check(spec.model(8, 8), [batch(kind, 1, 4, 8, spec.pad) for kind in SHAPES]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPECTED if "max-norm" not in name])
def test_idiom_that_may_be_refused(name):
    """Nothing need be undemanded here; whatever is must not matter."""
    spec = Spec.parse(name)
    check(spec.model(8, 8), [batch(kind, 1, 4, 8, spec.pad) for kind in SHAPES])


@settings(PROPERTY, max_examples=10)
@given(specs().filter(lambda s: s.table != "max-norm"), sizes, kinds)
def test_any_model(spec, size, kinds):
    note(f"{spec}  B, N, D = {size}  {kinds}")
    b, n, d = size
    check(spec.model(n, d), [batch(kind, seed, b, n, spec.pad) for seed, kind in enumerate(kinds)])


# --- the oracle itself ------------------------------------------------------------------------------------


def wrong_masks(module: fx.GraphModule) -> Masks:
    """As an analysis would say that takes the last row of every sequence for a pad."""
    rows = [n for n in module.graph.nodes if n.op == "call_function" and tuple(n.meta["val"].shape) == (4, 8, 16)]
    last = torch.zeros(1, 8, 1, dtype=torch.bool)
    last[:, -1] = True
    return dict.fromkeys(rows, last)


def test_the_oracle_sees_rows_that_are_not_demanded_by_mistake():
    steps = captured(Spec().model(8, 16), [batch("full", 0, 4, 8)])
    assert steps is not None
    module, (inputs,) = steps.module, steps.calls
    masks = wrong_masks(module)
    plain = run(module, inputs, {})
    assert masks
    assert plain.distance(run(module, inputs, {})) == 0
    assert plain.distance(run(module, inputs, masks)) > 1e-3
    assert "is seen" in culprit(module, inputs, masks, plain, 0)


def test_the_oracle_sees_two_values_that_excuse_each_other():
    """A difference that vanishes by itself where both of its terms are left alone."""

    def unmoved(theta: Tensor, x: Tensor) -> Tensor:
        gap = (x.tanh() * x.sign() - x.abs().tanh()).pow(2)  # zero, whatever x is
        return theta * gap.sum()

    module = fx.symbolic_trace(unmoved)
    inputs = [torch.ones((), dtype=torch.float64, requires_grad=True), torch.tensor([1.0, -2.0]).double()]
    every = torch.tensor([True, True])
    x = next(n for n in module.graph.nodes if n.name == "x")
    terms = {n: every for n in module.graph.nodes if n.name in ("mul", "tanh_1")}
    plain = run(module, inputs, {})
    assert plain.distance(run(module, inputs, {x: every})) < TOLERANCE
    assert plain.distance(run(module, inputs, terms)) > 1e-3
