"""From the table of attention weights to their normal form, or a refusal that names the term."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from .bias import Bias, checks_of, classified
from .checks import Check, LogSum, SeesKey
from .evaluate import Evaluator
from .formula import KEY, QUERY, Sizes
from .language import (
    KEYS,
    NO,
    AtLeast,
    Atom,
    Average,
    Blind,
    Data,
    Drop,
    Function,
    Product,
    Refused,
    RowStat,
    Score,
    Sum,
    Unknown,
    Weight,
    is_zero,
    of_scores,
    truth,
)
from .normal import HIDDEN, Blindness, score_parts
from .softmax import Softmax, visible_score
from .table import Table, joint, one, ordered, reduced

_POINTWISE = ("silu", "sigmoid", "relu", "exp", "tanh")
Case = dict[Atom, bool]


@dataclass
class Weights:
    """What the table of weights says; the operands of the products are not part of it."""

    activation: str
    score: tuple[tuple[Product, float], ...]
    cases: Table
    post_scale: float
    post_factors: tuple[Data, ...]
    dropout: Drop | None
    biases: list[Bias] = field(default_factory=list)
    sink: Sum | None = None
    queries_kept: Table | None = None
    values_kept: Table | None = None
    blind: Blindness = Blindness.NEVER
    exempt: Table | None = None
    removed_by: frozenset[str] = frozenset()
    checks: list[Check] = field(default_factory=list)

    @property
    def form(self) -> dict[str, Any]:
        """Fields of a normal form."""
        scale, cap, factors = score_parts(self.score)
        rest = {name: v for name, v in vars(self).items() if name not in ("score", "checks", "biases")}
        return {**rest, "scale": scale, "cap": cap, "score_factors": factors, "biases": tuple(self.biases)}


@dataclass(frozen=True)
class _Visible:
    """A weight that is not zero: coef · core · factors, perhaps dropped."""

    case: Any
    coef: float
    core: Function | Weight
    factors: tuple[Data, ...]
    drop: Drop | None


def normalised(ev: Evaluator, table: Table, node: fx.Node) -> Weights:
    found = [
        _visible(case, leaf, node)
        for case, leaf in table.cases()
        if not any(isinstance(a, Blind) and holds for a, holds in case.items()) and not is_zero(leaf)
    ]
    if not found:
        raise Refused("all weights are zero", table, node)
    first = found[0]
    for other in found[1:]:
        if (other.coef, other.factors, other.drop) != (first.coef, first.factors, first.drop):
            raise Refused("weights are scaled differently for some pairs", table, node)
        if isinstance(first.core, Weight) and other.core != first.core:
            raise Refused("weights of two kinds", table, node)
    if isinstance(first.core, Weight):
        weights = _of_softmax(ev, table, node, ev.softmaxes[first.core.softmax], first)
    else:
        weights = _pointwise(ev, table, node, found)
    sums = {bits: leaf for bits, leaf in weights.cases.rows.items() if leaf is not HIDDEN}
    weights.biases = classified(sums, weights.cases, ev.sizes, ev.facts)
    weights.checks += [check for bias in weights.biases for check in checks_of(bias)]
    return weights


def _visible(case: Case, leaf: Any, node: fx.Node) -> _Visible:
    if not isinstance(leaf, Sum):
        raise Refused("weights are replaced by a number", leaf, node)
    if leaf.const != 0:
        raise Refused("a number is added to weights", leaf, node)
    if len(leaf.terms) != 1:
        raise Refused("weights are a sum", leaf, node)
    ((factors, coef),) = leaf.terms
    core = [f for f in factors if not isinstance(f, (Data, Drop))]
    drops = [f for f in factors if isinstance(f, Drop)]
    data = tuple(f for f in factors if isinstance(f, Data))
    if len(core) != 1:
        raise Refused("weights times weights" if core else "no scores", leaf, node)
    if isinstance(core[0], Score):
        raise Refused("no activation between the QK product and the PV product", leaf, node)
    if isinstance(core[0], (RowStat, Average)):
        raise Refused("a statistic of scores in place of weights", leaf, node)
    if len(drops) > 1:
        raise Refused("two dropouts", leaf, node)
    for f in data:
        if f.of_pairs:
            raise Refused("weights times a tensor of pairs", f, node)
    return _Visible(case, coef, core[0], data, drops[0] if drops else None)


# --- pointwise activations -----------------------------------------------------------------------------


def _activation(f: Function) -> tuple[str, Sum]:
    """Its name, and the score that it is of."""
    if f.name == "square" or (f.name == "pow" and f.arguments in (("2",), ("2.0",))):
        inner = f.inner.single
        if isinstance(inner, Function) and inner.name == "relu":
            return "squared_relu", inner.inner
    if f.name in _POINTWISE and not f.arguments:
        return f.name, f.inner
    if f.name in ("gelu", "softplus"):
        return f.name + (f"({', '.join(f.arguments)})" if f.arguments else ""), f.inner
    raise Refused("a function of scores that the kernel does not know", f)


def _pointwise(ev: Evaluator, table: Table, node: fx.Node, found: list[_Visible]) -> Weights:
    name, score, sums = "", None, {}
    for each in found:
        if not isinstance(each.core, Function):
            raise Refused("weights of two kinds", each.core, node)
        activation, inner = _activation(each.core)
        if not of_scores(inner):
            raise Refused("no scores", each.core, node)
        if any(isinstance(f, RowStat) for f in inner.factors):
            raise Refused("a statistic of scores before a pointwise activation", inner, node)
        mine = visible_score(ev, inner, node)
        if name not in ("", activation):
            raise Refused("two activations for different pairs", f"{name}, {activation}", node)
        if score not in (None, mine):
            raise Refused("scores are scaled or computed differently for some pairs", inner, node)
        name, score = activation, mine
        bits = tuple(each.case[a] for a in table.atoms)
        sums[bits] = replace(inner, terms=tuple(t for t in inner.terms if t not in mine))
    cases = Table(table.atoms, {bits: sums.get(bits, HIDDEN) for bits in table.rows})
    first = found[0]
    assert score is not None
    return Weights(name, score, cases, first.coef, first.factors, first.drop, blind=Blindness.ZERO)


# --- softmax -------------------------------------------------------------------------------------------


def _of_softmax(ev: Evaluator, table: Table, node: fx.Node, soft: Softmax, first: _Visible) -> Weights:
    argument = soft.argument
    cases = Table(argument.atoms, {bits: soft.bias.get(bits, HIDDEN) for bits in argument.rows})
    kept: list[tuple[Case, bool]] = []
    blind: list[tuple[Case, Any]] = []
    try:
        for case, (leaf, bias) in joint(table, cases):
            if any(isinstance(a, Blind) and holds for a, holds in case.items()):
                if bias is HIDDEN:
                    blind.append((case, leaf))
            elif bias is not HIDDEN:
                kept.append((case, not is_zero(leaf)))
            elif not is_zero(leaf):
                raise Refused("removed pairs get a weight after the softmax", leaf, node)
    except Unknown as why:
        raise Refused("too much to tell apart", why, node) from None
    queries, values = _keeps(kept, node)
    found = Weights(
        "softmax", soft.score, cases, first.coef, first.factors, first.drop, sink=soft.sink,
        queries_kept=queries, values_kept=values, removed_by=soft.removed_by,
    )  # fmt: skip
    if soft.hides and not _sees_itself(found.cases, ev.sizes):
        _set_blindness(found, blind, node)
    if len(soft.fills) and soft.sink is None:
        found.checks.append(LogSum(max(soft.fills), soft.dtype))
    return found


def _keeps(rows: list[tuple[Case, bool]], node: fx.Node) -> tuple[Table | None, Table | None]:
    """Which queries and which values have a weight after the softmax; pair by pair is too late."""
    if all(keep for _, keep in rows):
        return None, None
    atoms = [a for a in rows[0][0] if not isinstance(a, Blind)]
    queries = tuple(a for a in atoms if not a.axes & KEYS)
    keys = tuple(a for a in atoms if a.axes & KEYS and QUERY not in a.axes)

    def bits(case: Case, mine: tuple[Atom, ...]) -> tuple[bool, ...]:
        return tuple(case[a] for a in mine)

    tables = []
    for mine in (queries, keys):
        wanted = {bits(case, mine) for case, keep in rows if keep}
        tables.append(Table(mine, {bits(case, mine): truth(bits(case, mine) in wanted) for case, _ in rows}))
    for case, keep in rows:
        if keep != all(t.at(case).value for t in tables):
            reason = "weights are masked after the softmax, pair by pair: what is masked has been counted in its sum"
            raise Refused(reason, ", ".join(map(str, atoms)), node)
    by_query, by_key = (reduced(t) for t in tables)
    return (by_query if by_query.atoms else None), (by_key if by_key.atoms else None)


def _sees_itself(cases: Table, sizes: Sizes) -> bool:
    """Is the key in the query's own column visible, whatever else holds?"""
    if not sizes.at_least(sizes[KEY], sizes[QUERY]):
        return False
    for case, leaf in cases.cases():
        on_diagonal = (
            holds == (atom.least <= 0)
            for atom, holds in case.items()
            if isinstance(atom, AtLeast) and atom.coefs == ((KEY, 1), (QUERY, -1)) and isinstance(atom.least, int)
        )
        if leaf is HIDDEN and all(on_diagonal):
            return False
    return True


def _set_blindness(found: Weights, blind: list[tuple[Case, Any]], node: fx.Node) -> None:
    """What eager gives for blind queries, and for which of them it is zero anyway."""
    atoms = ordered(a for case, _ in blind for a in case if not a.axes & KEYS and not isinstance(a, Blind))
    zero: dict[tuple[bool, ...], bool] = {}
    for case, leaf in blind:
        bits = tuple(case[a] for a in atoms)
        zero[bits] = zero.get(bits, True) and is_zero(leaf)
    if all(zero.values()):  # no blind case left: as hidden pairs are, so are those of blind queries
        found.blind = Blindness.ZERO
        return
    found.blind = Blindness.NAN if found.removed_by == {"infinity"} else Blindness.AVERAGE
    exempt = reduced(Table(atoms, {bits: truth(v) for bits, v in zero.items()}))
    found.exempt = exempt if exempt.only is None else None
    visible = Table(found.cases.atoms, {b: truth(x is not HIDDEN) for b, x in found.cases.rows.items()})
    found.checks.insert(0, SeesKey(reduced(visible), found.exempt or one(NO)))
