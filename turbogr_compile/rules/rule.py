"""Rules: a rewrite written as the code a user would write.

    @rule("fuse-rms-norm", phase=Phase.PRE_GRAD, inputs="float[..., d], float[d]")
    def rms_norm(x, w, *, eps: float):
        \"\"\"Compute RMS norms with one kernel.\"\"\"
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w

    @rms_norm.when
    def _(m):
        m.require(known(m.x.shape[-1] % 16 == 0), "last dim not provably a multiple of 16")

    @rms_norm.replace
    def _(x, w, *, eps):
        return torch.ops.turbogr.rms_norm(x, w, eps)

Positional parameters are tensors. Keyword-only ones are literals bound from the graph; every other literal is
strict. Returning a tuple makes a rule with several outputs. Nothing is traced before a rule is first used.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from .._torch import outside_compilation, trying
from ..errors import OptionError, RuleError
from ..graph.phases import ALL_ROLES, Phase, Role, Vocabulary
from ..graph.provenance import Site
from ..graph.shapes import Dim, TensorSpec, generic_inputs, parse_inputs, same_literal
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from .match import Match
from .pattern import Pattern, literals, trace_holes
from .rewrite import apply_rules

_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*$")
_LITERAL_TYPES: dict[Any, type] = {
    t: kind
    for kind, names in {
        float: (float, "float"), int: (int, "int"), bool: (bool, "bool"), torch.dtype: (torch.dtype, "torch.dtype"),
    }.items()
    for t in names
}  # fmt: skip
_DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.float32)
_LEADING = (1, 2, 0, 3)  # how many dims `...` stands for when a pattern is first traced
_RANKS = (2, 3, 4, 5)  # tried for holes without declared inputs


class Rule:
    """A pattern in one or more spellings, conditions, and a replacement."""

    def __init__(
        self, fn: Callable[..., Any], name: str, phase: Phase, inputs: str | None = None, recompute: bool = False
    ) -> None:
        self.name, self.phase, self.recompute = name, phase, recompute
        self.site = _site_of_function(fn)
        self.tensors, self.literals = self._parameters(fn)
        self.inputs = self._declared(inputs)
        self.spellings = [Spelling(self, fn)]
        self.predicates: list[Callable[[Match], None]] = []
        self.replacement: Callable[..., Any] | None = None
        self.pass_class: type[RulePass]

    def __repr__(self) -> str:
        return f"<rule {self.name} at {self.site}>"

    @property
    def holes(self) -> tuple[str, ...]:
        return (*self.tensors, *self.literals)

    def variant(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Another spelling with the same holes."""
        self._check_parameters(fn, "variant")
        self.spellings.append(Spelling(self, fn))
        return fn

    def when(self, fn: Callable[[Match], None]) -> Callable[[Match], None]:
        """A condition: `fn(m)` says `m.require(condition, reason)`."""
        self.predicates.append(fn)
        return fn

    def replace(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What the match becomes, traced on the matched inputs."""
        if self.replacement is not None:
            raise self.error(f"a second replacement at {_site_of_function(fn)}; a rule has one")
        self._check_parameters(fn, "replacement")
        self.replacement = fn
        return fn

    def error(self, text: str) -> RuleError:
        return RuleError(f"rule '{self.name}' ({self.site}): {text}")

    def check(self) -> None:
        if self.replacement is None:
            raise self.error("has no replacement; add one with @<rule>.replace")

    def _parameters(self, fn: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, type]]:
        tensors, bound = [], {}
        for p in inspect.signature(fn).parameters.values():
            if hasattr(Match, p.name) or p.name in ("rule", "literals", "outputs", "nodes", "refusals"):
                raise self.error(f"a hole cannot be named {p.name!r}, which `when` needs for itself")
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                tensors.append(p.name)
            elif p.kind is p.KEYWORD_ONLY:
                if p.annotation not in _LITERAL_TYPES:
                    raise self.error(f"annotate literal {p.name!r} with float, int, bool or torch.dtype")
                bound[p.name] = _LITERAL_TYPES[p.annotation]
            else:
                raise self.error(f"parameter *{p.name}: name each tensor, or write one rule per number of tensors")
        if not tensors:
            raise self.error("has no tensor hole; positional parameters are tensors")
        return tuple(tensors), bound

    def _check_parameters(self, fn: Callable[..., Any], what: str) -> None:
        parameters = inspect.signature(fn).parameters.values()
        tensors = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        if tensors != self.tensors or named != self.literals.keys():
            wanted = ", ".join([*self.tensors, *(["*"] if self.literals else []), *self.literals])
            raise self.error(f"the {what} at {_site_of_function(fn)} must take the same holes: ({wanted})")

    def _declared(self, inputs: str | None) -> tuple[TensorSpec, ...] | None:
        if inputs is None:
            return None
        try:
            specs = parse_inputs(inputs)
        except OptionError as error:
            raise self.error(str(error)) from error
        if len(specs) != len(self.tensors):
            raise self.error(f"inputs= describes {len(specs)} tensors, the pattern takes {len(self.tensors)}")
        return specs


class Spelling:
    """One way to write a rule's pattern. Traced on first use, then kept."""

    def __init__(self, rule: Rule, fn: Callable[..., Any]) -> None:
        self.rule, self.fn = rule, fn
        self.site = _site_of_function(fn)
        self._patterns: dict[Vocabulary, tuple[Pattern, ...]] = {}
        self._always: dict[Vocabulary, frozenset[Any]] = {}

    def patterns(self, words: Vocabulary) -> tuple[Pattern, ...]:
        """The pattern on generic tensors; several where its structure depends on the number of leading dims."""
        if words not in self._patterns:
            kept: list[Pattern] = []
            for pattern in self._generic_patterns(words):
                if all(pattern.skeleton() != k.skeleton() for k in kept):
                    kept.append(pattern)
            self._patterns[words] = tuple(kept)
        return self._patterns[words]

    def may_occur(self, words: Vocabulary, present: Container[Any]) -> bool:
        """False where an op that the pattern has at any rank is not in the graph; costs one trace at most."""
        if words not in self._always:
            ops = self._patterns[words][0].required if words in self._patterns else self._probe(words)
            self._always[words] = frozenset(op for op in ops if not _depends_on_rank(op))
        return all(op in present for op in self._always[words])

    def _probe(self, words: Vocabulary) -> frozenset[Any]:
        """Ops of the pattern from the first trace that works; nothing is located in it."""
        for specs, leading in self._settings():
            rank = max(len(s.closed(leading).dims) for s in specs)
            for values in itertools.islice(_literal_values(self.rule.literals, rank), 4):
                with suppress(RuleError):
                    return self._trace(specs, leading, values[0], words).required
        return frozenset()

    def _generic_patterns(self, words: Vocabulary) -> Iterator[Pattern]:
        self.rule.check()
        failures: list[RuleError] = []
        found = False
        for specs, leading in self._settings():
            try:
                pattern = self._generic(specs, leading, words)
            except RuleError as error:
                failures.append(error)
                continue
            found = True
            yield pattern
            if self.rule.inputs is None:
                return  # nothing is said about ranks: the first that can be traced
        if not found:
            raise max(failures, key=lambda e: _HIDDEN in str(e))

    def trace_on(
        self, values: list[torch.Tensor], which: Sequence[int], bound: dict[str, Any], words: Vocabulary
    ) -> Pattern:
        """The pattern on these tensors; hole i takes `values[which[i]]`."""
        return Pattern(trace_holes(self.fn, values, which, bound, words), strict=True)

    def _settings(self) -> Iterator[tuple[Sequence[TensorSpec], int]]:
        if self.rule.inputs is not None:
            is_open = any(s.open for s in self.rule.inputs)
            yield from ((self.rule.inputs, n) for n in (_LEADING if is_open else (0,)))
            return
        for name in ("d{}", "d"):  # sizes all different; or, where that does not fit (a matmul), all the same
            # Integers are mostly dims: enough of them to tell two literals apart.
            for rank in sorted(_RANKS, key=lambda r: r != 4) if int in self.rule.literals.values() else _RANKS:
                dims = tuple(Dim(name.format(i)) for i in range(rank))
                yield [TensorSpec("float", dims)] * len(self.rule.tensors), 0

    def _generic(self, specs: Sequence[TensorSpec], leading: int, words: Vocabulary) -> Pattern:
        """Traced with several sets of literals: what varies as a literal does is where that literal sits."""
        failure: RuleError | None = None
        for values in _literal_values(self.rule.literals, rank=max(len(s.closed(leading).dims) for s in specs)):
            try:
                traces = [self._trace(specs, leading, v, words) for v in values]
                positions = self._locate(traces, values)
            except RuleError as error:
                failure = error if failure is None or _HIDDEN in str(error) else failure
                continue
            return Pattern(traces[0].module, positions, example=values[0])
        assert failure is not None
        raise failure

    def _trace(self, specs: Sequence[TensorSpec], leading: int, values: dict[str, Any], words: Vocabulary) -> Pattern:
        with outside_compilation(), trying():
            inputs = generic_inputs(specs, leading)
            try:
                module = trace_holes(self.fn, inputs, range(len(inputs)), values, words)
            except Exception as error:
                shown = ", ".join(str(s.closed(leading)) for s in specs).replace("_lead", "d")
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise self._error(
                    f'cannot be traced on {shown}: {first}; say what it takes with inputs="..."'
                ) from error
        pattern = Pattern(module)
        self._check(pattern)
        return pattern

    def _check(self, pattern: Pattern) -> None:
        if any(n.op == "get_attr" for n in pattern.module.graph.nodes):
            raise self._error("holds a constant tensor; make it a parameter, or build it with torch.full")
        if not all(o in pattern.cones for o in pattern.outputs):
            raise self._error("must return tensors it computes, not its inputs or numbers")
        read = {n for op in pattern.ops for n in op.all_input_nodes}
        unused = [name for name, p in zip(self.rule.tensors, pattern.inputs, strict=True) if p not in read]
        if unused:
            raise self._error(f"does not use {unused[0]!r}, so nothing can bind it")

    def _locate(self, traces: list[Pattern], values: list[dict[str, Any]]) -> dict[Any, str]:
        if not self.rule.literals:
            return {}
        ops = [[n for n in t.module.graph.nodes if n.op == "call_function"] for t in traces]
        if len({tuple(n.target for n in o) for o in ops}) > 1:
            raise self._error("changes its ops with the value of a literal; write one rule per case")
        positions: dict[Any, str] = {}
        for same in zip(*ops, strict=True):
            found = [dict(literals(n)) for n in same]
            for path in found[0]:
                seen = [f.get(path) for f in found]
                for name in self.rule.literals:
                    wanted = [v[name] for v in values]
                    if all(same_literal(a, b) for a, b in zip(seen, wanted, strict=True)):
                        positions[same[0], path] = name
        for name in self.rule.literals:
            if name not in positions.values():
                raise self._error(f"{_HIDDEN} {name!r}: no op takes it unchanged; compute with it in the replacement")
        return positions

    def _error(self, text: str) -> RuleError:
        return RuleError(f"rule '{self.rule.name}' ({self.site}): the pattern {text}")


_HIDDEN = "hides literal"
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul", "mv", "dot", "linear", "einsum"}


def _depends_on_rank(op: Any) -> bool:
    """Products, and the views around them, are spelled by the number of dims; all other ops are what they are."""
    if not isinstance(op, torch._ops.OpOverload):
        return True
    views = any(r.alias_info is not None for r in op._schema.returns)
    return views or op.overloadpacket.__name__ in {*_PRODUCTS, "reshape", "clone"}


def _literal_values(types: dict[str, type], rank: int) -> Iterator[list[dict[str, Any]]]:
    """Sets of values, two or more at a time, such that no two literals vary alike.

    Integers may be anything, a dim or a count: first far-off numbers, then dims, then small factors.
    """
    if not types:
        yield [{}]
        return
    families: tuple[Callable[[int, int], int], ...] = (
        lambda i, t: 1009 + 2 * i + 100 * t,
        lambda i, t: (i + t) % rank,
        lambda i, t: (rank - 1 - i - t) % rank,
        lambda i, t: 2 * (1 + (i + t) % 4),
    )
    integers = [n for n, t in types.items() if t is int]
    switches = [n for n, t in types.items() if t is bool]
    times = 2
    while 2**times - 2 < len(switches):
        times += 1
    uniform = [(f,) * len(integers) for f in families]
    mixed = [c for c in itertools.product(families, repeat=len(integers)) if len(set(c)) > 1]
    for chosen in dict.fromkeys([*uniform, *mixed]):
        values = []
        for t in range(times):
            row: dict[str, Any] = {}
            for i, (name, kind) in enumerate(types.items()):
                if kind is int:
                    which = integers.index(name)
                    row[name] = chosen[which](which, t)
                elif kind is bool:
                    row[name] = bool((switches.index(name) + 1) >> t & 1)
                elif kind is float:
                    row[name] = 0.3728 + i + 0.1711 * t
                else:
                    row[name] = _DTYPES[(i + t) % len(_DTYPES)]
            values.append(row)
        yield values


# --- rules as passes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RulePass(Pass):
    """Drives the rules of one set until none applies."""

    rule_set: ClassVar[RuleSet]
    _declared_at: ClassVar[Site]

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        apply_rules(self.rule_set.rules, graph, ctx)

    @classmethod
    def site(cls) -> Site:
        return cls._declared_at


class RuleSet:
    """Several rules that run together as one pass.

    fold_views = RuleSet("fold-views", phase=Phase.PRE_GRAD, doc="Merge chains of view ops.")

    @fold_views.rule(inputs="any[...]")
    def double_transpose(x, *, a: int, b: int): ...
    """

    def __init__(
        self, name: str, *, phase: Phase, doc: str, after: Sequence[str] = (), before: Sequence[str] = (),
        needs: Sequence[str] = (), roles: frozenset[Role] = ALL_ROLES, site: Site | None = None, module: str = "",
    ) -> None:  # fmt: skip
        caller = sys._getframe(1)
        self.name, self.phase = name, phase
        self.site = site or Site(caller.f_code.co_filename, caller.f_lineno)
        self.rules: list[Rule] = []
        if not _KEBAB.match(name):
            raise RuleError(f"rule '{name}' ({self.site}): names are kebab-case, e.g. fuse-rms-norm")
        body = {
            "name": name, "phase": phase, "after": tuple(after), "before": tuple(before), "needs": tuple(needs),
            "roles": roles, "rule_set": self, "_declared_at": self.site, "__doc__": inspect.cleandoc(doc),
            "__module__": module or caller.f_globals.get("__name__", __name__),
        }  # fmt: skip
        title = "".join(part.capitalize() for part in name.split("-"))
        self.pass_class: type[RulePass] = register(dataclass(frozen=True)(type(title, (RulePass,), body)))

    def __repr__(self) -> str:
        return f"<rule set {self.name} at {self.site}>"

    def rule(
        self, *, inputs: str | None = None, recompute: bool = False, name: str | None = None
    ) -> Callable[[Callable[..., Any]], Rule]:
        """Add a rule; its name is the function's, in kebab-case."""

        def add(fn: Callable[..., Any]) -> Rule:
            made = Rule(fn, name or fn.__name__.strip("_").replace("_", "-"), self.phase, inputs, recompute)
            made.pass_class = self.pass_class
            self.rules.append(made)
            return made

        return add


def rule(
    name: str, *, phase: Phase, inputs: str | None = None, after: Sequence[str] = (), before: Sequence[str] = (),
    needs: Sequence[str] = (), roles: frozenset[Role] = ALL_ROLES, recompute: bool = False,
) -> Callable[[Callable[..., Any]], Rule]:  # fmt: skip
    """Make a rule, and a pass of the same name that applies it."""

    def make(fn: Callable[..., Any]) -> Rule:
        rules = RuleSet(
            name, phase=phase, doc=fn.__doc__ or f"Apply rule {name}.", after=after, before=before, needs=needs,
            roles=roles, site=_site_of_function(fn), module=fn.__module__,
        )  # fmt: skip
        return rules.rule(inputs=inputs, recompute=recompute, name=name)(fn)

    return make


def _site_of_function(fn: Callable[..., Any]) -> Site:
    return Site(fn.__code__.co_filename, fn.__code__.co_firstlineno)
