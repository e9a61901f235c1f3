"""Programs as an enemy would write them: masks of every kind in any order, scales, casts, layouts, later batches.

A program is a few lines of Python; a case prints as those. Every construct has a name, so that a sweep can ask for
programs that contain it: volume alone misses conditions that are dropped.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turbogr_compile.graph.shapes import symbolic_inputs

from .harness import NormalForm, Refused, attentions, compare, traced
from .packed import compare_packed

B, N, D = 4, 6, 4
LOWS = ["-INF", "LOWEST", "-1e9", "-1e4", "-65504.0", "-(2.0**32) + 1", "-8938.0", "-8937.0", "-50.0", "0.0", "1e9"]
USUAL_LOWS = ["-INF", "LOWEST", "-1e9", "-1e4", "-(2.0**32) + 1"]
NAMES = {"torch": torch, "F": F, "INF": torch.inf}
INPUTS = ("q", "k", "v", "ids", "tri", "pairs", "keep", "weight", "bias", "key_bias", "rel", "sink", "times", "table")

MASKS: dict[str, str] = {
    "key-valid": "(ids != 0)[:, None, :]",
    "key-pad": "(ids == 0)[:, None, :]",
    "query-valid": "(ids != 0)[:, :, None]",
    "triangle": "torch.ones(N, N, dtype=torch.bool).tril({c})",
    "upper": "torch.ones(N, N).triu({c}) == 0",
    "one-row": "torch.ones(1, N, dtype=torch.bool).tril({p})",
    "first": "(torch.arange(N) < {p})[None, None]",
    "arange": "torch.arange(N)[:, None] >= torch.arange(N) + {c}",
    "window": "(torch.arange(N)[:, None] - torch.arange(N)).abs() <= {p}",
    "eye": "torch.eye(N, dtype=torch.bool)",
    "pairs": "pairs",
    "input-triangle": "tri",
    "keep": "keep[:, None] > 0.5",
    "bigger": "ids[:, None, :] > {p}",
    "narrow-arange": "(torch.arange(N) * 60).to(torch.int8)[None, None] >= 0",
    "cumsum": "torch.eye(N).cumsum(0) > 0",
    "all": "torch.ones(N, dtype=torch.bool)",
    "earlier": "times[:, None] <= times[:, :, None]",
}
JOINS: dict[str, str] = {
    "and": "({a}) & ({b})",
    "or": "({a}) | ({b})",
    "xor": "({a}) ^ ({b})",
    "product": "(({a}).double() * ({b}).double()) > 0",
    "where": "torch.where({a}, {b}, ~({b}))",
    "sum": "(({a}).long() + ({b}).long()) >= 1",
    "flags": "((({a}).long() * 2 + ({b}).long()) & 1) == 1",
    "maximum": "torch.maximum(({a}).double(), ({b}).double()) == 1",
}
TURNS: dict[str, str] = {
    "not": "~({a})",
    "bytes": "(({a}).to(torch.uint8) - 1) == 0",
    "one-minus": "(1 - ({a}).double()) == 0",
    "flip": "({a}).expand(B, N, N).flip(-1)",
    "turn": "({a}).expand(B, N, N).transpose(1, 2)",
    "padded": "F.pad(({a}).expand(B, N, N)[:, :, 1:], [1, 0], value=True)",
    "regrouped": "({a}).expand(B, N, N).reshape(B * N, N).view(B, N, N)",
    "cat": "torch.cat([({a}).expand(B, N, N)[:, :2], ({a}).expand(B, N, N)[:, 2:]], 1)",
    "ints": "({a}).int().bool()",
    "tril-of": "({a}).expand(B, N, N).tril()",
    "bytes-divided": "torch.div(({a}).long() * 3, 2, rounding_mode='floor') == 1",
}
BEFORE: dict[str, str] = {
    "fill": "s.masked_fill({m}, {low})",
    "where": "torch.where({m}, s, {low})",
    "add": "s + ({m}).double() * {low}",
    "add-rest": "s + (1 - ({m}).double()) * {low}",
    "add-where": "s + torch.where({m}, 0.0, {low})",
    "scale": "s * {f}",
    "divide": "s / {f}",
    "negate": "-s",
    "bias": "s + bias",
    "key-bias": "s + key_bias[:, None]",
    "query-term": "s + weight[:, :, None]",
    "alpha": "torch.add(key_bias[:, None], s, alpha={f})",
    "shift": "s - s.amax(-1, keepdim=True)",
    "shift-detached": "s - s.amax(-1, keepdim=True).detach()",
    "query-factor": "s * weight[:, :, None]",
    "key-factor": "s * weight[:, None]",
    "times-mask": "s * ({m})",
    "cap": "torch.tanh(s / {f}) * {f}",
    "clamp-low": "s.clamp(min={low})",
    "maximum": "torch.maximum(s, torch.tensor({low}))",
    "clamp": "s.clamp(-3, 3)",
    "clean": "s.nan_to_num()",
    "floor": "torch.div(s, {f}, rounding_mode='floor')",
    "detach": "s.detach() * 0 + s",
    "constant": "s + 3.0 - 2.0",
    "large": "s - 1e9 + 1e9",
    "roll": "s.roll(1, -1)",
    "turn": "s.transpose(1, 2)",
    "distance": "s + rel[torch.arange(N)[:, None] - torch.arange(N) + N - 1]",
    "slope": "s - 0.1 * (torch.arange(N)[:, None] - torch.arange(N)).abs()",
    "gap": "s + table[((times[:, :, None] - times[:, None]).abs() // 200).clamp(max=7)]",
    "round": "s.float().double()",
    "log-mask": "s + keep[:, None].log().clamp(min={low})",
    "addcmul": "torch.addcmul(s, (1 - ({m}).double()), torch.full((1,), {low}))",
}
ACTIVATIONS: dict[str, str] = {
    "softmax": "s.softmax(-1)",
    "silu": "F.silu(s)",
    "sigmoid": "torch.sigmoid(s)",
    "relu2": "F.relu(s).square()",
    "by-hand": "s.exp() / s.exp().sum(-1, keepdim=True)",
    "by-hand-shifted": "(e := (s - s.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)",
    "over-queries": "s.softmax(1)",
    "silu-by-hand": "s * torch.sigmoid(s)",
    "sink": "torch.cat([s, sink.expand(B, N, 1)], -1).softmax(-1)[..., :-1]",
    "masked-exp": "(e := s.exp().masked_fill({m}, 0.0)) / e.sum(-1, keepdim=True)",
}
AFTER: dict[str, str] = {
    "times-mask": "w * ({m})",
    "fill": "w.masked_fill({m}, 0.0)",
    "where": "torch.where({m}, w, 0.0)",
    "scale": "w * {f}",
    "by-length": "w / (ids != 0).sum(1)[:, None, None]",
    "by-length-safe": "w / (ids != 0).sum(1).clamp(min=1)[:, None, None]",
    "query-factor": "w * weight[:, :, None]",
    "key-factor": "w * weight[:, None]",
    "clean": "w.nan_to_num(0.0)",
    "add": "w + 1e-3",
    "clamp": "w.clamp(0, 1)",
    "queries": "w * (ids != 0)[:, :, None]",
    "renormalise": "w / w.sum(-1, keepdim=True)",
    "pair-factor": "w * bias",
    "maximum": "torch.maximum(w, torch.zeros(()))",
    "flip": "w.flip(-1)",
    "detach": "w.detach()",
}
LAYOUTS: dict[str, tuple[str, str]] = {
    "matmul": ("q @ k.transpose(1, 2)", "w @ v"),
    "bmm": ("torch.bmm(q, k.mT)", "torch.bmm(w, v)"),
    "einsum": ("torch.einsum('bnd,bmd->bnm', q, k)", "torch.einsum('bnm,bmd->bnd', w, v)"),
    "turned": ("(k @ q.transpose(1, 2)).transpose(1, 2)", "(v.transpose(1, 2) @ w.transpose(1, 2)).transpose(1, 2)"),
    "regrouped": (
        "(q.view(-1, 2, N, 4) @ k.view(-1, 2, N, 4).mT).view(B, N, N)",
        "(w.view(-1, 2, N, N) @ v.view(-1, 2, N, 4)).view(B, N, 4)",
    ),
    "baddbmm": ("torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=2)", "torch.bmm(w, v)"),
}


def constructs() -> list[str]:
    groups = {
        "mask": MASKS,
        "join": JOINS,
        "turn": TURNS,
        "before": BEFORE,
        "activation": ACTIVATIONS,
        "after": AFTER,
        "layout": LAYOUTS,
    }
    return [f"{group}={name}" for group, known in groups.items() for name in known] + [f"low={low}" for low in LOWS]


@dataclass
class Program:
    """Written by a random choice; `wanted` is a construct that it must contain."""

    seed: int
    wanted: str = ""
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} {self.wanted}")
        self._open = self.wanted
        score, result = LAYOUTS[self._pick("layout", LAYOUTS, "matmul")]
        self.lines = [f"s = {score} / 2"]
        group = self.wanted.split("=")[0]
        steps = self.rng.choice([1, 1, 2, 2, 3, 4])
        for at in range(steps):
            self.lines.append("s = " + self._filled(BEFORE[self._pick("before", BEFORE, "fill" if at == 0 else "")]))
        self.lines.append("w = " + self._filled(ACTIVATIONS[self._pick("activation", ACTIVATIONS, "softmax")]))
        after = self.rng.choice([0, 0, 1, 1, 2]) if group != "after" else self.rng.choice([1, 2])
        for _ in range(after):
            self.lines.append("w = " + self._filled(AFTER[self._pick("after", AFTER, "")]))
        self.lines.append(f"return {result}")

    def _pick(self, group: str, known: Any, usual: str) -> str:
        if self._open.startswith(f"{group}=") and self._open.split("=", 1)[1] in known:
            name, self._open = self._open.split("=", 1)[1], ""
            return name
        if usual and self.rng.random() < 0.5:
            return usual
        return self.rng.choice(list(known))

    def _filled(self, template: str) -> str:
        if "{m}" in template:
            template = template.replace("{m}", self._mask(2))
        group = self._open.split("=")[0]
        low = self._open.split("=", 1)[1] if group == "low" and "{low}" in template else ""
        if low:
            self._open = ""
        low = low or self.rng.choice(USUAL_LOWS if self.rng.random() < 0.7 else LOWS)
        factor = self.rng.choice(["0.5", "2.0", "-1.0", "4", "0.125"])
        return template.replace("{low}", f"({low})").replace("{f}", f"({factor})")

    def _mask(self, depth: int) -> str:
        group = self._open.split("=")[0]
        roll = self.rng.random()
        if depth and (group == "join" or (group not in ("mask", "turn") and roll < 0.35)):
            template = JOINS[self._pick("join", JOINS, "and")]
            return template.replace("{a}", self._mask(depth - 1)).replace("{b}", self._mask(depth - 1))
        if depth and (group == "turn" or (group != "mask" and roll < 0.6)):
            return TURNS[self._pick("turn", TURNS, "not")].replace("{a}", self._mask(depth - 1))
        name = self._pick("mask", MASKS, "key-valid")
        numbers = {"{c}": str(self.rng.choice([-1, 0, 0, 1, 2])), "{p}": str(self.rng.choice([1, 2, 3]))}
        text = MASKS[name]
        for mark, number in numbers.items():
            text = text.replace(mark, number)
        return text

    def __str__(self) -> str:
        return "\n".join(
            [
                f"def program({', '.join(INPUTS)}):  # {self.seed} {self.wanted}",
                "    B, N = ids.shape",
                *(f"    {x}" for x in self.lines),
            ]
        )

    def function(self, dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
        scope: dict[str, Any] = {**NAMES, "LOWEST": torch.finfo(dtype).min}
        exec(str(self), scope)
        found: Callable[..., Tensor] = scope["program"]
        return found


def batch(kind: str, seed: int, size: float = 1.0, b: int = B, n: int = N) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    lengths, columns = torch.tensor([6, 3, 1, 4])[:b].clamp(max=n), torch.arange(n)
    valid = {
        "right": columns < lengths[:, None],
        "left": columns >= n - lengths[:, None],
        "full": torch.ones(b, n, dtype=torch.bool),
        "holes": torch.rand(b, n, generator=g) < 0.5,
        "empty": columns < (lengths - 3).clamp(min=0)[:, None],
    }[kind]

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    given = {
        "q": (floats(b, n, D).detach() * size).requires_grad_(),
        "k": floats(b, n, D),
        "v": floats(b, n, D),
        "ids": torch.randint(1, 9, (b, n), generator=g) * valid,
        "tri": torch.ones(n, n, dtype=torch.bool).tril(0 if kind != "holes" else 1),
        "pairs": torch.rand(b, n, n, generator=g) < (1.0 if kind == "full" else 0.6),
        "keep": valid.double(),
        "weight": torch.rand(b, n, generator=g, dtype=torch.float64) + 0.5,
        "bias": floats(b, n, n),
        "key_bias": floats(b, n),
        "rel": floats(2 * N - 1),
        "sink": floats(1, 1, 1),
        "times": torch.randint(0, 2000, (b, n), generator=g).sort(-1).values,
        "table": floats(8),
    }
    return [given[name] for name in INPUTS]


SYMBOLIC = (
    "f64[b=4, n=6, 4], f64[b=4, n=6, 4], f64[b=4, n=6, 4], i64[b=4, n=6], bool[n=6, n=6], bool[b=4, n=6, n=6], "
    "f64[b=4, n=6], f64[b=4, n=6], f64[b=4, n=6, n=6], f64[b=4, n=6], f64[11], f64[1, 1, 1], i64[b=4, n=6], f64[8]"
)
BATCHES = [("right", 1, 1.0), ("left", 2, 1.0), ("holes", 3, 1.0), ("full", 4, 300.0), ("empty", 5, 1.0)]


@dataclass
class Outcome:
    """'invalid': eager does not run it; 'refused'; 'accepted'. Complaints are what may not be."""

    status: str
    found: list[str] = field(default_factory=list)
    text: str = ""

    @property
    def complaints(self) -> list[str]:
        return [f for f in self.found if "DIFFERENT" in f]


def narrowed(inputs: list[Any], dtype: torch.dtype) -> list[Any]:
    return [x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]


def tried(program: Program, symbolic: bool = False, dtype: torch.dtype = torch.float64) -> Outcome:
    """Recognised on one batch, compared with eager on others; with symbolic sizes, on batches of other sizes too."""
    function, inputs = program.function(dtype), narrowed(batch("right", 0), dtype)
    try:
        with torch.no_grad():
            function(*inputs)
        module = traced(function, inputs, symbolic_inputs(SYMBOLIC) if symbolic else None)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return Outcome("invalid")
    found = attentions(module, inputs)
    if not found or isinstance(found[0], Refused):
        return Outcome("refused", text=str(found[0]) if found else "no attention")
    form = found[0]
    assert isinstance(form, NormalForm)
    tolerance = 1e-8 if dtype == torch.float64 and ".float()" not in str(program) else 1e-3
    others = [("right", 6, 1.0, 2, 5), ("holes", 7, 1.0, 4, 3)] if symbolic and not specialised(module) else []
    outcome = Outcome("accepted", text=str(form))
    for later in [*BATCHES, *others]:
        outcome.found.append(compare(module, form, narrowed(batch(*later), dtype), tolerance))
    for later in [*BATCHES[:3], *others]:
        given = narrowed(batch(*later), dtype)
        outcome.found.append(f"packed {compare_packed(module, form, given, tolerance)}")
    return outcome


def specialised(module: Any) -> bool:
    """Did tracing fix a size?"""
    return any(isinstance(s, int) for s in next(iter(module.graph.nodes)).meta["val"].shape[:2])
