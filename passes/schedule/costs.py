"""What nodes cost in seconds and bytes: formulas of FLOPs and bytes, at rates of the target or measured ones.

Estimates only decide where compute stands between collectives. The order of collectives is that of the program, so
ranks may estimate differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from ...errors import OptionError
from ...files import read_json
from ...graph import costs
from ...graph.nodes import is_collective, is_wait
from ...graph.shapes import expression
from ...graph.text import target_text
from .dependences import owner

UNKNOWN = 1024  # stands for a size of which no example was seen


@dataclass(frozen=True)
class Rates:
    flops: float  # a second
    bytes: float  # a second, read and written by compute
    overhead: float  # seconds of every op
    latency: float  # seconds of every collective
    wire: float  # bytes a second, of collectives


RATES = {
    "cpu": Rates(flops=5e10, bytes=8e9, overhead=5e-6, latency=2e-4, wire=1e9),
    "ascend": Rates(flops=1.5e14, bytes=1e12, overhead=5e-6, latency=3e-5, wire=1e11),
}


def read_costs(path: str, target: str) -> tuple[Rates, Mapping[str, float]]:
    """Rates of a target, with what a JSON file says instead: rates by name, and "ops", seconds by op."""
    rates = RATES["ascend" if target.startswith("ascend") else "cpu"]
    if not path:
        return rates, {}
    try:
        given = read_json(Path(path), dict)
        ops = {str(op): float(seconds) for op, seconds in given.pop("ops", {}).items()}
        return dataclasses.replace(rates, **{name: float(value) for name, value in given.items()}), ops
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        known = ", ".join(f.name for f in dataclasses.fields(Rates))
        raise OptionError(
            f'overlap: cannot read costs from {path}: {error}\n  it takes {known}, and "ops": {{"aten.mm": seconds}}'
        ) from error


class Costs:
    def __init__(self, graph: fx.Graph, rates: Rates, measured: Mapping[str, float]) -> None:
        self._known = costs.known_sizes(graph)
        self.rates, self.measured = rates, measured
        self._seconds = {n: self._cost(n) for n in graph.nodes}
        self._bytes = {n: self._size(n) if owner(n) is n else 0.0 for n in graph.nodes}

    def seconds(self, node: fx.Node) -> float:
        return self._seconds[node]

    def bytes(self, node: fx.Node) -> float:
        """Memory that the node's result takes; a view takes none."""
        return self._bytes[node]

    def _cost(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_wait(node):
            return 0.0
        if (measured := self.measured.get(target_text(node))) is not None:
            return measured
        if is_collective(node):
            wire = max([self._size(node), *(self._size(n) for n in node.all_input_nodes)])
            return self.rates.latency + wire / self.rates.wire
        flops, moved = costs.node_cost(node)
        if moved == 0:
            return 0.0  # a view, or arithmetic on sizes
        work = self._number(flops) / self.rates.flops if flops is not None else 0.0
        return self.rates.overhead + max(work, self._number(moved) / self.rates.bytes)

    def _size(self, node: fx.Node) -> float:
        return sum((self._number(_bytes(v)) for v in _tensors(node.meta.get("val"))), 0.0)

    def _number(self, expr: sympy.Expr) -> float:
        if not expr.is_number:
            expr = expr.subs(self._known)
            expr = expr.subs(dict.fromkeys(expr.free_symbols, UNKNOWN))
        return float(expr)


def static_bytes(value: torch.Tensor) -> int | None:
    """None where a size is only known at run time, or may differ between ranks."""
    return int(_bytes(value)) if all(isinstance(s, int) for s in value.shape) else None


def _bytes(value: torch.Tensor) -> sympy.Expr:
    return sympy.Mul(*[expression(s) for s in value.shape], value.element_size())


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]
