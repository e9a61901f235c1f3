"""The normal form of an attention: what `jagged_attention` computes, said about the captured graph."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from .bias import Bias
from .checks import Check, Same, TwoValues
from .formula import KEY, QUERY, Index, Size, Sizes, axes_of, written
from .language import KEYS, AtLeast, Atom, Data, Drop, Function, Product, Sum, truth
from .table import Table, kept, reduced


class Blindness(enum.Enum):
    """What eager gives for a query that sees no key."""

    NEVER = "none, each sees a key"
    ZERO = "zero"
    NAN = "NaN"
    AVERAGE = "an average over hidden keys"


@dataclass(frozen=True)
class Hidden:
    """The leaf of a pair without a weight."""

    def __str__(self) -> str:
        return "hidden"


HIDDEN = Hidden()


@dataclass(frozen=True)
class Operand:
    """A tensor behind its views, and which of its elements is meant at a place of the axes."""

    node: fx.Node
    index: Index
    given: fx.Node  # the operand as the product has it
    given_index: Index

    @property
    def nearest(self) -> tuple[fx.Node, Index]:
        """As the product has it; what is repeated there, as it is before."""
        repeated = axes_of(self.given_index) != axes_of(self.index)
        return (self.node, self.index) if repeated else (self.given, self.given_index)

    def __str__(self) -> str:
        return f"{self.node.name}{written(self.index)}"


@dataclass(frozen=True)
class Visible:
    """Which pairs have a weight: all parts at once."""

    least: Size | float  # query column - key column
    most: Size | float
    keys: Table | None  # truth over atoms of the key alone
    queries: Table | None
    pairs: Table | None  # what none of these says: truth over the atoms that are left

    def __str__(self) -> str:
        parts = []
        if (self.least, self.most) != (-math.inf, math.inf):
            parts.append(f"distance {self.least}..{self.most}")
        for name, table in (("keys", self.keys), ("queries", self.queries), ("pairs", self.pairs)):
            if table is not None:
                parts.append(f"{name} {kept(table)}")
        return ", ".join(parts) or "all pairs"


@dataclass
class NormalForm:
    node: fx.Node
    query: Operand | None  # none: weights are the biases
    key: Operand | None
    value: Operand
    result: Index
    axes: tuple[str, ...]  # of the weights, in the order of their dims; then split ones
    sizes: Sizes
    sequences: tuple[str, ...]
    activation: str
    scale: float
    cases: Table  # the sum that is added to the score of a visible pair, or HIDDEN
    cap: float | None = None  # score = scale · tanh(cap · <q, k>)
    score_factors: tuple[Data, ...] = ()  # of queries or of keys
    biases: tuple[Bias, ...] = ()
    sink: Sum | None = None
    post_scale: float = 1.0
    post_factors: tuple[Data, ...] = ()  # of queries: they scale the result; of keys: they scale values
    dropout: Drop | None = None
    queries_kept: Table | None = None  # other queries give zero
    values_kept: Table | None = None  # other values count as zero
    blind: Blindness = Blindness.NEVER
    exempt: Table | None = None  # queries that give zero in eager though they are blind
    removed_by: frozenset[str] = frozenset()
    assumptions: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    chain: tuple[fx.Node, ...] = field(default=(), repr=False)  # from the QK product to the PV product

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(a for a in self.axes if a not in (*self.sequences, QUERY, KEY))

    @property
    def groups(self) -> tuple[str, ...]:
        """Axes of heads that keys and values have too: others share their keys."""
        mine = {a for x in (self.key, self.value) if x is not None for i in x.index for a in i.axes}
        return tuple(a for a in self.heads if a in mine)

    @property
    def speculations(self) -> tuple[Check, ...]:
        return tuple(c for c in self.checks if isinstance(c, (Same, TwoValues)))

    @cached_property
    def visibility(self) -> Table:
        """Truth per case."""
        return reduced(Table(self.cases.atoms, {b: truth(x is not HIDDEN) for b, x in self.cases.rows.items()}))

    @cached_property
    def visible(self) -> Visible:
        return parts(self.visibility)

    @property
    def opaque(self) -> int:
        """Tensors of pairs that are read as they are: what speculation could take apart."""
        return sum(not isinstance(a, AtLeast) and {QUERY, KEY} <= a.axes for a in self.cases.atoms)

    def __str__(self) -> str:
        scores = f"{self.query} · {self.key}" if self.query is not None else "weights"
        out = [f"{self.activation} of {scores}, values {self.value}", f"scale {self.scale:g}"]
        if self.cap is not None:
            out.append(f"cap tanh({self.cap:g}·score)")
        out += [f"score × {f}" for f in self.score_factors]
        out.append(f"visible: {self.visible}")
        out += [f"bias {b}" for b in self.biases]
        out += [f"sink {self.sink}"] if self.sink is not None else []
        out += [f"weights × {self.post_scale:g}"] if self.post_scale != 1 else []
        out += [f"weights × {f}" for f in self.post_factors]
        out += [str(self.dropout)] if self.dropout is not None else []
        for name, table in (("queries kept", self.queries_kept), ("values kept", self.values_kept)):
            out += [f"{name}: {kept(table)}"] if table is not None else []
        out.append(f"blind queries: {self.blind.value}")
        out += [f"zero although blind: {kept(self.exempt)}"] if self.exempt is not None else []
        out += [f"removed by {', '.join(sorted(self.removed_by))}"] if self.removed_by else []
        out += [f"assumes {a}" for a in self.assumptions] + [f"checks {c}" for c in self.checks]
        return "\n  ".join(out)


# --- parts of what is visible --------------------------------------------------------------------------


def parts(visible: Table) -> Visible:
    """Band & keys & queries & pairs."""
    told = fixed(visible)
    least: Size | float = -math.inf
    most: Size | float = math.inf
    band = []
    for atom, holds in told.items():
        if not isinstance(atom, AtLeast) or atom.coefs != ((KEY, 1), (QUERY, -1)):
            continue
        if holds and _comparable(most, -atom.least):
            most = -atom.least if most == math.inf else min(most, -atom.least)
            band.append(atom)
        elif not holds and _comparable(least, 1 - atom.least):
            least = 1 - atom.least if least == -math.inf else max(least, 1 - atom.least)
            band.append(atom)
    rest = _projected(visible, [a for a in visible.atoms if a not in band], {a: told[a] for a in band})
    keys = [a for a in rest.atoms if a.axes & KEYS and QUERY not in a.axes]
    queries = [a for a in rest.atoms if not a.axes & KEYS]
    others = [a for a in rest.atoms if a not in keys and a not in queries]
    tables = [_seen(rest, atoms) for atoms in (keys, queries, others)]
    factors = all(leaf.value == all(t.at(case).value for t in tables if t is not None) for case, leaf in rest.cases())
    return Visible(least, most, *tables) if factors else Visible(least, most, None, None, rest)


def _comparable(a: Size | float, b: Size) -> bool:
    return (isinstance(a, float) and math.isinf(a)) or (isinstance(a, int) and isinstance(b, int))


def fixed(visible: Table) -> dict[Atom, bool]:
    """Atoms that have one value wherever a pair is visible."""
    found: dict[Atom, set[bool]] = {a: set() for a in visible.atoms}
    for case, leaf in visible.cases():
        for atom, holds in case.items() if leaf.value else ():
            found[atom].add(holds)
    return {a: values.pop() for a, values in found.items() if len(values) == 1}


def _projected(table: Table, atoms: list[Atom], given: dict[Atom, bool]) -> Table:
    rows = {}
    for case, leaf in table.cases():
        if all(case[a] == v for a, v in given.items()):
            rows[tuple(case[a] for a in atoms)] = leaf
    return reduced(Table(tuple(atoms), rows))


def _seen(table: Table, atoms: Iterable[Atom]) -> Table | None:
    """Truth over some atoms: is there a visible pair with those?"""
    mine = tuple(atoms)
    if not mine:
        return None
    rows: dict[tuple[bool, ...], bool] = {}
    for case, leaf in table.cases():
        bits = tuple(case[a] for a in mine)
        rows[bits] = rows.get(bits, False) or bool(leaf.value)
    return Table(mine, {bits: truth(v) for bits, v in rows.items()})


def score_parts(score: tuple[tuple[Product, float], ...]) -> tuple[float, float | None, tuple[Data, ...]]:
    """Scale, cap and factors of a score."""
    ((factors, scale),) = score
    core = next(f for f in factors if not isinstance(f, Data))
    cap = core.inner.terms[0][1] if isinstance(core, Function) else None
    return scale, cap, tuple(f for f in factors if isinstance(f, Data))
