"""Figures as people read them. A figure that is not there is a dash."""

from __future__ import annotations

import math

NONE = "–"


def factor(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def percent(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def scientific(value: float | None) -> str:
    """'3.2e-06', and 0 for nothing at all."""
    if value is None:
        return NONE
    return "0" if value == 0 else f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def loss_text(value: float | None, digits: int = 4) -> str:
    return NONE if value is None or math.isnan(value) else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """'12.3 k'."""
    return NONE if value is None else _scaled(value, 1000.0, ("", " k", " M", " G", " T"))


def byte_text(value: float | None) -> str:
    return NONE if value is None else _scaled(value, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB"))


def seconds_text(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{value:.3g}{unit}" if unit.strip() or value != int(value) else f"{value:.0f}{unit}"
        value /= base
    return f"{value:.3g}{units[-1]}"
