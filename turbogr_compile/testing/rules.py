"""Helpers for testing rules and passes. Everything runs on the CPU, without torch.compile.

    def test_fold_double_transpose():
        def before(x):   return x.transpose(0, 1).transpose(0, 1).relu()
        def expected(x): return x.relu()
        assert_rewrites(before, expected, rule=twice, inputs="f32[a, b]")

    TestTwice = rule_tests(twice)      # four tests that every rule should pass

Graphs are traced by the compiler's own tracer and passes are run by its manager, verified strictly.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .._torch import TorchDispatchMode, trying
from ..capture import trace as tracing
from ..check.numerics import compare
from ..check.verify import Verifier
from ..graph.phases import Phase, Role, Vocabulary
from ..graph.shapes import Dim, TensorSpec, as_specs, real_inputs, same_literal, sizes_of, symbolic_inputs
from ..graph.text import diff_text, graph_text, type_text
from ..pipeline.context import Context, NearMiss
from ..pipeline.instrument import GraphRun, Instrument
from ..pipeline.manager import Manager
from ..pipeline.options import Options
from ..pipeline.pass_base import Pass
from ..pipeline.pipeline import Pipeline
from ..rules.match import Matcher, State
from ..rules.pattern import Pattern, is_value, literal_of
from ..rules.rule import Rule, RuleSet, Spelling

Function = Callable[..., Any]
Inputs = str | Sequence[TensorSpec]


def trace_graph(fn: Function, inputs: Inputs | Sequence[torch.Tensor], phase: Phase = Phase.PRE_GRAD) -> fx.GraphModule:
    """The function in the normal form of a phase, with its own source lines; named dims are symbolic sizes."""
    tensors = symbolic_inputs(inputs) if _is_text(inputs) else list(inputs)  # type: ignore[arg-type]
    return tracing.trace_with_lines(fn, tensors, phase)


def _is_text(inputs: Any) -> bool:
    return isinstance(inputs, str) or all(isinstance(i, TensorSpec) for i in inputs)


def run_passes(
    module: fx.GraphModule, passes: Sequence[Pass | str] | str, phase: Phase = Phase.PRE_GRAD, verify: str = "strict"
) -> list[Context]:
    """Run passes in place as the compiler would, verified, looking for near misses; a failing pass raises."""
    pipeline = Pipeline.of(passes if isinstance(passes, str) else list(passes))
    options = Options(on_error="raise", pipeline=pipeline, worth="always")
    role = Role.CAPTURED if phase is Phase.PRE_GRAD else Role.INFERENCE
    run = GraphRun("test", role, phase, options.target, pipeline, options, module, Vocabulary(phase))
    instruments: list[Instrument] = [_Explain()]
    if verify != "off":
        instruments.append(Verifier(verify))
    Manager(run, instruments).run_all()
    return [step.context for step in run.steps if step.context is not None]


class _Explain(Instrument):
    explains = True


def assert_rewrites(
    before: Function, expected: Function, *, inputs: Inputs, rule: Rule | RuleSet | None = None,
    passes: Sequence[Pass | str] | str = (), phase: Phase | None = None,
) -> fx.GraphModule:  # fmt: skip
    """`before`, rewritten, is `expected`: same ops on same values, names and order of independent ops aside."""
    chosen, phase = _passes(rule, passes, phase)
    tensors = symbolic_inputs(inputs)
    module = trace_graph(before, tensors, phase)
    contexts = run_passes(module, chosen, phase)
    wanted = trace_graph(expected, tensors, phase)
    if not same_graph(module.graph, wanted.graph):
        shown = diff_text(plain_text(wanted.graph), plain_text(module.graph), ("expected", "rewritten"))
        missed = "".join(f"\n{near_miss_text(m)}" for c in contexts for m in c.near_misses)
        raise AssertionError(f"not what was expected\n{shown}{missed}")
    return module


def assert_unchanged(fn: Function, *, rule: Rule | RuleSet | None = None, inputs: Inputs, **more: Any) -> None:
    """No rewrite happens."""
    assert_rewrites(fn, fn, rule=rule, inputs=inputs, **more)


def assert_near_miss(
    fn: Function, rule: Rule, kind: str, inputs: Inputs, *, text: str = "", line: str = ""
) -> NearMiss:
    """The rule does not apply, and its best near miss has an obstacle of that kind; `text` is part of the obstacle's
    text, `line` part of the source line it is reported at."""
    module = trace_graph(fn, inputs, rule.phase)
    (context,) = run_passes(module, [rule.pass_class()], rule.phase)
    found = [m for m in context.near_misses if m.rule == rule.name]
    shown = "".join(f"\n{near_miss_text(m)}" for m in found) or " none"
    if any(r.rule == rule.name for r in context.rewrites):
        raise AssertionError(f"rule '{rule.name}' applied\n{graph_text(module.graph)}")
    for miss in found:
        if any(o.kind == kind and text in o.text for o in miss.obstacles) and line in str(miss.line or ""):
            return miss
    raise AssertionError(f"no near miss of '{rule.name}' with obstacle {kind!r} {text!r} {line!r}; there are:{shown}")


def near_miss_text(miss: NearMiss) -> str:
    lines = [f"{miss.rule}: {miss.matched}/{miss.total} ops at %{miss.node}  {miss.line or ''}".rstrip()]
    lines += [f"    {o.kind:8} %{o.node}: {o.text}" + (f"  → {o.hint}" if o.hint else "") for o in miss.obstacles]
    return "\n".join(lines)


def same_graph(a: fx.Graph, b: fx.Graph) -> bool:
    """Same computation from the same inputs; unread ops count, names do not."""
    wanted, found = Pattern(fx.GraphModule({}, b), strict=True), Pattern(fx.GraphModule({}, a), strict=True)
    sizes = [(len(p.inputs), len(p.outputs), len(p.cones)) for p in (wanted, found)]
    if sizes[0] != sizes[1]:
        return False
    start = State(dict(zip(wanted.inputs, found.inputs, strict=True)))
    pairs = list(zip(wanted.outputs, found.outputs, strict=True))
    states = Matcher(wanted, {}, soft=False).match([p for p in pairs if is_value(p[0])], start)
    others = [(literal_of(p), literal_of(q)) for p, q in pairs if not is_value(p)]
    one_to_one = any(len(set(s.nodes.values())) == len(s.nodes) for s in states)
    return one_to_one and all(same_literal(p, q) for p, q in others)


def plain_text(graph: fx.Graph) -> str:
    """The graph without source lines and origins, with names given by position: what `same_graph` looks at."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        name = None if node.op == "call_function" else node.name  # fx names a call after its op
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = copy.create_node(node.op, node.target, args, kwargs, name=name)
        copies[node].meta = {"val": node.meta.get("val")}
    return graph_text(copy)


def _passes(
    rule: Rule | RuleSet | None, passes: Sequence[Pass | str] | str, phase: Phase | None
) -> tuple[Sequence[Pass | str] | str, Phase]:
    if (rule is None) == (not passes):
        raise TypeError("give either rule= or passes=")
    if rule is not None:
        return [rule.pass_class()], phase or rule.phase
    return passes, phase or next(Pipeline.of(passes if isinstance(passes, str) else list(passes)).passes()).phase


# --- the tests every rule should pass ------------------------------------------------------------

SIZES = (1, 2, 3, 8, 16, 64)
_EXAMPLES = 12


class _Bench:
    """A rule with everything needed to try it."""

    def __init__(self, rule: Rule, inputs: Inputs | None, literals: Mapping[str, Any] | None) -> None:
        self.rule, self.words = rule, Vocabulary(rule.phase)
        self._inputs, self._literals = inputs, literals

    def specs(self) -> tuple[TensorSpec, ...]:
        if self._inputs is not None:
            return as_specs(self._inputs)
        if self.rule.inputs is not None:
            return self.rule.inputs
        traced = self.rule.spellings[0].patterns(self.words)[0]
        ranks = [n.meta["val"].dim() for n in traced.inputs]
        return tuple(TensorSpec("float", tuple(Dim(f"d{i}") for i in range(rank))) for rank in ranks)

    def literals(self) -> dict[str, Any]:
        return self.rule.spellings[0].patterns(self.words)[0].example | dict(self._literals or {})

    def settings(self) -> Iterator[list[torch.Tensor]]:
        """Inputs to try: every dtype the rule takes, with symbolic sizes and with one round size."""
        specs = self.specs()
        for position in range(max(len(s.dtypes) for s in specs)):
            typed = [s.of_dtype(s.dtypes[min(position, len(s.dtypes) - 1)]) for s in specs]
            yield symbolic_inputs(typed)
            yield real_inputs(typed, dict.fromkeys(sizes_of([s.closed(1) for s in specs]), 64))

    def applied(self, spelling: Spelling, tensors: Sequence[torch.Tensor]) -> tuple[fx.GraphModule, Context] | None:
        """The spelling, rewritten, and what happened; None where the pattern cannot take such tensors."""
        bound = self.literals()
        try:
            with trying():
                module = trace_graph(lambda *holes: spelling.fn(*holes, **bound), tensors, self.rule.phase)
        except (RuntimeError, ValueError, IndexError):
            return None
        (context,) = run_passes(module, [self.rule.pass_class()], self.rule.phase)
        return module, context

    def fires(self, result: tuple[fx.GraphModule, Context] | None) -> bool:
        return result is not None and any(r.rule == self.rule.name for r in result[1].rewrites)

    def first_fit(self, spelling: Spelling) -> fx.GraphModule:
        """The spelling, rewritten, on the first inputs where the rule applies."""
        missed: list[NearMiss] = []
        for tensors in self.settings():
            result = self.applied(spelling, tensors)
            if result is not None and self.fires(result):
                return result[0]
            missed += result[1].near_misses if result is not None else []
        reasons = "".join(f"\n{near_miss_text(m)}" for m in missed[:3])
        raise AssertionError(f"rule '{self.rule.name}' does not match its own pattern ({spelling.site}){reasons}")

    def compares(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Pattern and replacement give the same numbers; False where the rule does not take such tensors."""
        assert self.rule.replacement is not None
        pattern, bound = self.rule.spellings[0].fn, self.literals()
        doubled = [t.double() if t.is_floating_point() else t for t in tensors]
        try:
            old, reference = _listed(pattern(*tensors, **bound)), _listed(pattern(*doubled, **bound))
        except (RuntimeError, ValueError, IndexError):
            return False
        try:
            verdict = compare(old, _listed(self.rule.replacement(*tensors, **bound)), reference)
        except Exception:
            if self.fires(self.applied(self.rule.spellings[0], tensors)):
                raise
            return False
        if verdict.wrong and self.fires(self.applied(self.rule.spellings[0], tensors)):
            raise AssertionError(f"rule '{self.rule.name}' on {type_text(list(tensors))}: {verdict.text}")
        return not verdict.wrong


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def rule_tests(rule: Rule, *, inputs: Inputs | None = None, literals: Mapping[str, Any] | None = None) -> type:
    """A pytest class: the rule matches its own pattern in every spelling, its replacement describes the same
    tensors and computes the same numbers, and applying it twice changes nothing.

    `inputs` and `literals` say what to try where the rule itself does not.
    """
    import hypothesis
    import pytest
    from hypothesis import strategies as st

    bench = _Bench(rule, inputs, literals)

    class Generated:
        @pytest.mark.parametrize("spelling", rule.spellings, ids=lambda s: f"{s.fn.__name__}:{s.site.line}")
        def test_matches_its_own_pattern(self, spelling: Spelling) -> None:
            bench.first_fit(spelling)

        def test_replacement_describes_the_same_tensors(self) -> None:
            # Applying checks the metadata of the outputs; the verifier checks all of it again.
            assert any([bench.fires(bench.applied(rule.spellings[0], t)) for t in bench.settings()])

        def test_computes_the_same_numbers(self) -> None:
            compared = []

            @hypothesis.settings(
                max_examples=_EXAMPLES, deadline=None, derandomize=True, phases=[hypothesis.Phase.generate]
            )
            @hypothesis.given(data=st.data())
            def over_sizes_and_types(data: st.DataObject) -> None:
                typed = _alike(bench.specs(), data, st)
                leading = data.draw(st.integers(0, 2)) if any(s.open for s in typed) else 0
                names = dict.fromkeys(
                    d.name for s in typed for d in s.closed(leading).dims if d.name and d.size is None
                )
                sizes = {name: data.draw(st.sampled_from(SIZES)) for name in names}
                tensors = real_inputs(typed, sizes, seed=data.draw(st.integers(0, 99)), leading=leading)
                compared.append(bench.compares(tensors))

            over_sizes_and_types()
            assert any(compared), "the rule took none of the inputs that were tried; say what it takes with inputs="

        def test_applying_twice_changes_nothing(self) -> None:
            module = bench.first_fit(rule.spellings[0])
            once = graph_text(module.graph)
            (context,) = run_passes(module, [rule.pass_class()], rule.phase)
            assert not context.rewrites, diff_text(once, graph_text(module.graph), ("once", "twice"))

    Generated.__name__ = Generated.__qualname__ = f"Test{rule.pass_class.__name__}"
    return Generated


def _alike(specs: Sequence[TensorSpec], data: Any, st: Any) -> list[TensorSpec]:
    """One dtype for every tensor of a group: mixed precision is a rule of its own."""
    chosen = {s.token: data.draw(st.sampled_from(s.dtypes)) for s in dict.fromkeys(specs)}
    return [s.of_dtype(chosen[s.token]) for s in specs]


# --- arithmetic ----------------------------------------------------------------------------------


class Flops(TorchDispatchMode):
    """Counts what is executed, by the formulas of torch.utils.flop_counter, also inside of compiled code.

    torch's own FlopCounterMode makes Dynamo run eager code: it does not say that compiled code may run under it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        self.total += formula(*args, **(kwargs or {}), out_val=result) if formula else 0
        return result


# --- text ----------------------------------------------------------------------------------------


def filecheck(text: str, checks: str) -> None:
    """Check text against FileCheck lines (`CHECK:`, `CHECK-NEXT:`, `CHECK-NOT:` ...); needs the package filecheck."""
    from filecheck.finput import FInput
    from filecheck.matcher import Matcher as FileChecker
    from filecheck.options import Options as FileCheckOptions
    from filecheck.parser import Parser, pattern_for_opts

    options = FileCheckOptions(match_filename="checks")
    heard = io.StringIO()
    with redirect_stderr(heard):
        parser = Parser(options, io.StringIO(checks), *pattern_for_opts(options))
        failed = FileChecker(options, FInput("text", text), parser).run()
    if failed:
        raise AssertionError(f"{heard.getvalue()}\n{text}")
