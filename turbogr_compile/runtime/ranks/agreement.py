"""Before a compiled graph starts its first collective, ranks make sure that all of them will start the same ones.

Ranks that do not would wait for each other until a timeout. Here they leave word in the job's key-value store, not by a
collective: a rank that compiles anew on its own, with the same collectives, need not find the others. What is compared
are ops, settings, dtypes and fixed sizes, in order, group by group; once for each sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ... import _torch
from ...errors import TurbogrError
from ...graph.nodes import is_collective
from ...graph.provenance import line_of
from ...graph.text import dtype_text

_OF_EACH_RANK = {"all_to_all_single"}  # how many rows go where is a rank's own business
_SIZES = {"output_split_sizes", "input_split_sizes"}
ANY = "?"
Boxed = Callable[[list[Any]], Any]


class RanksDisagree(TurbogrError):
    """Ranks are about to start different collectives."""


@dataclass(frozen=True)
class Collective:
    op: str
    settings: tuple[str, ...]
    tensors: tuple[tuple[str, ...], ...]  # dtype and sizes
    where: str = ""  # line of the user's code

    def __str__(self) -> str:
        inputs = ", ".join(f"{dtype}[{', '.join(sizes)}]" for dtype, *sizes in self.tensors)
        return " ".join([self.op, *self.settings, inputs]) + (f" ({self.where})" if self.where else "")

    def agrees(self, other: Collective) -> bool:
        if (self.op, self.settings, len(self.tensors)) != (other.op, other.settings, len(other.tensors)):
            return False
        pairs = [zip(a, b, strict=True) for a, b in zip(self.tensors, other.tensors, strict=True) if len(a) == len(b)]
        return len(pairs) == len(self.tensors) and all(a == b or ANY in (a, b) for pair in pairs for a, b in pair)


def collectives(graph: fx.Graph) -> dict[str, list[Collective]]:
    """What a graph starts, in order, by the name of the group."""
    found: dict[str, list[Collective]] = {}
    for node in (n for n in graph.nodes if is_collective(n)):
        group, one = _described(node)
        found.setdefault(group, []).append(one)
    return found


def _described(node: fx.Node) -> tuple[str, Collective]:
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    group = given.get("group_name", given.get("group", ""))
    op = target.overloadpacket.__name__
    settings = [str(v) for k, v in given.items() if k not in {"group_name", "group", "tag", *_SIZES} and not _nodes(v)]
    tensors = [_type(n.meta.get("val"), op in _OF_EACH_RANK) for v in given.values() for n in _nodes(v)]
    line = line_of(node)
    where = f"{line.where}" if line is not None else ""
    return str(getattr(group, "group_name", group)), Collective(
        op, tuple(settings), tuple(t for t in tensors if t), where
    )


def _nodes(value: Any) -> list[fx.Node]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, fx.Node)]


def _type(value: Any, own_rows: bool) -> tuple[str, ...]:
    if not isinstance(value, torch.Tensor):
        return ()
    sizes = [str(s) if isinstance(s, int) else ANY for s in value.shape]
    return (dtype_text(value.dtype), *([ANY, *sizes[1:]] if own_rows and sizes else sizes))


def agreeing(graph: fx.Graph) -> Callable[[Boxed], Boxed]:
    """What to put around the graph once it is compiled: the first call then makes sure that ranks agree."""
    sequences = collectives(graph)  # now: targets rewrite the graph while they compile it

    def around(run: Boxed) -> Boxed:
        compared = False

        def call(values: list[Any]) -> Any:
            nonlocal compared
            if not compared:
                agree(sequences)
                compared = True
            return run(values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return around if sequences else lambda run: run


def agree(sequences: Mapping[str, Sequence[Collective]]) -> None:
    """Returns when all ranks of each group have come with the same sequence; raises RanksDisagree where one differs."""
    meetings = [m for group, sequence in sequences.items() for m in _meetings(group, sequence)]
    # All words are left before any is waited for: groups may be met in different orders.
    for step in (_Meeting.arrive, _Meeting.compare, _Meeting.conclude):
        for meeting in meetings:
            step(meeting)


def refuse(groups: Iterable[str], reason: str) -> None:
    """In the place of `agree`: this rank will not start the collectives of these groups.

    Ranks that come to an agreement about a graph of theirs raise RanksDisagree with the reason. Those that have agreed
    on the same collectives before come to none: they notice when this rank is gone.
    """
    for meeting in [m for group in dict.fromkeys(groups) for m in _meetings(group, [])]:
        meeting.refuse(reason)


def _meetings(name: str, sequence: Sequence[Collective]) -> Iterator[_Meeting]:
    try:
        group = _torch.process_group(name)
        ranks = dist.get_process_group_ranks(group)
    except Exception:  # no such group here: the collective itself says so, better than we could
        return
    if len(ranks) == 1 or dist.get_backend(group) == "fake":
        return
    place = hashlib.sha256(f"{name}{ranks}".encode()).hexdigest()[:16]
    meeting = _Meeting(dist.PrefixStore(f"turbogr/agree/{place}", _torch.default_store()), name, ranks, sequence)
    if not meeting.known():
        yield meeting


class _Meeting:
    """Of the ranks of a group: what each is about to start, compared with what the first of them is."""

    def __init__(self, store: Any, group: str, ranks: Sequence[int], sequence: Sequence[Collective]) -> None:
        self.store, self.group, self.ranks, self.sequence = store, group, ranks, sequence
        self.rank, self.number = dist.get_rank(), -1
        # Sizes are left out: a rank that compiles anew for other ones starts the same collectives.
        kinds = json.dumps([(c.op, c.settings, [t[0] for t in c.tensors]) for c in sequence])
        self._known = f"{self.rank}/known/{hashlib.sha256(kinds.encode()).hexdigest()}"

    def known(self) -> bool:
        return bool(self.store.check([self._known]))

    def arrive(self) -> None:
        self.number = self.store.add(f"{self.rank}/count", 1)
        words = [(c.op, c.settings, c.tensors, c.where) for c in self.sequence]
        self.store.set(f"{self.number}/{self.rank}", json.dumps(words))

    def refuse(self, reason: str) -> None:
        self.number = self.store.add(f"{self.rank}/count", 1)
        self.store.set(f"{self.number}/verdict", reason)
        self.store.set(f"{self.number}/{self.rank}", json.dumps(reason))

    def compare(self) -> None:
        words = json.loads(self._get(str(self.ranks[0])))
        if isinstance(words, str):
            return  # that rank refused, and has given the verdict
        first = [
            Collective(op, tuple(settings), tuple(map(tuple, tensors)), where) for op, settings, tensors, where in words
        ]
        if difference := self._difference(first):
            self.store.set(f"{self.number}/verdict", difference)
        elif self.store.add(f"{self.number}/agreed", 1) == len(self.ranks):
            self.store.set(f"{self.number}/verdict", "")

    def conclude(self) -> None:
        if verdict := self._get("verdict").decode():
            raise RanksDisagree(verdict)
        self.store.set(self._known, "")

    def _difference(self, first: Sequence[Collective]) -> str:
        for i in range(max(len(first), len(self.sequence))):
            theirs, mine = (s[i] if i < len(s) else None for s in (first, self.sequence))
            if theirs is None or mine is None or not theirs.agrees(mine):
                first_rank = self.ranks[0]
                return (
                    f"ranks of group '{self.group}' are about to start different collectives: number {i + 1} of the "
                    f"graph is {theirs or 'missing'} on rank {first_rank} and {mine or 'missing'} on rank {self.rank}"
                    "\n  every rank must start the same ones in the same order: look for code that depends on the rank "
                    "or on its data, and for settings that differ between ranks"
                )
        return ""

    def _get(self, key: str) -> bytes:
        try:
            return self.store.get(f"{self.number}/{key}")
        except dist.DistStoreError as error:
            absent = [r for r in self.ranks if not self.store.check([f"{self.number}/{r}"])]
            raise RanksDisagree(
                f"ranks {absent} of group '{self.group}' have not come to a graph with collectives in time; rank "
                f"{self.rank} is about to start {self.sequence[0]}\n"
                "  they died, or run other code: their output says which"
            ) from error
