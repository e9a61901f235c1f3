"""Tensor specs in text form, and questions about symbolic sizes that never add a guard.

    f32[b, n, 64]  float[..., d]  bf16[b=32, 4096]  i64[]

One grammar serves rules (`inputs=`), test helpers, the command line and the documentation. A dtype is one of
f16 bf16 f32 f64 i8 i16 i32 i64 u8 bool, or a group: float, int, any. A dim is a number, a name (equal names are
equal sizes), a name with an example size (`b=32`), or a leading `...` for any number of dims; a bare dtype
leaves the shape open.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from .._torch import FakeTensorMode, ShapeEnv, named_symbol, statically_known_true
from ..errors import OptionError, did_you_mean
from .text import DTYPES

_NAMED = {name: (dtype,) for dtype, name in DTYPES.items()}
_GROUPS = {
    "float": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "int": (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    "any": (torch.float32, *(d for d in DTYPES if d != torch.float32)),
}
_TOKENS = {**_NAMED, **_GROUPS}
_SPEC = re.compile(r"\s*(?P<dtype>[A-Za-z]\w*)\b\s*(?P<open>\[(?P<dims>[^\[\]]*)\])?\s*(,|;|(?=\s|$|[A-Za-z]))")
_DIM = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)\s*(?:=\s*(?P<value>\d+))?|(?P<size>\d+))$")
# Highly composite, so that a pattern may split a dim; distinct, so that no two dims agree by accident.
_UNIT = 840


@dataclass(frozen=True)
class Dim:
    """One dim of a spec: a fixed size, or a name with perhaps an example size."""

    name: str = ""
    size: int | None = None

    def __str__(self) -> str:
        if not self.name:
            return str(self.size)
        return self.name if self.size is None else f"{self.name}={self.size}"


@dataclass(frozen=True)
class TensorSpec:
    """What is said about one tensor. The first of `dtypes` stands for the group in examples."""

    token: str
    dims: tuple[Dim, ...]
    open: bool = False  # any number of leading dims before `dims`

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return _TOKENS[self.token]

    def __str__(self) -> str:
        dims = (["..."] if self.open else []) + [str(d) for d in self.dims]
        return f"{self.token}[{', '.join(dims)}]"

    def closed(self, leading: int) -> TensorSpec:
        """The same spec with `...` standing for `leading` dims of its own."""
        if not self.open:
            return self
        return TensorSpec(self.token, (*(Dim(f"_lead{i}") for i in range(leading)), *self.dims))

    def of_dtype(self, dtype: torch.dtype) -> TensorSpec:
        return TensorSpec(DTYPES[dtype], self.dims, self.open)


def parse_inputs(text: str) -> tuple[TensorSpec, ...]:
    """Read 'f32[b, n], i64[b]'; commas or spaces between tensors."""
    specs, at = [], 0
    while at < len(text.rstrip()):
        found = _SPEC.match(text, at)
        if not found:
            raise OptionError(
                f"cannot read tensor spec {text[at:].strip()!r} in {text!r}: write dtype[dims], "
                "e.g. f32[b, 64] or float[..., d]"
            )
        specs.append(_tensor_spec(found, text))
        at = found.end()
    return tuple(specs)


def as_specs(inputs: str | Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return parse_inputs(inputs) if isinstance(inputs, str) else tuple(inputs)


def _tensor_spec(found: re.Match[str], text: str) -> TensorSpec:
    token = found["dtype"]
    if token not in _TOKENS:
        raise OptionError(
            f"{token!r} in {text!r} is not a dtype{did_you_mean(token, _TOKENS)}; known: {' '.join(_TOKENS)}"
        )
    if found["open"] is None:
        return TensorSpec(token, (), open=True)
    parts = [p.strip() for p in found["dims"].split(",") if p.strip()]
    is_open = bool(parts) and parts[0] == "..."
    return TensorSpec(token, tuple(_dim(p, text) for p in parts[is_open:]), is_open)


def _dim(part: str, text: str) -> Dim:
    found = _DIM.match(part)
    if found is None:
        why = "`...` goes first" if part == "..." else "write a number, a name or name=size"
        raise OptionError(f"cannot read dim {part!r} in {text!r}: {why}")
    if found["size"] is not None:
        return Dim(size=int(found["size"]))
    return Dim(found["name"], int(found["value"]) if found["value"] else None)


def sizes_of(specs: Sequence[TensorSpec], default: Mapping[str, int] | None = None) -> dict[str, int]:
    """A size for each named dim: its example value, else `default`, else distinct even numbers."""
    sizes: dict[str, int] = {}
    for dim in (d for s in specs for d in s.dims if d.name and d.size is not None):
        assert dim.size is not None
        if sizes.setdefault(dim.name, dim.size) != dim.size:
            raise OptionError(f"dim {dim.name!r} is given two sizes: {sizes[dim.name]} and {dim.size}")
    for dim in (d for s in specs for d in s.dims if d.name):
        sizes.setdefault(dim.name, (default or {}).get(dim.name, 6 + 2 * len(sizes)))
    return sizes


def real_inputs(
    inputs: str | Sequence[TensorSpec], sizes: Mapping[str, int] | None = None, seed: int = 0, leading: int = 1
) -> list[torch.Tensor]:
    """Random tensors on the CPU as the specs say; integers are small and non-negative."""
    specs = [s.closed(leading) for s in as_specs(inputs)]
    sizes = sizes_of(specs, sizes) | dict(sizes or {})
    generator = torch.Generator().manual_seed(seed)
    return [_random(s.dtypes[0], _shape(s, sizes), generator) for s in specs]


def _shape(spec: TensorSpec, sizes: Mapping[str, Any]) -> list[Any]:
    return [sizes[d.name] if d.name else d.size for d in spec.dims]


def _random(dtype: torch.dtype, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 8, shape, generator=generator).to(dtype)


def symbolic_inputs(
    inputs: str | Sequence[TensorSpec], leading: int = 1, sizes: Mapping[str, int] | None = None
) -> list[torch.Tensor]:
    """Fake tensors of one fresh mode: named dims are symbolic sizes, numbers are fixed."""
    specs = [s.closed(leading) for s in as_specs(inputs)]
    env = ShapeEnv()
    hints = sizes_of(specs, sizes)
    symbols = {name: named_symbol(env, name, hint) for name, hint in hints.items()}
    with FakeTensorMode(shape_env=env):
        return [torch.empty(_shape(s, symbols), dtype=s.dtypes[0]) for s in specs]


def generic_inputs(specs: Sequence[TensorSpec], leading: int) -> list[torch.Tensor]:
    """Fake tensors of fixed, pairwise distinct sizes: what a pattern is first traced on."""
    specs = [s.closed(leading) for s in specs]
    names = dict.fromkeys(d.name for s in specs for d in s.dims if d.name)
    sizes = {name: _UNIT * (i + 1) for i, name in enumerate(names)}
    with FakeTensorMode():
        return [torch.empty(_shape(s, sizes), dtype=s.dtypes[0]) for s in specs]


# --- questions that never add a guard ------------------------------------------------------------


def known(condition: Any) -> bool:
    """True only where `condition` is provable from what the compiler knows; never adds a guard."""
    if isinstance(condition, (bool, torch.SymBool)):
        return statically_known_true(condition)
    return bool(condition)


def same_size(a: Any, b: Any) -> bool:
    return known(a == b)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def same_literal(a: Any, b: Any) -> bool:
    """Equal arguments: numbers by value, sizes provably, everything else by ==."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_literal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    if not isinstance(a, numbers) or not isinstance(b, numbers):
        return bool(type(a) is type(b) and a == b)
    if isinstance(a, float) and isinstance(b, float):
        # d ** -0.5 and 1 / math.sqrt(d) differ in the last bit.
        return (a != a and b != b) or math.isclose(a, b, rel_tol=1e-15)
    return known(a == b)


def expression(value: Any) -> sympy.Expr:
    """sympy form of an int, SymInt or expression."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)
