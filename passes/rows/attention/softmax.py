"""Softmax over keys, statistics of rows of scores, and dropout.

What a mask is worth is decided here and not where it is made: a leaf far below all scores is hidden, and no matter
how many ops it went through. A blind query, which sees no key, is one more atom: softmax gives it NaN, an average or
zero, and later ops act on that as on any other leaf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..calls import op, rank_of
from .calls import Call, Rules, shape, value
from .formula import KEY, MORE_KEYS, Formula, Index
from .language import (
    KEYS,
    AtLeast,
    Average,
    Blind,
    Data,
    Drop,
    Function,
    Leaf,
    Number,
    Position,
    Product,
    Refused,
    RowStat,
    Score,
    Sum,
    Unknown,
    Weight,
    just,
    number,
    of_scores,
    product,
    renamed_atom,
    renamed_leaf,
)
from .numbers import (
    ASSUMES_BOUNDED,
    ASSUMES_EXP,
    LOW,
    cast,
    is_lowest,
    linear,
    peak_of,
    rely_on_size,
    score_terms,
    without,
)
from .table import Table, combine, joint, one, ordered, reduced, written_case

if TYPE_CHECKING:
    from .evaluate import Evaluator

RULES = Rules()
Bits = tuple[bool, ...]


@dataclass
class Softmax:
    """One softmax: its argument, which cases of it are visible, and what is added to the score in each of those."""

    number: int
    node: fx.Node
    dtype: torch.dtype
    argument: Table
    score: tuple[tuple[Product, float], ...] = ()
    bias: dict[Bits, Sum] = field(default_factory=dict)  # of visible cases
    removed_by: frozenset[str] = frozenset()  # how hidden scores were hidden
    fills: tuple[float, ...] = ()  # large numbers that scores were replaced by, above the lowest there is
    sink: Sum | None = None

    @property
    def hides(self) -> bool:
        return len(self.bias) < len(self.argument.rows)

    def blind_leaf(self, safe: bool) -> Leaf:
        """What eager gives to a pair of a query that sees no key."""
        infinite, finite = "infinity" in self.removed_by, self.removed_by != {"infinity"}
        if not finite:
            return number(0.0 if safe or self.sink is not None else math.nan, self.dtype)
        if self.sink is not None and not infinite:
            return number(0.0, self.dtype)
        return just(Average(self.number, infinite and not safe), self.dtype)


# --- rules ---------------------------------------------------------------------------------------------


@RULES.of("softmax", "_softmax", "_safe_softmax", models=("self", "dim", "dtype", "half_to_float"))
def _softmax(ev: Evaluator, call: Call) -> Table:
    node, source, dim = call.node, call.args["self"], call.dim(len(call.index))
    if node not in ev.after:
        raise Unknown("a softmax of data")
    along, size = call.index[dim], shape(source)[dim]
    if along != Formula.axis(KEY):
        raise Refused("softmax runs over another dim than the keys", along, node)
    index, extended = call.index, not ev.sizes.same(size, ev.sizes[KEY])
    if extended:
        if not ev.sizes.at_least(size, ev.sizes[KEY] + 1):
            raise Refused("softmax over a part of the keys", size, node)
        ev.sizes.of[MORE_KEYS] = size
        index = (*index[:dim], Formula.axis(MORE_KEYS), *index[dim + 1 :])
    argument = combine(lambda leaf: cast(ev, leaf, call.dtype), ev.at(source, index))
    return weights(ev, node, argument, call.dtype, op(node) == "_safe_softmax", extended)


@RULES.of("dropout", models=("input", "p", "train"))
def _dropout(ev: Evaluator, call: Call) -> Table:
    table, p = ev.at(call.args["input"], call.index), float(call.args["p"])
    if not call.args["train"] or p == 0:
        return table
    if call.node not in ev.after:
        raise Unknown("random numbers")
    return combine(lambda leaf: dropped(leaf, Drop(call.node, p)), table)


def dropped(leaf: Leaf, drop: Drop) -> Leaf:
    """A random factor; zero and NaN stay what they are."""
    if isinstance(leaf, Number) and (leaf.is_zero or leaf.value != leaf.value):
        return leaf
    if drop.p == 1:
        return number(0.0, leaf.dtype)
    if not isinstance(leaf, Sum) or leaf.const != 0:
        raise Refused("dropout of scores before the activation", leaf, drop.node)
    return linear({product(*factors, drop): c for factors, c in leaf.terms}, 0.0, leaf.dtype, leaf.peak)


@RULES.of("amax", "sum", "logsumexp", models=("self", "dim", "keepdim"))
def _statistic(ev: Evaluator, call: Call) -> Table:
    if call.args.get("dim") is None:
        raise Unknown("over all dims")
    return _row_stat(ev, call.name, call, call.args["self"], call.args["dim"], call.args["keepdim"])


@RULES.of("getitem", models=())
def _maximum(ev: Evaluator, call: Call) -> Table:
    """`x.max(dim).values`."""
    pair, at = call.node.args
    if op(pair) != "max" or at != 0 or not isinstance(pair, fx.Node) or len(pair.args) < 2:
        raise Unknown("a part of a result")
    keepdim = bool(pair.args[2]) if len(pair.args) > 2 else bool(pair.kwargs.get("keepdim", False))
    return _row_stat(ev, "amax", call, pair.args[0], pair.args[1], keepdim)


def _row_stat(ev: Evaluator, kind: str, call: Call, source: Any, given: Any, keepdim: bool) -> Table:
    if call.node not in ev.after:
        raise Unknown("a reduction of data")
    dims = [d % rank_of(source) for d in (given if isinstance(given, (list, tuple)) else [given])]
    if len(dims) != 1:
        raise Unknown("a reduction over several dims")
    (dim,) = dims
    size = shape(source)[dim]
    axis = next((a for a in (KEY, MORE_KEYS) if a in ev.sizes.of and ev.sizes.same(size, ev.sizes[a])), None)
    rest: Index = (*call.index[:dim], *call.index[dim + 1 if keepdim else dim :])
    if axis is None or any(i.axes & KEYS for i in rest):
        raise Refused(f"{kind} over another dim than the keys", "", call.node)
    table = ev.at(source, (*rest[:dim], Formula.axis(axis), *rest[dim:]))
    if not any(of_scores(leaf) for leaf in table.leaves):
        raise Refused(f"{kind} of what scores leave behind", table, call.node)
    stat = just(RowStat(kind, ev.table_number(table)), call.dtype)
    return one(replace(stat, peak=_largest(kind, table)))


def _largest(kind: str, table: Table) -> float:
    """The largest number that a statistic may hold beside scores; what lies far below does not matter to a maximum."""
    if any(isinstance(leaf, Position) for leaf in table.leaves):
        return math.inf
    numbers = [float(leaf.value) if isinstance(leaf, Number) else leaf.const for leaf in table.leaves]
    if kind == "sum":
        numbers = [abs(x) for x in numbers]
    return math.inf if any(x != x for x in numbers) else max(0.0, *numbers)


# --- a softmax that is written out ---------------------------------------------------------------------


def written_out(ev: Evaluator, node: fx.Node, operands: list[fx.Node], tables: list[Table]) -> Table | None:
    """exp(x) / exp(x).sum(keys); None where a quotient is something else."""
    if len(operands) != 2 or node.args[0] is not operands[0] or node.kwargs or len(node.args) != 2:
        return None
    above, below = tables[0], tables[1].only
    stat = below.single if isinstance(below, Sum) else None
    if not isinstance(stat, RowStat) or stat.kind != "sum" or stat.table != ev.table_number(above):
        return None

    def argument(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Number) and leaf.is_zero:
            return number(-math.inf, leaf.dtype)
        found = leaf.single if isinstance(leaf, Sum) else None
        if isinstance(found, Function) and found.name == "exp":
            return found.inner
        raise Refused("a quotient of weights and their sum", leaf, node)

    table = combine(argument, above)
    safe_sum = _shifted_by_its_maximum(ev, table, node)
    if not safe_sum:
        ev.assume(ASSUMES_EXP)
    return weights(ev, node, table, value(node).dtype, safe=False, may_be_nan=not safe_sum)


def _shifted_by_its_maximum(ev: Evaluator, table: Table, node: fx.Node) -> bool:
    """Is the largest exponential 1? A maximum over hidden scores too does not say so."""
    shifts = {(f, c) for leaf in table.leaves if isinstance(leaf, Sum) for f, c in leaf.terms if _is_maximum(f)}
    if len(shifts) != 1:
        return False
    (shift,) = shifts
    stat = shift[0][0]
    assert isinstance(stat, RowStat)
    for _, (leaf, whole) in joint(table, ev.table(stat.table)):
        if isinstance(leaf, Number):
            if not hidden_by(whole, node):
                return False
        elif shift[1] != -1 or not isinstance(whole, Sum | Number) or not _same_sum(without(leaf, {shift}), whole):
            return False
    return True


def _is_maximum(factors: Product) -> bool:
    return len(factors) == 1 and isinstance(factors[0], RowStat) and factors[0].kind == "amax"


def _same_sum(a: Sum, b: Leaf) -> bool:
    if isinstance(b, Number):
        return not a.terms and a.const == b.value
    return isinstance(b, Sum) and (a.terms, a.const) == (b.terms, b.const)


# --- visible and hidden --------------------------------------------------------------------------------


def weights(
    ev: Evaluator, node: fx.Node, argument: Table, dtype: torch.dtype, safe: bool, extended: bool = False, *,
    may_be_nan: bool = False,
) -> Table:  # fmt: skip
    """The weights that a softmax gives, with a leaf for blind queries where keys are hidden."""
    sink = None
    if extended:
        argument, sink = _without_sink(ev, node, argument)
    found = Softmax(len(ev.softmaxes), node, dtype, argument, sink=sink)
    _split(ev, found)
    _cancel(ev, found)
    if any(how in ("fill", "add") for how in found.removed_by):
        ev.assume(ASSUMES_BOUNDED)
    ev.softmaxes.append(found)
    weight, zero = just(Weight(found.number, may_be_nan), dtype), number(0.0, dtype)
    if not found.hides:
        return one(weight)
    blind = Blind(found.number, frozenset(a for a in ev.sizes.of if a not in KEYS))
    atoms = ordered([*argument.atoms, blind])
    at, rows = atoms.index(blind), {}
    for bits in argument.rows:
        cases: list[tuple[bool, Leaf]] = [(False, weight)]
        if bits not in found.bias:
            cases = [(False, zero), (True, found.blind_leaf(safe))]
        for is_blind, leaf in cases:
            rows[bits[:at] + (is_blind,) + bits[at:]] = leaf  # noqa: RUF005
    return reduced(Table(atoms, rows))


def hidden_by(leaf: Leaf, node: fx.Node) -> str:
    """How a leaf is removed from a softmax, or ''.

    The lowest number of the softmax's own dtype removes scores of any size; any other, scores that are bounded.
    """
    if isinstance(leaf, Position):
        raise Refused("positions as scores", leaf, node)
    c = leaf.value if isinstance(leaf, Number) else leaf.const
    if c != c or c == math.inf:
        raise Refused("a score that is NaN or infinite", leaf, node)
    if c == -math.inf:
        return "infinity"
    if c > LOW:
        return ""
    lowest = "-lowest" if is_lowest(c, leaf.dtype) else ""
    return ("fill" if isinstance(leaf, Number) else "add") + lowest


def _split(ev: Evaluator, found: Softmax) -> None:
    """Visible cases and hidden ones."""
    removed, fills = set(), set()
    for bits, leaf in found.argument.rows.items():
        how = hidden_by(leaf, found.node)
        if how:
            removed.add(how)
            rely_on_size(ev, leaf)
            if how == "fill":
                fills.add(float(leaf.value))
            continue
        case = dict(zip(found.argument.atoms, bits, strict=True))
        if not of_scores(leaf):
            raise Refused("scores are replaced", f"{leaf} where {written_case(case)}", found.node)
        mine = visible_score(ev, leaf, found.node)
        if found.score not in ((), mine):
            raise Refused("scores are scaled or computed differently for some pairs", leaf, found.node)
        found.score, found.bias[bits] = mine, without(leaf, mine)
    if not found.bias:
        raise Refused("all scores are removed", found.argument, found.node)
    found.removed_by, found.fills = frozenset(removed), tuple(sorted(fills))


def visible_score(ev: Evaluator, leaf: Sum, node: fx.Node) -> tuple[tuple[Product, float], ...]:
    """The part of a visible leaf that is the score; what else is in it is a bias."""
    rely_on_size(ev, leaf)
    if leaf.peak > peak_of(leaf.dtype):
        raise Refused("a large number was added and taken away", f"{leaf} (up to {leaf.peak:g})", node)
    mine = score_terms(leaf)
    _check_score(ev, mine, leaf, node)
    return mine


def _check_score(ev: Evaluator, score: tuple[tuple[Product, float], ...], leaf: Sum, node: fx.Node) -> None:
    if len(score) != 1:
        raise Refused("scores occur more than once in a score" if score else "no scores", leaf, node)
    ((factors, _),) = score
    core = [f for f in factors if not isinstance(f, Data)]
    if any(isinstance(f, Drop) for f in core):
        raise Refused("dropout of scores before the activation", leaf, node)
    if len(core) != 1 or isinstance(core[0], (Weight, Average)):
        raise Refused("two activations between QK and PV", leaf, node)
    for f in factors:
        if isinstance(f, Data) and f.of_pairs:
            raise Refused("scores times a tensor of pairs", f, node)
    (found,) = core
    if isinstance(found, Score) and found.detached:
        raise Refused("gradients stop between the QK product and the PV product", leaf, node)
    if isinstance(found, Function):
        _check_cap(found, node)


def _check_cap(f: Function, node: fx.Node) -> None:
    if f.name != "tanh" or f.arguments:
        raise Refused("a function of scores that the kernel does not know", f, node)
    inner = f.inner
    if len(inner.terms) != 1 or inner.const != 0 or inner.terms[0][0] != product(Score()):
        raise Refused("a cap of more than scaled scores", f, node)
    if inner.peak > peak_of(inner.dtype):
        raise Refused("a large number was added and taken away", f"{f} (up to {inner.peak:g})", node)


def _cancel(ev: Evaluator, found: Softmax) -> None:
    """A term that all visible keys of a query share cancels; so does a constant."""
    shared = set.intersection(*(set(b.terms) for b in found.bias.values()))
    gone = {t for t in shared if all(_of_query(f) for f in t[0])}
    for stat in {f for factors, _ in gone for f in factors if isinstance(f, RowStat)}:
        _check_statistic(ev.table(stat.table), found)
    for bits, bias in found.bias.items():
        found.bias[bits] = without(bias, gone)
        if any(isinstance(f, RowStat) for f in found.bias[bits].factors):
            raise Refused("a statistic of scores that some keys do not share", bias, found.node)
    if found.sink is not None:
        if not gone <= set(found.sink.terms):
            raise Refused("the sink is shifted otherwise than the scores", found.sink, found.node)
        found.sink = without(found.sink, gone)
        if any(isinstance(f, RowStat) for f in found.sink.factors):
            raise Refused("the sink is shifted otherwise than the scores", found.sink, found.node)
    elif len({b.const for b in found.bias.values()}) == 1:
        found.bias = {bits: replace(b, const=0.0) for bits, b in found.bias.items()}


def _check_statistic(whole: Table, found: Softmax) -> None:
    """A row that is blind to its statistic must be blind to the softmax: it is shifted by what hides its scores.

    Beside a sink no row is.
    """
    if any(MORE_KEYS in atom.axes for atom in whole.atoms):
        return
    visible = Table(found.argument.atoms, {bits: bits in found.bias for bits in found.argument.rows})
    for case, (leaf, seen) in joint(whole, visible):
        if seen and hidden_by(leaf, found.node):
            raise Refused("shifted by a statistic of scores that are hidden otherwise", written_case(case), found.node)


def _of_query(f: Any) -> bool:
    return isinstance(f, RowStat) or (isinstance(f, Data) and not f.axes & KEYS)


# --- sinks ---------------------------------------------------------------------------------------------


def _without_sink(ev: Evaluator, node: fx.Node, table: Table) -> tuple[Table, Sum]:
    """Columns behind the keys: one more term in the sum, which has no value."""
    edge = AtLeast(((MORE_KEYS, 1),), ev.sizes[KEY])
    if edge not in table.atoms or not ev.sizes.same(ev.sizes[MORE_KEYS], ev.sizes[KEY] + 1):
        raise Refused("columns beside the keys in a softmax", table, node)
    at = table.atoms.index(edge)
    sinks = {leaf for bits, leaf in table.rows.items() if bits[at]}
    if len(sinks) != 1:
        raise Refused("columns beside the keys differ", "; ".join(map(str, sinks)), node)
    (sink,) = sinks
    of_query = isinstance(sink, Sum) and all(_of_query(f) for f in sink.factors)
    if not of_query or not math.isfinite(sink.const):
        raise Refused("a sink that is no term of the query", sink, node)
    rely_on_size(ev, sink)
    names = {MORE_KEYS: KEY}
    old = [renamed_atom(a, names) for i, a in enumerate(table.atoms) if i != at]
    new = ordered(old)
    rows = {}
    for bits, leaf in table.rows.items():
        if not bits[at]:
            case = dict(zip(old, bits[:at] + bits[at + 1 :], strict=True))
            rows[tuple(case[a] for a in new)] = renamed_leaf(leaf, names)
    return reduced(Table(new, rows)), sink
