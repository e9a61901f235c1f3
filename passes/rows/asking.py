"""What each kind of op asks of its operands, where that is more than rows alike or everything.

A rule gives its operands what it wants of them, or says that it is not its case.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import fx

from .attending import Attention
from .attention.formula import KEY, QUERY
from .calls import arg, op, operand
from .meaning import Predicate, Within
from .sets import ALL, Shown, Terms, VisibleTo, Wanted, read, seen
from .spaces import Space
from .spans import pieces

if TYPE_CHECKING:
    from .demand import DemandAnalysis


def _left(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """What is left for later readers asks for nothing."""
    if leaves_rows(u):
        an.wanted[operand(u)] = ALL  # to be visited
    return leaves_rows(u) or op(u) == "turbogr::leave_rows"


def leaves_rows(u: fx.Node) -> bool:
    return op(u) == "getitem" and op(u.args[0]) == "turbogr::leave_rows"


def _pairs(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """Pairs that attentions alone read are made from rows of their queries, or of their keys."""
    if u not in an.gathered:
        return False
    sources = an.gathered[u]
    for x in u.all_input_nodes:
        if all(source is not x for source, _, _ in sources):
            an.give(x, ALL)
    for source, wanted, space in sources:
        an.give(source, an.projected(wanted, space, an.space_of(source)))
    return True


def _attention(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    a = an.attentions.get(u)
    if a is None:
        return False
    if an.space_of(u) != a.queries:
        d = ALL  # several queries of a sequence, whose result is wanted as a whole
    if d is ALL and a.self_attention:
        return False  # every row is wanted anyway
    keys = _keys(an, a, d)
    if keys is None and d is ALL and an.space_of(u) is not None:
        return False
    if keys is None and a.form.query is None:
        del an.attentions[u]
        return False
    if keys is None:
        del an.attentions[u]
        text = "attention reads every key: no mask removes padded keys, and they influence the result"
        hint = "mask the padded keys (key_padding_mask, or an additive mask made from the ids)"
        an.miss(u, "pads-attended", text, hint)
        return False
    an.key_terms |= keys
    an.keys_read[u] = keys
    sides: dict[str, tuple[Wanted, Space]] = {QUERY: (d, a.queries), KEY: (keys, a.keys)}
    for x, side in a.reads:
        gathered = [(source, *sides[at]) for node, source, at in a.gathers if node is x]
        if side:
            wanted, space = sides[side]
            an.give(x, an.projected(wanted, space, an.space_of(x)))
        elif gathered and (x in an.gathered or x not in an.wanted):
            an.gathered.setdefault(x, []).extend(gathered)
            an.wanted[x] = ALL  # to be visited: it asks for rows of what it is gathered from
        else:
            an.give(x, ALL)
    return True


def _keys(an: DemandAnalysis, a: Attention, d: Wanted) -> Terms | None:
    """Rows that queries in `d` read as keys."""
    predicates: frozenset[Predicate | Within] = a.predicates
    if a.activation != "softmax":
        predicates = predicates | an.zeros.inside(an.zeros.support(a.value), a.keys.axes)  # zeros add nothing
    if predicates:
        return an.rows_where(a.keys, predicates)
    if a.keys_kept is not None:
        return a.keys_kept
    if a.bounded and a.self_attention and d is not ALL:
        return frozenset(seen(t, a.least, a.most) for t in d)
    visible = a.form.visibility
    if visible.atoms and a.known_before(visible):
        pairs = Shown.of(visible, a.pairs, a.form.sizes)
        terms: Iterable[Any] = [None] if d is ALL else d
        return frozenset(VisibleTo(a.keys, pairs, t) for t in terms)
    return None


def _loss(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """cross_entropy reads the rows it does not ignore."""
    rows = an.rows_of_loss(u)
    if rows is None:
        return False
    scores, target = u.all_input_nodes[:2]
    an.give(scores, rows)
    an.give(target, rows)
    an.give(arg(u, "weight"), ALL)
    return True


def _kept(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """x[mask] reads the rows of the mask, and so does what packs rows by hand."""
    kept = an.kept_rows(u)
    if kept is None:
        return False
    an.give(kept.source, kept.rows)
    return True


def _jagged(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """Rows that were packed by hand are all read."""
    if op(u) != "fbgemm::jagged_to_padded_dense" or d is ALL:
        return False
    an.give(u.args[0], ALL)
    an.give(arg(u, "offsets")[0], ALL)
    return True


def is_jagged(an: DemandAnalysis, space: Space | None, offsets: fx.Node) -> bool:
    if space is None or offsets not in an.typing.jagged or offsets in an.meanings.tainted:
        return False
    sequence, column, _ = an.typing.jagged[offsets]
    atoms = tuple(an.typing.axes.atoms(sequence)), tuple(an.typing.axes.atoms(column))
    return (space.sequence, space.column) == atoms


def _softmax(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    found = an.softmaxes.get(u)
    space = an.space_of(u)
    if found is None or d is ALL or space is None:
        return False
    an.give(u.args[0], an.rows_where(space, found.predicates))
    return True


def _pool(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """Contraction of columns; or a sum over them, which `give` narrows to where the operand is not zero."""
    pool = an.pooled.get(u)
    if pool is None:
        return False
    rows = an.rows_where(pool.space, pool.support)
    for x in (pool.left, pool.right):
        an.give(x, rows if an.space_of(x) == pool.space else ALL)
    return True


def _move(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    move = an.move_of(u)
    if move is None or not asks_by_move(an, u, d):
        return False
    terms: Iterable[Any] = [None] if d is ALL else d
    for x, relation in move.parts:
        an.give(x, frozenset(read(relation, t) for t in terms) if an.space_of(x) == relation.into else ALL)
    for x in u.all_input_nodes:
        if x not in [p for p, _ in move.parts]:
            an.give(x, ALL)
    return True


def asks_by_move(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """Does an op that moves rows name the rows that it reads? All of them are read as they lie."""
    move = an.move_of(u)
    return move is not None and (d is not ALL or move.narrows)


def _span(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """Rows that an op along rows computes, and those that it computes them from."""
    parts = pieces(u, an.wanted) if isinstance(u.meta.get("val"), (list, tuple)) else [u]
    spans = {an.span_of(p) for p in parts}
    if len(spans) != 1 or None in spans:
        return False
    (span,) = spans
    assert span is not None
    if op(u) == "getitem":
        an.wanted[operand(u)] = ALL  # to be visited: it asks for what its pieces want
        return True
    terms = [d] if parts == [u] else [an.wanted[p] for p in parts]
    if ALL in terms:
        return False
    wanted: Terms = frozenset(t for some in terms for t in some)  # type: ignore[union-attr]
    asked = span.asks(wanted)
    an.key_terms |= asked
    an.living[u] = span.lives_on(wanted)
    for x in u.all_input_nodes:
        an.give(x, asked if x is span.source else ALL)
    return True


def _hidden(an: DemandAnalysis, u: fx.Node, d: Wanted) -> bool:
    """All rows of a choice are read: those of an operand that are never chosen are not."""
    space, kept = an.space_of(u), an.facts.shown(u)
    if d is not ALL or space is None or not kept:
        return False
    for x in u.all_input_nodes:
        an.give(x, an.rows_where(space, kept[x]) if x in kept else ALL)
    return True


RULES = (_left, _pairs, _attention, _loss, _kept, _jagged, _softmax, _pool, _move, _span, _hidden)
