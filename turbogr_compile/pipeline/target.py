"""The one small protocol between the compiler and what runs its graphs.

A target is one module of this folder with a `TARGET` object; its file name (kebab-case) is the target's name.
Packages outside turbogr add targets through the entry-point group `turbogr.targets`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import fx

from ..errors import OptionError, TargetError, did_you_mean
from ..graph.phases import Phase, Role, Vocabulary
from ..registry import Registry
from .remarks import Remark

log = logging.getLogger("turbogr_compile.target")


class Hooks(Protocol):
    """What the compiler gives a target: its passes for the graphs that only the target's road produces."""

    @property
    def key(self) -> str:
        """Changes whenever passes, their options or their sources change."""
        ...

    @property
    def watched(self) -> bool:
        """Somebody looks at the graphs: every pass must really run, compiled results from a cache must not skip it."""
        ...

    @property
    def target_options(self) -> Mapping[str, Any]:
        """What the user set for this target alone, as its `check_options` returned it."""
        ...

    def joint(self, module: fx.GraphModule) -> None: ...

    def tell(self, role: Role, remarks: Sequence[Remark], texts: Mapping[str, str]) -> None:
        """What lowering has to say about the graph of this role, and texts to lie beside its dump, by name.

        At any time after `post_grad`, also when the compiled graph runs.
        """
        ...

    def post_grad(self, module: fx.GraphModule, role: Role, inputs: Sequence[Any]) -> None:
        """Run POST_GRAD, then LOWERING passes, in place."""
        ...


@dataclass(frozen=True)
class Missing:
    """Something a target needs and this machine lacks."""

    what: str
    remedy: str


class Target(Protocol):
    name: str
    summary: str
    codegens: tuple[str, ...]  # best first
    default_pipeline: str

    def missing(self, codegen: str) -> list[Missing]:
        """What this machine lacks to run it; empty when ready."""
        ...

    def lower(self, module: fx.GraphModule, inputs: Sequence[Any], codegen: str, hooks: Hooks) -> Callable[..., Any]:
        """Take over a trainable module; the result is called with the Dynamo graph's inputs."""
        ...


@dataclass(frozen=True)
class BaseTarget:
    """Defaults shared by targets."""

    name: str
    summary: str
    codegens: tuple[str, ...]
    default_pipeline: str
    static_shapes: ClassVar[bool] = False  # with option `capacity`: one graph per combination of sizes

    def check_codegen(self, codegen: str | None) -> str:
        if codegen is None:
            return self.default_codegen()
        if codegen not in self.codegens:
            raise OptionError(
                f"target '{self.name}' has no code generator {codegen!r}{did_you_mean(codegen, self.codegens)}; "
                f"it has: {', '.join(self.codegens)}"
            )
        return codegen

    def default_codegen(self) -> str:
        """The first that can run here; the first of all where none can, so that its error is shown."""
        ready = next((c for c in self.codegens if not self.missing(c)), self.codegens[0])
        if ready != self.codegens[0]:
            lacking = self.missing(self.codegens[0])[0]
            log.warning("no %s: target %s uses codegen %s; %s", lacking.what, self.name, ready, lacking.remedy)
        return ready

    def missing(self, codegen: str) -> list[Missing]:
        return []

    def check_options(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """`target_options` as plain data, checked; an OptionError names what the target does not take."""
        if not isinstance(given, Mapping):
            raise OptionError(f"option 'target_options' takes a mapping of names to values, got {given!r}")
        if given:
            names = ", ".join(repr(name) for name in given)
            raise OptionError(f"target '{self.name}' has no target_options, and got {names}; 'ascend' has some")
        return {}

    def locate(self, run: Callable[[], Any]) -> str:
        """For a result that is wrong: `run` makes it again; says where the target's own work first goes wrong.

        '' where the target cannot tell.
        """
        return ""

    def vocabulary(self, phase: Phase, codegen: str | None) -> Vocabulary:
        """What graphs of this phase are made of on the road of this target."""
        apart = {} if phase is Phase.PRE_GRAD else self.decompositions(self.check_codegen(codegen))
        return Vocabulary(phase, f"{self.name}/{codegen}" if apart else "", apart)

    def decompositions(self, codegen: str) -> dict[Any, Callable[..., Any]]:
        """Ops that AOTAutograd takes apart for this target."""
        return {}

    def lower(self, module: fx.GraphModule, inputs: Sequence[Any], codegen: str, hooks: Hooks) -> Callable[..., Any]:
        raise TypeError(f"target '{self.name}' does not define lower()")

    def require(self, codegen: str) -> None:
        """Raise one clear error when the target cannot run here."""
        lacking = self.missing(codegen)
        if lacking:
            lines = "".join(f"\n  {m.what}: {m.remedy}" for m in lacking)
            instead = "" if self.name == "cpu" else "\n  instead: target='cpu' needs none of it"
            raise TargetError(f"target '{self.name}' with codegen '{codegen}' cannot run here{lines}{instead}")


def target_names() -> list[str]:
    return TARGETS.names()


def find_target(name: str) -> BaseTarget:
    return TARGETS.find(name)


def _load(imported: Any) -> BaseTarget:
    """A module of `lowering/` holds its target as `TARGET`; an entry point names the target itself."""
    target = getattr(imported, "TARGET", imported)
    lacking = [
        name for name in ("name", "codegens", "missing", "lower", "default_codegen") if not hasattr(target, name)
    ]
    if lacking:
        raise OptionError(f"{target!r} is no target: it has no {', '.join(lacking)}")
    return target


TARGETS: Registry[BaseTarget] = Registry("target", "turbogr.targets", _load, OptionError, room="lowering")
