"""What GE knows of each operator type: inputs, outputs and attributes, read from torchair's generated raw ops.

turbogr's own operators register theirs here, as their package would with GE on an NPU machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from .dtypes import BY_NAME

Kind = Literal["required", "optional", "dynamic"]

# How the native module names the types of attributes.
TAGS = {
    "Int": "VT_INT", "Float": "VT_FLOAT", "Bool": "VT_BOOL", "String": "VT_STRING", "Type": "VT_DATA_TYPE",
    "ListInt": "VT_LIST_INT", "ListFloat": "VT_LIST_FLOAT", "ListBool": "VT_LIST_BOOL",
    "ListString": "VT_LIST_STRING", "ListType": "VT_LIST_DATA_TYPE", "ListListInt": "VT_LIST_LIST_INT",
}  # fmt: skip

_INTEGERS = "INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64"
_FLOATS = "DOUBLE FLOAT FLOAT16 BF16"
_COMPLEX = "COMPLEX32 COMPLEX64 COMPLEX128"
# GE's names for sets of dtypes, without the quantized ones, which torch graphs do not hold.
_SETS = {
    "all": f"BOOL {_INTEGERS} {_FLOATS} {_COMPLEX}",
    "ordinarytype": f"BOOL {_INTEGERS} {_FLOATS} {_COMPLEX}",
    "basictype": f"{_INTEGERS} {_FLOATS} {_COMPLEX}",
    "numbertype": f"{_INTEGERS} {_FLOATS} {_COMPLEX}",
    "realnumbertype": f"{_INTEGERS} {_FLOATS}",
    "integerdatatype": _INTEGERS,
    "floatingdatatype": "DOUBLE FLOAT FLOAT16",
    "indexnumbertype": "INT32 INT64",
    "unarydatatype": f"{_FLOATS} {_COMPLEX}",
    "float16": "FLOAT16",
    "float32": "FLOAT",
    "int32": "INT32",
    "int8": "INT8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Port:
    """An input or output. Ports that name the same variable hold values of one dtype."""

    name: str
    kind: Kind = "required"
    dtypes: frozenset[torch.dtype] | None = None  # None: any, or not understood
    variable: str = ""


@dataclass(frozen=True)
class Attribute:
    name: str
    type: str  # a key of TAGS
    required: bool = True
    default: str = ""  # as GE's sources write it

    def is_default(self, value: Any) -> bool:
        """Saying it changes nothing."""
        if self.required:
            return False
        text = self.default.replace(" ", "").strip('"')
        if isinstance(value, bool):
            return text == str(value).lower()
        if isinstance(value, (list, tuple)):
            return text.strip("{}") == ",".join(str(v).lower() for v in value)
        if isinstance(value, (int, float)):
            try:
                return abs(float(text.rstrip("f")) - value) <= 1e-6 * abs(value)
            except ValueError:
                return False
        return isinstance(value, str) and text == value


@dataclass(frozen=True)
class Prototype:
    type: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[Attribute, ...] = ()

    @property
    def is_reliable(self) -> bool:
        """Of lists of tensors torchair's texts and its code name different inputs."""
        return not self.type.startswith("Foreach")


# Attributes that a raw op always writes and its text does not mention.
_UNMENTIONED = {"TopKV2": (Attribute("sort_policy", "Int", False, "1"),)}
_own: dict[str, Prototype] = {}
# Types that torchair makes without a raw op.
_BARE = {
    "Data": Prototype("Data", (Port("x", "optional"),), (Port("y"),), (Attribute("index", "Int"),)),
    "RefData": Prototype("RefData", (Port("x", "optional"),), (Port("y"),), (Attribute("index", "Int"),)),
    "Const": Prototype("Const", (), (Port("y"),), (Attribute("value", "Tensor"),)),
    "NetOutput": Prototype("NetOutput", (Port("input", "dynamic"),), ()),
}


def register(prototype: Prototype) -> None:
    """Make an operator of turbogr's known. A second time is an error unless it says the same."""
    known = find(prototype.type)
    if known is not None and known != prototype:
        raise ValueError(f"GE operator {prototype.type} has another prototype already")
    for attribute in prototype.attributes:
        if attribute.type not in TAGS:
            raise ValueError(f"GE operator {prototype.type}: attributes have no type {attribute.type!r}")
    _own[prototype.type] = prototype


def find(op: str) -> Prototype | None:
    return _own.get(op) or _BARE.get(op) or _parsed(op)


def known_types() -> list[str]:
    return sorted({*_own, *_BARE, *_texts()})


def read_from(folder: Callable[[], Path | None]) -> None:
    """Where the headers lie that describe GE's operators; None where there are none on this machine."""
    global _folder
    _folder = folder


def _nowhere() -> Path | None:
    return None


_folder: Callable[[], Path | None] = _nowhere


def _texts() -> dict[str, str]:
    folder = _folder()
    return {} if folder is None else _texts_in(folder)


@lru_cache(maxsize=1)
def _texts_in(folder: Path) -> dict[str, str]:
    """The body of each REG_OP; where files differ the generated one is right."""
    found: dict[str, str] = {}
    for name in ("ge/_ge_graph.py", "_ge_concrete_graph/dynamic_output_ops.py",
                 "_ge_concrete_graph/auto_generated_ge_raw_ops.py"):  # fmt: skip
        text = (folder / name).read_text(encoding="utf-8")
        found.update(re.findall(r'"""\s*REG_OP\((\w+)\)(.*?)"""', text, re.DOTALL))
    return found


def _parsed(op: str) -> Prototype | None:
    body = _texts().get(op)
    return parse(op, body) if body is not None else None


@lru_cache(maxsize=2048)
def parse(op: str, body: str) -> Prototype:
    """From the clauses that follow REG_OP(…) in GE's sources."""
    clauses = list(_clauses(body))
    variables = {name: _dtypes(rest) for kind, name, rest in clauses if kind == "DATATYPE"}

    def port(kind: str, name: str, rest: str) -> Port:
        quoted = re.fullmatch(r'"(\w+)"', rest.strip())
        variable = quoted[1] if quoted else ""
        return Port(name, _kind(kind), variables.get(variable) if variable else _dtypes(rest), variable)

    return Prototype(
        op,
        tuple(port(*clause) for clause in clauses if clause[0].endswith("INPUT")),
        tuple(port(*clause) for clause in clauses if clause[0].endswith("OUTPUT")),
        tuple(_attribute(*clause) for clause in clauses if clause[0].endswith(("ATTR", "ATRR")))
        + _UNMENTIONED.get(op, ()),
    )


def _clauses(body: str) -> Iterator[tuple[str, str, str]]:
    """('INPUT', 'x', 'TensorType({…})') for each; parentheses and braces nest, and a string may hold them."""
    for match in re.finditer(r"\.([A-Z_]+)\(\s*(\w+)\s*(,|\))", body.replace("\\n", "\n")):
        kind, name, separator = match.groups()
        if kind == "OP_END_FACTORY_REG":
            continue
        rest = _until_closed(body.replace("\\n", "\n"), match.end()) if separator == "," else ""
        yield kind, name, rest.strip()


def _until_closed(text: str, start: int) -> str:
    depth, quoted = 1, False
    for place in range(start, len(text)):
        character = text[place]
        if character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return text[start:place]
    return text[start:]


def _kind(clause: str) -> Kind:
    return "dynamic" if clause.startswith("DYNAMIC") else "optional" if clause.startswith("OPTIONAL") else "required"


def _attribute(clause: str, name: str, rest: str) -> Attribute:
    type_, _, default = rest.partition(",")
    type_ = type_.strip()
    return Attribute(name, type_[:1].upper() + type_[1:], clause == "REQUIRED_ATTR", default.strip())


def _dtypes(text: str) -> frozenset[torch.dtype] | None:
    """The dtypes a clause allows; None where it is written in a way that says nothing certain."""
    names = re.findall(r"\bDT_\w+", text)
    words = [w for w in re.findall(r"[A-Za-z]\w*", text) if not w.startswith("DT_") and w != "TensorType"]
    for word in words:
        group = _SETS.get(word.lower())
        if group is None:
            return None
        names += [f"DT_{n}" for n in group.split()]
    spelled = {"DT_FLOAT32": "DT_FLOAT", "DT_FLOAT64": "DT_DOUBLE", "DT_BFLOAT16": "DT_BF16", "DT_INT": "DT_INT32"}
    names = [spelled.get(n, n) for n in names]
    return frozenset(BY_NAME[n] for n in names if n in BY_NAME) or None
