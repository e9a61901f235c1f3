"""A contract, bound to the op whose arguments it is about."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from .entries import Question
from .source import LOCALS, SPACE, Refused, Writer
from .words import REAL, Array, Distances, Entries, Rule


class Contract:
    """Contract(*rules, name=what it is, ...). Arguments that are not named may be anything.

    Arguments are looked at in the order in which they are written here, each able to rely on those before. `nonzero`
    names sizes that must not be zero.
    """

    def __init__(self, *rules: Rule | Entries | Distances, nonzero: str = "", **arguments: Any) -> None:
        self.rules, self.nonzero, self.arguments = rules, frozenset(nonzero.split()), arguments
        self.op = ""

    def extended(self, *rules: Rule | Entries | Distances, nonzero: str = "", **arguments: Any) -> Contract:
        """The same, and more: that of a backward, which takes the arguments of the forward."""
        more = " ".join([*self.nonzero, nonzero])
        return Contract(*self.rules, *rules, nonzero=more, **{**self.arguments, **arguments})

    def bind(self, schema: str) -> None:
        """Compile it for an op. Every argument of the contract is one of the schema's."""
        found = torch._C.parse_schema(schema)
        self.op, names = found.name, [a.name for a in found.arguments]
        if unknown := set(self.arguments) - set(names):
            raise ValueError(f"{self.op}: the contract names {', '.join(sorted(unknown))}, and the schema does not")
        if taken := set(names) & (LOCALS | SPACE.keys()):
            raise ValueError(f"{self.op}: arguments of a checked op cannot be called {', '.join(sorted(taken))}")
        self.leading = next((names.index(name) for name, what in self.arguments.items() if _leads(what)), 0)
        self.optional = {a.name for a in found.arguments if str(a.type).startswith("Optional")}
        self.defaults = {a.name: a.default_value for a in found.arguments if a.has_default_value()}
        signature = [f"{name}=defaults[{name!r}]" if name in self.defaults else name for name in names]
        self.source = {flavour: Writer(self, flavour).text(signature) for flavour in ("native", "known", "symbolic")}
        functions = []
        for flavour, text in self.source.items():
            space = {**SPACE, "defaults": self.defaults, "fail": self.fail, "explain": self.explain}
            if flavour != "symbolic":
                space["unlike"] = operator.ne
            exec(compile(text, f"<contract of {self.op}, {flavour}>", "exec"), space)
            functions.append(space["check"])
        self.before_kernel, self._check, self._symbolic = functions

    # Filled by `bind`. Of the leading argument is the dtype that is computed in: the first tensor of the contract that
    # is floating point, or may be.
    leading: int
    before_kernel: Callable[..., None]  # of turbogr_check of a library, and the arguments
    _check: Callable[..., None]
    _symbolic: Callable[..., None]

    def explain(self, error: Exception, *arguments: Any) -> NoReturn:
        """What the check before a kernel has refused, or could not ask for."""
        self._check(None, *arguments)
        if isinstance(error, Refused):
            raise AssertionError(f"{self.op}: what the check before kernels refuses is in order") from error
        raise error

    def check(self, *arguments: Any, **named: Any) -> None:
        """Check everything, entries by torch; sizes only where tensors have no data."""
        real = all(has_data(x) for x in tensors((*arguments, *named.values())))
        (self._check if real else self._symbolic)(None, *arguments, **named)

    def asked(self, *arguments: Any) -> list[Question]:
        """What there is to be asked of entries, after everything else is checked: nothing is looked at.

        Sizes may be values of any kind that computes and compares; tensors have sizes, dtype, device and layout.
        """
        found: list[Any] = []
        space = {**SPACE, "defaults": self.defaults, "fail": self.fail, "unlike": operator.ne}
        space["look"] = lambda fail, *some: found.extend(some)
        exec(compile(self.source["known"], f"<contract of {self.op}, asked>", "exec"), space)
        space["check"](None, *arguments)
        return found

    def check_sizes(self, *arguments: Any) -> None:
        """Check what is known without a look at the data."""
        self._symbolic(None, *arguments)

    def fail(self, text: str, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"{self.op}: {text}")


def has_data(x: torch.Tensor) -> bool:
    """False for fake tensors and other wrappers, whose values cannot be read."""
    return type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not x.is_meta


def tensors(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors(tuple(x))


def _leads(what: Any) -> bool:
    return isinstance(what, Array) and (what.dtype is None or (isinstance(what.dtype, tuple) and what.dtype[0] in REAL))
