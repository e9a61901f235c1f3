"""Another batch out of one: other lengths, other values in pads, same shapes, values that the batch itself holds.

A compiled graph may be right on the batch it was made for, because that batch happens to be all one length or has no
sequence that a mask empties. So it is also tried on a batch in which sequences end elsewhere: one has a single row, one
as many as fit, the others anything between. A row that goes takes the content of a row that was padding, in every input
alike; a row that comes takes that of a valid row of its sequence. Lengths follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.prologue import InputRows


def disturbed(inputs: Sequence[Any], rows: InputRows, seed: int = 0) -> list[Any] | None:
    """The inputs of another batch; None where this one gives no clue how."""
    with torch.no_grad():
        valid = rows.valid(inputs).cpu()
        wanted = _other_lengths(valid, torch.Generator().manual_seed(seed))
        source = _sources(valid, wanted)
        if source is None:
            return None
        changed = [_moved(x, rows.dims.get(i), source) if i in rows.dims else x for i, x in enumerate(inputs)]
        return [_lengths(new, old, valid, wanted) if i in rows.dims else new
                for i, (new, old) in enumerate(zip(changed, inputs, strict=True))]  # fmt: skip


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
    return out.contiguous()


def _lengths(x: Any, before: Any, valid: torch.Tensor, wanted: torch.Tensor) -> Any:
    """An input that held the lengths of the sequences, or their last columns, holds the new ones."""
    if not isinstance(x, torch.Tensor) or x.dim() != 1 or x.dtype.is_floating_point or x.dtype == torch.bool:
        return x
    for less in (0, 1):
        if torch.equal(before.cpu().long(), valid.sum(1) - less):
            return (wanted.sum(1) - less).to(x)
    return x
