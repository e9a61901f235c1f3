"""turbogr's ops as GE operators: one declaration, beside the kernel, serves GE, torchair and the simulator.

`kernels/ascendc/<op>/op_graph/<op>_proto.h` is what CANN's build registers with GE. It is read here: arguments of the
torch op go to inputs and attributes of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ... import kernels
from ..ge import prototypes
from ..ge.prototypes import Port, Prototype

KERNELS = Path(kernels.__file__).parent / "ascendc"
_REGISTERED = re.compile(r"REG_OP\((\w+)\)(.*?)\.OP_END_FACTORY_REG", re.DOTALL)


@lru_cache(maxsize=1)
def operators() -> dict[str, Prototype]:
    """By the name of the torch op."""
    found = {}
    for path in sorted(KERNELS.glob("*/op_graph/*_proto.h")):
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        (op,) = _REGISTERED.findall(text)
        found[path.parents[1].name] = prototypes.parse(*op)
    return found


def overload(op: str) -> torch._ops.OpOverload:
    found: torch._ops.OpOverload = getattr(torch.ops.turbogr, op).default
    return found


def register(torchair: ModuleType) -> None:
    """Converters for all of them."""
    for op, prototype in operators().items():
        torchair.register_fx_node_ge_converter(overload(op))(_converter(torchair, op, prototype))


def register_prototypes() -> None:
    """What GE learns from the installed package; the simulator learns it here."""
    for prototype in operators().values():
        prototypes.register(prototype)


def _converter(torchair: ModuleType, op: str, prototype: Prototype) -> Callable[..., Any]:
    names = [argument.name for argument in overload(op)._schema.arguments]
    defaults = _defaults(op)
    outputs = [port.name for port in prototype.outputs]

    def convert(*given: Any, meta_outputs: Any = None, **named: Any) -> Any:
        arguments = {**defaults, **dict(zip(names, given, strict=False)), **named}
        inputs = {port.name: _narrowed(port, arguments.get(port.name)) for port in prototype.inputs}
        attributes = {a.name: _attribute(torchair, a.type, arguments[a.name]) for a in prototype.attributes}
        return torchair.ge.custom_op(prototype.type, inputs=inputs, attrs=attributes, outputs=outputs)

    return convert


def _defaults(op: str) -> dict[str, Any]:
    """Values of arguments that a call may leave out."""
    arguments = overload(op)._schema.arguments
    return {a.name: a.default_value for a in arguments if a.has_default_value()}


def narrows(port: Port, dtype: torch.dtype) -> bool:
    """Ids that a kernel compares in 32 bits only, as the adapter for NPUs hands them over."""
    return port.name.endswith("_ids") and dtype == torch.int64 and port.dtypes == {torch.int32}


def _narrowed(port: Port, x: Any) -> Any:
    if x is None or not narrows(port, torch.int64):
        return x
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge import DataType

    return ge.Cast(x, dst_type=DataType.DT_INT32) if x.dtype == DataType.DT_INT64 else x


def _attribute(torchair: ModuleType, type_: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)) and type_ == "Int":  # which of several, as bits
        value = sum(1 << place for place, wanted in enumerate(value) if wanted)
    kinds = {"Int": int, "Float": float, "Bool": bool, "String": str}
    return getattr(torchair.ge.attr, {"String": "Str"}.get(type_, type_))(kinds[type_](value))


def arguments_of(op: str, prototype: Prototype, inputs: dict[str, Any], attributes: dict[str, Any]) -> list[Any]:
    """The other way round: a torch op's arguments from those of its GE operator."""
    found, given = [], {**_defaults(op), **attributes, **inputs}
    for argument in overload(op)._schema.arguments:
        value = given[argument.name]
        if str(argument.type) == "List[bool]":
            value = [bool(value >> place & 1) for place in range(len(prototype.outputs))]
        found.append(value)
    return found
