"""What a pass is: a small frozen value with a name, a phase, declared order and a text form."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from ..errors import PipelineError, did_you_mean
from ..graph.phases import ALL_ROLES, Phase, Role
from ..graph.provenance import Site, site_of

if TYPE_CHECKING:
    from .context import Context


@dataclass(frozen=True)
class Pass:
    """One graph-to-graph step. Fields are options; the docstring's first line is its help text.

    `run` edits the graph in place and returns nothing: the manager observes what changed, refreshes
    metadata, verifies and records. Wrap each edit in `with ctx.rewrite(...)` so that it can be
    shown, counted and bisected on its own.
    """

    name: ClassVar[str]
    phase: ClassVar[Phase]
    after: ClassVar[tuple[str, ...]] = ()  # if present, run me later
    before: ClassVar[tuple[str, ...]] = ()  # if present, run me earlier
    needs: ClassVar[tuple[str, ...]] = ()  # must be present, and earlier
    roles: ClassVar[frozenset[Role]] = ALL_ROLES
    adds_guards: ClassVar[bool] = False  # may specialise symbolic sizes
    rank_dependent: ClassVar[bool] = False  # result differs between ranks of one job

    def concerns(self, graph: fx.Graph) -> bool:
        """False where the graph has nothing that the pass is about; the default pipeline then leaves it out unsaid."""
        return True

    def changes_numbers(self) -> bool:
        """True where results differ on purpose, as the user asked by naming the pass: it is not validated as equal."""
        return False

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        raise TypeError(f"{type(self).__name__} does not define run()")

    @property
    def spec(self) -> str:
        """Text form that `parse_spec` reads back; only options that differ from their default appear."""
        shown = [
            f"{f.name}={_print_value(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return self.name + (f"{{{', '.join(shown)}}}" if shown else "")

    @classmethod
    def summary(cls) -> str:
        return (inspect.getdoc(cls) or "").split("\n", 1)[0]

    @classmethod
    def site(cls) -> Site:
        """File and line of the pass's definition."""
        return site_of(cls)


# --- the text form -------------------------------------------------------------------------------

_SPEC = re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]+)\s*(\{(?P<options>.*)\})?\s*$", re.S)


def split_specs(text: str) -> list[str]:
    """Cut 'a, b{x=[1,2]}, c' at the commas outside brackets."""
    parts, depth, start, quote = [], 0, 0, ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth or quote:
        raise PipelineError(f"unbalanced brackets or quotes in pipeline text {text!r}")
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """'name{key=value}' as a name and raw option texts."""
    found = _SPEC.match(text)
    if not found:
        raise PipelineError(f"cannot read pass spec {text!r}: write name or name{{key=value, ...}}")
    options: dict[str, str] = {}
    for part in split_specs(found["options"] or ""):
        key, eq, value = part.partition("=")
        if not eq:
            raise PipelineError(f"cannot read option {part.strip()!r} in {text!r}: write key=value")
        options[key.strip()] = value.strip()
    return found["name"], options


def build(cls: type[Pass], options: dict[str, str]) -> Pass:
    """Make the pass from option texts, checking names and types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    types = typing.get_type_hints(cls) if options else {}  # which takes long
    values = {}
    for key, text in options.items():
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise PipelineError(
                f"pass '{cls.name}' has no option {key!r}{did_you_mean(key, fields)}; its options: {known}"
            )
        values[key] = _read_value(cls, key, text, types[key])
    return cls(**values)


def _read_value(cls: type[Pass], key: str, text: str, wanted: Any) -> Any:
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        value = text  # bare words are strings
    origin = typing.get_origin(wanted) or wanted
    if origin is tuple and isinstance(value, list):
        value = tuple(value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(origin, type) and (
        not isinstance(value, origin) or (origin is int and value in (True, False) and isinstance(value, bool))
    ):
        raise PipelineError(f"pass '{cls.name}' option {key!r} takes {origin.__name__}, got {text}")
    return value


def _print_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_print_value(v) for v in value) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value not in ("true", "false"):
        return value
    return repr(value)
