"""How each value is computed: decided once it is known what is wanted of all of them, and carried out by `emit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from .asking import leaves_rows
from .attending import Attention
from .calls import arg, op, operand, piece_of
from .meaning import Within
from .moves import Move
from .pooling import MaskedSoftmax, Pooled
from .sets import Terms
from .spaces import Space

if TYPE_CHECKING:
    from .demand import DemandAnalysis


@dataclass(frozen=True)
class OnRows:
    """The value lives packed: on these rows of a space."""

    space: Space
    rows: Terms


class Rowwise(OnRows):
    """Each row from its own row, or from rows around it that the op finds itself."""


@dataclass(frozen=True)
class Moves(OnRows):
    """Each row is a row of an operand."""

    move: Move


@dataclass(frozen=True)
class Attends(OnRows):
    attention: Attention


@dataclass(frozen=True)
class Weighs(OnRows):
    """A softmax lives on the rows that it runs over, however few of them are read; elsewhere it is zero."""

    softmax: MaskedSoftmax


class Given(OnRows):
    """Rows that the caller has packed; elsewhere it is zero."""


@dataclass(frozen=True)
class AttendsAll:
    """An attention all of whose queries are wanted."""

    attention: Attention


@dataclass(frozen=True)
class Loses:
    """A loss over the rows that it does not ignore."""

    space: Space
    rows: Terms


@dataclass(frozen=True)
class Keeps:
    """Rows of a value as the model's own tensor, whose size is their number."""

    source: fx.Node
    space: Space
    rows: Terms


@dataclass(frozen=True)
class Pools:
    """A product that contracts columns."""

    product: Pooled


@dataclass(frozen=True)
class Sums:
    """A sum or mean over columns of a value that is zero on the rows that are left out."""

    space: Space
    rows: Terms


@dataclass(frozen=True)
class Picks:
    """Few rows of a packed value, all of which are wanted."""

    move: Move


@dataclass(frozen=True)
class Leaves:
    """Rows of a value that are computed for others, for whoever reads them after the step; or where they are."""

    source: fx.Node
    place: int


class Fills:
    """A constant in the shape of a value that need not be there."""


Decision = OnRows | AttendsAll | Loses | Keeps | Leaves | Pools | Sums | Picks | Fills


def decided(an: DemandAnalysis) -> dict[fx.Node, Decision]:
    """Of every value that is not computed as it was captured."""
    found: dict[fx.Node, Decision] = {}
    for node in an.graph.nodes:
        if node.op != "call_function" or node in an.barriers or (node not in an.wanted and not node.is_impure()):
            continue
        decision = _packed(an, node) or _dense(an, node, found)
        if decision is not None:
            found[node] = decision
    return found


def _packed(an: DemandAnalysis, node: fx.Node) -> OnRows | None:
    wanted, space = an.wanted.get(node), an.space_of(node)
    if not isinstance(wanted, frozenset) or space is None:
        return None
    attention = an.attentions.get(node)
    if attention is not None:
        return Attends(space, wanted, attention) if attention.queries == space else None
    if node in an.softmaxes:
        softmax = an.softmaxes[node]
        return Weighs(space, an.rows_where(space, softmax.predicates), softmax)
    if op(node) == "fbgemm::jagged_to_padded_dense":
        offsets = an.typing.offsets(arg(node, "offsets")[0])
        return Given(space, an.rows_where(space, [Within(offsets)]))
    if an.needs_shape_only(node) or node in an.pooled or an.sums_columns(node):
        return None  # made without the tensor whose shape it has, or from packed rows, one per sequence
    move = an.move_of(node)
    if move is not None:
        return Moves(space, wanted, move)
    living = an.lives_on(node)
    if living is not None:
        return Rowwise(space, living)
    return Rowwise(space, wanted) if an.why_mixed(node, space) is None else None


def _dense(an: DemandAnalysis, node: fx.Node, found: dict[fx.Node, Decision]) -> Decision | None:
    """Results in the shape that eager has, made from packed rows."""
    if an.needs_shape_only(node):
        return Fills()
    if node in an.attentions:
        return AttendsAll(an.attentions[node])
    rows = an.rows_of_loss(node)
    if rows is not None:
        return _on(an, node.all_input_nodes[0], rows)
    kept = an.kept_rows(node)
    if kept is not None:
        return kept
    if leaves_rows(node):
        source, place = operand(operand(node)), piece_of(node)
        some = isinstance(found.get(source), OnRows) or source not in an.wanted
        return Leaves(source, place) if some else None
    if node in an.pooled:
        return Pools(an.pooled[node])
    if an.sums_columns(node):
        (source, *_) = node.all_input_nodes
        space, wanted = an.space_of(source), an.wanted[source]
        assert space is not None and isinstance(wanted, frozenset)
        return Sums(space, wanted)
    move = an.move_of(node)
    packed = move is not None and any(isinstance(found.get(x), OnRows) for x, _ in move.parts)
    return Picks(move) if move is not None and packed and move.narrows else None


def _on(an: DemandAnalysis, scores: fx.Node, rows: Terms) -> Loses | None:
    """Where all scores are wanted anyway, there is nothing to leave out."""
    space: Any = an.space_of(scores)
    return Loses(space, rows) if isinstance(an.wanted.get(scores), frozenset) else None
