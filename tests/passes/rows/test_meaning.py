"""What masks say, against what eager computes: on the batch seen and on another, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.fuzz import data, masks
from tests.fuzz.draw import Draw, outer
from tests.fuzz.generate import SIZES
from tests.fuzz.program import Line, Program
from turbogr_compile.capture.trace import trace
from turbogr_compile.graph.nodes import TRAINABLE
from turbogr_compile.graph.phases import Phase
from turbogr_compile.passes.rows.axes import Typing
from turbogr_compile.passes.rows.meaning import MINUS_INFINITY, Band, Const, Holds, Iota, Meaning, OneHot, Two
from turbogr_compile.passes.rows.meanings import Meanings
from turbogr_compile.passes.rows.program import Examples, verify
from turbogr_compile.runtime.prologue import Unprovable

IDS = torch.tensor([[3, 1, 4, 0, 0, 0], [2, 5, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]])


class Read:
    """A program's graph with the meanings of its values."""

    def __init__(self, program: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        module = trace(program, list(inputs), Phase.PRE_GRAD)
        self.graph = module.graph
        for node, given in zip(self.graph.find_nodes(op="placeholder"), inputs, strict=True):
            if given.requires_grad:
                node.meta[TRAINABLE] = True
        with torch.no_grad():
            self.typing = Typing(self.graph)
            self.meanings = Meanings(self.graph, self.typing, Examples(self.graph, inputs))

    @property
    def result(self) -> fx.Node:
        (out,) = self.graph.find_nodes(op="output")
        found = out.args[0]
        return found[0] if isinstance(found, (list, tuple)) else found

    def meaning(self) -> Meaning | None:
        return self.meanings.of(self.result)

    def check(self, inputs: Sequence[Tensor]) -> int:
        """How many meanings were compared with what a batch gives."""
        values, count = Examples(self.graph, inputs), 0
        for node in self.graph.nodes:
            if not isinstance(node.meta.get("val"), Tensor) or (found := self.meanings.of(node)) is None:
                continue
            if all(_stands(s, values) for s in self.meanings.speculations_of(node)):
                self._compare(node, found, values)
                count += 1
        return count

    def _compare(self, node: fx.Node, found: Meaning, values: Examples) -> None:
        eager = values(node)
        if eager is None:  # it does not run in eager either
            return
        if isinstance(found, Two):
            holds = self._holds(found.literals, eager, node, values)
            if found.otherwise is not None:
                other = self._holds(found.otherwise, eager, node, values)
                assert torch.equal(holds, ~other), (node, found)
            yes, no = (torch.tensor(v, dtype=eager.dtype) for v in (found.yes, found.no))
            removed = eager <= no if found.no <= MINUS_INFINITY else _same(eager, no)
            assert bool(torch.where(holds, _same(eager, yes), removed).all()), (node, found, eager)
            return
        if isinstance(found, OneHot):
            index = values(found.index)
            assert index is not None
            wanted = F.one_hot(index, eager.shape[found.dim]).movedim(-1, found.dim)
            assert torch.equal(eager.long(), wanted.reshape(eager.shape)), (node, found)
            return
        wanted = (
            self._along(eager, found.dim) + found.offset
            if isinstance(found, Iota)
            else torch.tensor(found.value, dtype=eager.dtype)
        )
        assert torch.equal(eager, wanted.to(eager.dtype).expand(eager.shape)), (node, found, eager)

    def _along(self, like: Tensor, dim: int) -> Tensor:
        return torch.arange(like.shape[dim]).reshape([-1 if d == dim else 1 for d in range(like.dim())])

    def _holds(self, literals: Any, eager: Tensor, node: fx.Node, values: Examples) -> Tensor:
        out = torch.ones(eager.shape, dtype=torch.bool)
        for literal in literals:
            if isinstance(literal, Band):
                out &= self._along(eager, literal.i) - self._along(eager, literal.j) >= literal.least
            else:
                out &= self._held(literal, eager, node, values)
        return out

    def _held(self, literal: Holds, eager: Tensor, node: fx.Node, values: Examples) -> Tensor:
        """A predicate at the rows that its axes name."""
        predicate = literal.predicate
        given = values(predicate.node)
        assert given is not None and predicate.node not in self.meanings.tainted
        place, dims = [], iter(literal.dims)
        for dim in self.typing.atoms(predicate.node):
            if not dim:
                place.append(torch.zeros((), dtype=torch.long))
                continue
            at, flat = next(dims), torch.zeros((), dtype=torch.long)
            left, along = self._along(eager, at), {}
            for axis in reversed(self.typing.atoms(node)[at]):
                along[axis], left = left % int(self.typing.axes.size(axis)), left // int(self.typing.axes.size(axis))
            for axis in dim:
                flat = flat * int(self.typing.axes.size(axis)) + along[axis]
            place.append(flat)
        held = given[tuple(torch.broadcast_tensors(*place))] == predicate.value
        return (held if predicate.equal else ~held).expand(eager.shape)


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


def _stands(speculation: Any, values: Examples) -> bool:
    seen = values(speculation.node)
    try:
        verify(speculation, seen if seen is not None else torch.zeros(()))
    except Unprovable:
        return False
    return True


# --- whatever the vocabulary writes ----------------------------------------------------------------------

AFTER = ("{s}", "{s} * -1", "{s} / 1024", "{s}.clamp(min=-50)", "({s} == 0)", "{s}.to(torch.float16)", "{s}.bool()",
         "torch.maximum({s}, {s2})", "{s} + {s2}", "{s}.transpose(-1, -2)", "{s}.flatten(-2)", "{s}[..., 1:]",
         "{s}.exp()", "{s}.repeat_interleave(2, 0)", "torch.cat([{s}, {s}], 0)", "{s}[..., :1] * {s2}")  # fmt: skip


def drawn(seed: int, force: str = "") -> Program:
    g = Draw(seed, data.Sizes(*SIZES[seed % len(SIZES)]), force, 1.0)
    x = g.let("x", "F.embedding(ids, E)")
    v = masks.valid(g)
    heads = g.chance(0.3)
    score = g.let("z", f"torch.zeros({'B, 1, N, N' if heads else 'B, N, N'}, dtype=torch.float64)")
    a = masks.seen(g, v, heads)
    s = masks.hide(g, score, a, v, heads)
    s2 = masks.hide(g, score, masks.seen(g, v, heads), v, heads)
    n = g.let("n", masks.number(g, a))
    r = g.let("r", g.one(*AFTER).format(s=outer(g.one(s, n)), s2=outer(s2)))
    lines = [*g.lines, Line("xx", f"{x} @ {x}.transpose(1, 2)")]
    return Program(tuple(lines), r, (s, s2, n, "xx"), g.sizes, ("right", "holes"), seed)


def inputs_of(program: Program, kind: str) -> list[Tensor]:
    batch = data.make_batch(kind, program.seed, program.sizes)
    given = []
    for name in program.arguments:
        made = data.BATCH[name](batch) if name in data.BATCH else data.fixed(name, program.sizes, program.seed)
        given.append(made.requires_grad_() if name in data.PARAMETERS else made)
    return given


def compared(program: Program) -> int:
    read = Read(program.function(), inputs_of(program, program.kinds[0]))
    return sum(read.check(inputs_of(program, kind)) for kind in program.kinds)


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_meanings_are_what_eager_computes(first: int):
    assert sum(compared(drawn(seed)) for seed in range(first, first + 40)) > 500


@pytest.mark.parametrize("slot", ["valid", "seen", "hide", "number"])
def test_meanings_of_every_word(slot: str):
    table = {"valid": masks.VALID, "seen": masks.SEEN, "hide": masks.HIDE, "number": masks.NUMBER}[slot]
    for at, word in enumerate(table):
        compared(drawn(1000 + at, f"{slot}:{word}"))


# --- faults that were ------------------------------------------------------------------------------------


def read(program: Callable[..., Any], *inputs: Tensor) -> Read:
    found = Read(program, inputs or (IDS,))
    found.check(inputs or (IDS,))
    return found


def meaning(program: Callable[..., Any], *inputs: Tensor) -> Meaning | None:
    return read(program, *inputs).meaning()


def pads(ids: Tensor) -> Tensor:
    return (ids == 0).double()


@pytest.mark.parametrize(
    ("program", "yes", "no"),
    [
        (lambda ids: pads(ids).div(2, rounding_mode="floor"), 0.0, 0.0),
        (lambda ids: pads(ids).div(2, rounding_mode="floor") > 0, False, False),
        (lambda ids: torch.add(pads(ids) * -1e9, pads(ids), alpha=0.5), -1e9 + 0.5, 0.0),
        (lambda ids: torch.sub(pads(ids), 1.0, alpha=-2), 3.0, 2.0),
        (lambda ids: ((ids != 0).byte() - 1).double() * 1e9, 255e9, 0.0),
        (lambda ids: (ids == 0) + (ids == 0), True, False),
        (lambda ids: (pads(ids) * -1e9).half(), -float("inf"), 0.0),
        (lambda ids: pads(ids) * 1e4 * -1, -1e4, 0.0),
        (lambda ids: pads(ids) * -1e4 / 1024, -1e4 / 1024, 0.0),
        (lambda ids: (pads(ids) * 0.5).long(), 0, 0),
        (lambda ids: (pads(ids) * 300).to(torch.uint8), 44, 0),
    ],
)
def test_numbers_are_those_of_the_op(program: Callable[..., Any], yes: Any, no: Any):
    found = meaning(program)
    if yes == no:
        assert found == Const(yes)
        return
    assert isinstance(found, Two)
    pad = found.with_yes(lambda a, b: a == yes and b == no)
    assert pad is not None
    (literal,) = pad.literals
    assert isinstance(literal, Holds) and literal.predicate.value == 0 and literal.predicate.equal


def spellings() -> list[Callable[[Tensor], Tensor]]:
    return [
        lambda ids: ids != 0, lambda ids: ~(ids == 0), lambda ids: ids.bool(), lambda ids: ids.ne(0).double(),
        lambda ids: 1 - (ids == 0).long(), lambda ids: torch.where(ids == 0, 0.0, 1.0),
        lambda ids: torch.ones(3, 6).masked_fill(ids == 0, 0.0), lambda ids: (ids != 0).half().to(torch.uint8),
        lambda ids: (ids.flatten() != 0).view(3, 6), lambda ids: (ids.t() != 0).t(),
    ]  # fmt: skip


@pytest.mark.parametrize("program", spellings())
def test_spellings_of_a_mask_are_one(program: Callable[[Tensor], Tensor]):
    found = read(program)
    (ids,) = found.graph.find_nodes(op="placeholder")
    two = found.meaning()
    assert isinstance(two, Two)
    (literal,) = two.keeps() or ()
    assert isinstance(literal, Holds) and literal.dims == (0, 1)
    assert (literal.predicate.node, literal.predicate.value, literal.predicate.equal) == (ids, 0, False)


def test_another_comparison_is_its_own_predicate_however_it_is_negated():
    def program(ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids > 0, ~(ids <= 0)

    found = read(program)
    (out,) = found.graph.find_nodes(op="output")
    one, other = (found.meanings.two(n) for n in out.args[0])
    assert one is not None and other is not None and one.keeps() == other.keeps()


def test_a_shifted_mask_is_no_test_of_the_same_rows():
    found = read(lambda ids: F.pad((ids != 0)[:, 1:], (0, 1)))
    two = found.meaning()
    assert isinstance(two, Two)
    (literal,) = two.keeps() or ()
    assert isinstance(literal, Holds) and literal.predicate.node is found.result


def test_one_row_of_a_triangle_broadcasts():
    found = read(lambda ids: torch.ones(1, 6, dtype=torch.bool).tril(2) & (ids != 0)[:, None, :].expand(3, 6, 6))
    two = found.meaning()
    assert isinstance(two, Two) and not any(isinstance(k, Band) for k in two.literals)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8])
def test_positions_in_a_narrow_dtype_are_no_positions(dtype: torch.dtype):
    def program(ids: Tensor) -> Tensor:
        p = torch.arange(ids.shape[1], dtype=dtype)
        return (p[:, None] >= p) & (ids != 0)[:, None, :]

    assert meaning(program, torch.ones(2, 300, dtype=torch.long)) is None
    short = meaning(program)
    assert isinstance(short, Two) and Band(1, 2, 0) in (short.keeps() or ())


def test_a_maximum_of_additive_masks_hides_what_both_hide():
    def program(ids: Tensor) -> Tensor:
        causal = torch.ones(6, 6, dtype=torch.bool).tril()
        return torch.maximum((~causal).double() * -1e9, pads(ids)[:, None, :] * -1e9)

    two = meaning(program)
    assert isinstance(two, Two) and two.admits() is None
    assert (two.yes, two.no) == (-1e9, 0.0) and len(two.literals) == 2


def test_a_sum_of_additive_masks_hides_what_one_of_them_hides():
    def program(ids: Tensor) -> Tensor:
        causal = torch.ones(6, 6, dtype=torch.bool).tril()
        return (~causal).double() * -1e9 + pads(ids)[:, None, :] * -1e9

    two = meaning(program)
    assert isinstance(two, Two) and two.no == -1e9 and len(two.admits() or ()) == 2


def test_one_hot_rows():
    index = torch.tensor([4, 0, 2])
    assert isinstance(meaning(lambda i: F.one_hot(i, 6).float(), index), OneHot)

    def put(i: Tensor, start: int = 0, value: float = 1.0) -> Tensor:
        rows = torch.arange(start, start + 3)
        return torch.zeros(3 + start, 6).index_put((rows, i), torch.full((), value))

    assert isinstance(meaning(put, index), OneHot)
    assert not isinstance(meaning(lambda i: put(i, start=1), index), OneHot)
    assert not isinstance(meaning(lambda i: put(i, value=2.0), index), OneHot)
    assert not isinstance(
        meaning(lambda i: torch.ones(4, 6).index_put((torch.arange(4), i), torch.ones(())), index), OneHot
    )


@pytest.mark.parametrize("shape, view, dim", [((2, 2), lambda x: x.permute(2, 0, 1), 0), ((2, 2), lambda x: x.mT, 1),
                                              ((4,), lambda x: x.t(), 0)])  # fmt: skip
def test_the_dim_of_one_hot_rows_is_found_behind_views(shape, view, dim):
    found = meaning(lambda i: view(F.one_hot(i, 6).float()), torch.tensor([1, 5, 0, 3]).view(shape))
    assert isinstance(found, OneHot) and found.dim == dim


# --- speculation -----------------------------------------------------------------------------------------


def test_a_mask_of_numbers_is_speculated_on_when_it_is_used():
    found = read(lambda mask: (1 - mask) * -1e9, (IDS != 0).double())
    assert isinstance(found.meaning(), Two)
    (speculation,) = found.meanings.speculations_of(found.result)
    assert (speculation.kind, speculation.seen) == ("values", (0, 1.0))
    assert not found.meanings.speculations
    found.meanings.use(found.result)
    assert list(found.meanings.speculations.values()) == [speculation]


@pytest.mark.parametrize("seen", [torch.zeros(4), torch.ones(4), torch.tensor([0.0, 1.0, 0.5, 0.0])])
def test_what_is_not_seen_as_two_numbers_is_no_mask(seen: Tensor):
    assert meaning(lambda mean: mean * 0.9, seen) is None


def test_nothing_is_guessed_about_what_gradients_reach():
    assert meaning(lambda gate: 1 - gate, torch.tensor([0.0, 1.0, 1.0]).requires_grad_()) is None


def test_a_triangle_in_a_buffer_holds_as_long_as_it_is_there():
    found = read(lambda ids, tri: tri[:6, :6] == 0, IDS, torch.full((8, 8), -torch.inf).triu(1))
    two = found.meaning()
    assert isinstance(two, Two) and two.keeps() == {Band(0, 1, 0)}
    (speculation,) = found.meanings.speculations_of(found.result)
    assert speculation.kind == "same"


def test_data_needs_no_speculation():
    found = read(lambda mask: mask != 0, (IDS != 0).double())
    assert isinstance(found.meaning(), Two) and not found.meanings.speculations_of(found.result)
