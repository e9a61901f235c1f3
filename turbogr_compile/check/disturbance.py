"""Another batch out of one: other lengths, other values in pads, same shapes, values that the batch itself holds.

A compiled graph may be right on the batch it was made for, because that batch happens to be all one length, has no
sequence that a mask empties, or has zeros in its pads. So it is also tried on a batch in which sequences end elsewhere:
one has a single row, one as many as fit, one a hole in the middle, the others anything between. A row that goes takes
the content of a row that was padding, in every input alike; a row that comes takes that of a valid row of its sequence.
Lengths follow. Then each input that does not say which rows are valid gets the content of valid rows in its pads:
finite numbers that the model can take, where zeros may have been. No pad becomes nan, which eager itself would spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.prologue import InputRows

_FEW_VALUES = 2  # a mask, whatever its dtype


@dataclass(frozen=True)
class Disturbance:
    """What is done to a batch."""

    hole: bool = True  # in one sequence, a third of its rows are padding in the middle
    pads: bool = True  # pads hold what valid rows hold


# Most hostile first: a graph may refuse a batch with holes, or with values in pads that it was told are constant.
DISTURBANCES = (Disturbance(), Disturbance(hole=False), Disturbance(hole=False, pads=False))


def disturbances(inputs: Sequence[Any], rows: InputRows) -> Iterator[list[Any]]:
    """Other batches, the most hostile first."""
    for kind in DISTURBANCES:
        other = disturbed(inputs, rows, kind)
        if other is not None:
            yield other


def disturbed(
    inputs: Sequence[Any], rows: InputRows, kind: Disturbance = Disturbance(hole=False, pads=False), seed: int = 0
) -> list[Any] | None:
    """The inputs of another batch; None where this one gives no clue how."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        valid = rows.valid(inputs).cpu()
        wanted = _other_lengths(valid, generator)
        if kind.hole:
            before = valid.sum(1)
            if any(_is_lengths(inputs[i], before) for i in rows.dims) or not _punch(wanted):
                return None
        source = _sources(valid, wanted)
        if source is None:
            return None
        changed = [_moved(x, rows.dims.get(i), source) for i, x in enumerate(inputs)]
        for i in rows.dims:
            changed[i] = relengthed(changed[i], valid.sum(1), wanted.sum(1))
        return _other_pads(changed, rows, generator) if kind.pads else changed


def _other_lengths(valid: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Which rows are to be valid instead: rows are added and taken where the padding begins."""
    sequences, columns = valid.shape
    lengths = torch.randint(1, columns + 1, (sequences,), generator=generator)
    order = torch.randperm(sequences, generator=generator)
    lengths[order[0]] = 1
    if sequences > 1:
        lengths[order[1]] = columns
    from_the_end = (~valid[:, 0] & valid[:, -1])[:, None]  # left padding
    place = torch.arange(columns)
    return (place < lengths[:, None]).where(~from_the_end, place >= columns - lengths[:, None])


def _punch(wanted: torch.Tensor) -> bool:
    """A hole in the middle of the longest sequence that is not full, or of the longest; False where all are short."""
    lengths, columns = wanted.sum(1), wanted.shape[1]
    longest = int(lengths.where(lengths < columns, -1).argmax())
    if lengths[longest] < 3:
        longest = int(lengths.argmax())
    places = wanted[longest].nonzero().squeeze(1)
    third = len(places) // 3
    wanted[longest, places[third : len(places) - third]] = False
    return third > 0


def _sources(valid: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """For each row, the row whose content it takes, as flat numbers; itself where nothing changes."""
    sequences, columns = valid.shape
    flat = torch.arange(sequences * columns).view(sequences, columns)
    pads = flat[~valid]
    goes, comes = valid & ~wanted, wanted & ~valid
    if bool(goes.any()) and not len(pads):
        return None
    source = flat.clone()
    if bool(goes.any()):
        source[goes] = pads[torch.arange(int(goes.sum())) % len(pads)]
    for sequence in range(sequences):
        own = flat[sequence][valid[sequence]]
        own = own if len(own) else flat[valid]
        places = comes[sequence].nonzero().squeeze(1)
        if len(places) and not len(own):
            return None
        if len(places):
            source[sequence, places] = own[torch.arange(len(places)) % len(own)]
    return source


def _moved(x: Any, dims: tuple[int, ...] | None, source: torch.Tensor) -> Any:
    """Rows of an input, taken from elsewhere; an input with one entry per sequence stays."""
    if not isinstance(x, torch.Tensor) or dims is None or len(dims) < 2:
        return x
    columns = source.shape[1]
    sequence_dim, *column_dims = dims
    out = x.detach()
    for dim in column_dims:
        rows = out.movedim((sequence_dim, dim), (0, 1))
        taken = rows[(source // columns).to(x.device), (source % columns).to(x.device)]
        out = taken.movedim((0, 1), (sequence_dim, dim))
    return laid_out_like(x, out).requires_grad_(x.requires_grad)


def _other_pads(inputs: Sequence[Any], rows: InputRows, generator: torch.Generator) -> list[Any]:
    """Pads take the content of valid rows, input by input, where that makes no row valid."""
    valid = rows.valid(inputs).cpu()
    flat = torch.arange(valid.numel()).view(valid.shape)
    inside, pads = flat[valid], int((~valid).sum())
    if not pads or not len(inside):
        return list(inputs)
    source = flat.clone()
    source[~valid] = inside[torch.randint(len(inside), (pads,), generator=generator)]
    changed = list(inputs)
    for i, dims in rows.dims.items():
        if len(dims) == 2 and not _is_mask(inputs[i]):
            before, changed[i] = changed[i], _moved(changed[i], dims, source)
            if not torch.equal(rows.valid(changed).cpu(), valid):
                changed[i] = before
    return changed


def _is_mask(x: Any) -> bool:
    return not isinstance(x, torch.Tensor) or x.dtype == torch.bool or x.unique().numel() <= _FEW_VALUES


def _is_lengths(x: Any, lengths: torch.Tensor) -> bool:
    return relengthed(x, lengths, lengths + 1) is not x


def relengthed(x: Any, before: torch.Tensor, after: torch.Tensor) -> Any:
    """An input that held the lengths of the sequences, or their last columns, holds the new ones."""
    if not isinstance(x, torch.Tensor) or x.dim() != 1 or x.dtype.is_floating_point or x.dtype == torch.bool:
        return x
    for less in (0, 1):
        if torch.equal(x.cpu().long(), before - less):
            return (after - less).to(x)
    return x


def laid_out_like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` with its dims in memory in the order of those of `old`: generated code relies on it."""
    order = sorted(range(old.dim()), key=old.stride().__getitem__, reverse=True)
    back = sorted(range(old.dim()), key=order.__getitem__)
    return new.permute(order).contiguous().permute(back)
