"""A program: a few assignments, sizes and kinds of batches. It prints as a script that shows what it does."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from . import data
from .data import Sizes

_NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(e[+-]?\d+)?")
_SCRIPT = '''"""{title}"""
import torch
import torch.nn.functional as F
from tests.fuzz import check  # from the root of the repository

{sizes} = {numbers}

def step({arguments}):
{body}

check(step, {call})
'''


@dataclass(frozen=True)
class Line:
    """One assignment; the last line of a program is what it returns."""

    name: str
    text: str


@dataclass(frozen=True)
class Program:
    """A training step up to its loss. `outputs` are names returned beside the loss."""

    lines: tuple[Line, ...]
    loss: str
    outputs: tuple[str, ...]
    sizes: Sizes
    kinds: tuple[str, ...]  # of the batches, the first being the one it is compiled for
    seed: int
    words: frozenset[str] = frozenset()  # constructs of the vocabulary that went into it
    loud: float = 1.0
    capacity: Any = None  # numbers of packed rows that it is compiled for
    dtype: str = "float64"  # of every floating-point number that it does not cast itself

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Inputs, parameters and buffers that it reads."""
        texts = [line.text for line in self.lines] + [self.loss, *self.outputs]
        read = {n.id for t in texts for n in ast.walk(ast.parse(t, mode="eval")) if isinstance(n, ast.Name)}
        return tuple(n for n in data.NAMES if n in read)

    @property
    def body(self) -> str:
        first = [
            *self._open(self.sizes.open, "N", data.OF_COLUMNS),
            *self._open(self.sizes.many, "B", data.OF_SEQUENCES),
        ]
        lines = first + [f"{line.name} = {line.text}" for line in self.lines]
        result = f"return {', '.join([self.loss, *self.outputs])}"
        text = "\n".join(f"    {line}" for line in [*lines, result])
        return text if self.dtype == "float64" else _in_type(text, self.dtype)

    def _open(self, is_open: bool, name: str, dims: dict[str, tuple[int, ...]]) -> list[str]:
        """Where the size is read from."""
        by = next((n for n in self.arguments if n in dims), None)
        return [f"{name} = {by}.shape[{dims[by][0]}]"] if is_open and by else []

    @property
    def text(self) -> str:
        """What makes it this program and no other."""
        call = {"seed": self.seed, "kinds": list(self.kinds), "loud": self.loud}
        call |= {"capacity": self.capacity} if self.capacity is not None else {}
        call |= {"dtype": self.dtype} if self.dtype != "float64" else {}
        return f"{self.sizes}\n{json.dumps(call)}\n{self.body}"

    @property
    def hash(self) -> str:
        return hashlib.sha1(self.text.encode()).hexdigest()[:10]

    def script(self, title: str = "") -> str:
        names = [f.name for f in fields(Sizes) if f.name not in ("pad", "open", "many")]
        call = f"{', '.join(f'{n}={n}' for n in names)}, seed={self.seed}, batches={list(self.kinds)}"
        sizes = {"pad": 0, "open": False, "many": False}
        for name, usual in {**sizes, "loud": 1.0, "capacity": None, "dtype": "float64"}.items():
            value = getattr(self.sizes if name in sizes else self, name)
            if value != usual:
                call += f", {name}={value!r}"
        numbers = ", ".join(str(getattr(self.sizes, n)) for n in names)
        title = title.replace("\\", "\\\\").replace('"""', "'''")
        return _SCRIPT.format(
            title=title, sizes=", ".join(names), numbers=numbers, arguments=", ".join(self.arguments), body=self.body,
            call=call,
        )  # fmt: skip

    def function(self) -> Callable[..., Any]:
        source = f"def step({', '.join(self.arguments)}):\n{self.body}\n"
        names: dict[str, Any] = {"torch": torch, "F": F, "__name__": __name__}
        names |= {f.name: getattr(self.sizes, f.name) for f in fields(Sizes)}
        exec(compile(source, f"<program {self.hash}>", "exec"), names)
        return names["step"]

    def with_lines(self, lines: Sequence[Line]) -> Program:
        return replace(self, lines=tuple(lines))


def _in_type(text: str, dtype: str) -> str:
    """What is said of float64 is said of another type, whose numbers end earlier."""
    largest = torch.finfo(getattr(torch, dtype)).max

    def number(found: re.Match[str]) -> str:
        return found[0] if float(found[0]) <= largest else f"{largest * 0.9:.0e}"

    text = text.replace("torch.float64", f"torch.{dtype}").replace(".double()", f".to(torch.{dtype})")
    return _NUMBER.sub(number, text)
