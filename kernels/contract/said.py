"""What a check says of an argument that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .words import MOST, Number

Fail = Callable[..., NoReturn]


def absent(fail: Fail, name: str) -> None:
    fail(f"{name} must be a tensor, not None")


def elsewhere(fail: Fail, name: str, x: torch.Tensor, device: torch.device) -> None:
    fail(f"{name} is on {x.device}, another tensor on {device}")


def other_dtype(fail: Fail, name: str, x: torch.Tensor, wanted: tuple[torch.dtype, ...]) -> None:
    fail(f"{name} must be {' or '.join(map(str, wanted))}, not {x.dtype}")


def other_layout(fail: Fail, name: str, x: torch.Tensor) -> None:
    fail(f"{name} must be strided, not {x.layout}")


def other_rank(fail: Fail, name: str, x: torch.Tensor, wanted: int, or_more: bool) -> None:
    fail(f"{name} must have {wanted}{' or more' if or_more else ''} dims, not {x.dim()}")


def other_size(fail: Fail, name: str, x: torch.Tensor, place: int, wanted: int, word: str) -> None:
    fail(f"{name}.shape[{place}] must be {wanted} ({word}), not {x.shape[place]}")


def no_such_size(fail: Fail, name: str, x: torch.Tensor, place: int, word: str) -> None:
    fail(f"{name}.shape[{place}] must be of the form {word}, and it is {x.shape[place]}")


def other_sizes(fail: Fail, name: str, x: torch.Tensor, wanted: tuple[int, ...]) -> None:
    fail(f"{name} has sizes {tuple(x.shape)}, and those of other tensors are {tuple(wanted)} there")


def other_number(fail: Fail, name: str, found: list[Any], wanted: list[Any]) -> None:
    fail(f"{name} must be {len(wanted)}, not {len(found)}")


def other_number_of(fail: Fail, name: str, found: float, what: Number) -> None:
    bounds = [f"at least {what.low}"] * (what.low is not None) + [f"at most {what.high}"] * (what.high is not None)
    fail(f"{name} must be {' and '.join([*['finite'] * what.finite, *bounds])}, not {found}")


def outside(fail: Fail, name: str, found: int, low: int, high: int) -> None:
    fail(f"{name} must be {f'{low} or more' if high == MOST else f'from {low} to {high}'}, not {found}")


def no_choice(fail: Fail, name: str, found: str, choices: tuple[str, ...]) -> None:
    fail(f"{name} must be one of {', '.join(choices)}, not {found!r}")


def other_flags(fail: Fail, name: str, found: list[bool], of: tuple[str, ...]) -> None:
    fail(f"{name} has one entry for each of {', '.join(of)}, not {len(found)}")


def negative_sizes(fail: Fail, name: str, found: list[int]) -> None:
    fail(f"{name} must be one size or more, none negative: {found}")


def other_total(fail: Fail, name: str, found: list[int], wanted: int) -> None:
    fail(f"sum of {name} must be {wanted}, not {sum(found)}")
