"""Tensors of two batches that have the same place in both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_DEPTH = 16


def pairs(now: Any, then: Any, depth: int = _DEPTH) -> Iterator[tuple[torch.Tensor, Any]]:
    """Every tensor of one batch with what the other holds in its place; None where it holds nothing.

    Looks into mappings, sequences, dataclasses and plain objects with attributes.
    """
    if isinstance(now, torch.Tensor):
        yield now, then
    elif depth:
        theirs = _parts(then) if type(then) is type(now) else {}
        for place, part in _parts(now).items():
            yield from pairs(part, theirs.get(place), depth - 1)


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, (nn.Module, type)) or callable(value):
        return {}
    if dataclasses.is_dataclass(value):  # with slots, too
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))
