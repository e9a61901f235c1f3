"""Which passes exist. A catalogue, never a pipeline: `@register` only makes a name known.

They come from turbogr's own `passes/` folder (file name = pass name), from the entry-point group `turbogr.passes` of
installed packages, and from `@register` in the user's program.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from ..errors import PipelineError
from ..graph.phases import Phase
from ..graph.provenance import site_of
from ..registry import Registry
from .pass_base import Pass

_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

P = TypeVar("P", bound=type[Pass])


def register(cls: P) -> P:
    """Make a pass known by its name, so that pipelines in text form can mention it."""
    check_pass(cls)
    known = PASSES.registered(cls.name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise PipelineError(
            f"two passes are named '{cls.name}': {known.__qualname__} ({known.site()}) and "
            f"{cls.__qualname__} ({cls.site()}); rename one of them"
        )
    PASSES.register(cls.name, cls)
    return cls


def check_pass(cls: Any) -> None:
    """What every pass must say of itself, so that a slip of the pen is not a pass that silently never runs."""
    wrong = ""
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise PipelineError(f"{cls!r} is not a subclass of Pass")
    if not isinstance(getattr(cls, "name", None), str) or not _KEBAB.fullmatch(cls.name):
        wrong = "class attribute name must be kebab-case, such as 'fold-views'"
    elif not isinstance(getattr(cls, "phase", None), Phase):
        wrong = "class attribute phase must be a Phase, such as Phase.PRE_GRAD"
    for kind in ("after", "before", "needs"):
        names = getattr(cls, kind)
        if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
            wrong = wrong or f"{kind} must be a tuple of pass names, such as ('fold-views',)"
        elif not wrong and cls.name in names:
            wrong = f"{kind} names the pass itself"
    if wrong:
        raise PipelineError(f"{cls.__qualname__} ({site_of(cls)}): {wrong}")


def find(name: str) -> type[Pass]:
    """The pass class of that name, imported on demand."""
    return PASSES.find(name)


def names() -> list[str]:
    """Every known pass name, sorted."""
    return PASSES.names()


def all_passes() -> list[type[Pass]]:
    """Every pass that can be imported, sorted by name."""
    return PASSES.all()


def _load(imported: Any) -> None:
    """Modules register their passes themselves; an entry point may name the class."""
    if isinstance(imported, type) and issubclass(imported, Pass):
        register(imported)


PASSES: Registry[type[Pass]] = Registry(
    "pass", "turbogr.passes", _load, PipelineError, room="passes", listing="`turbogr passes` lists what there is"
)
