"""Which passes exist. A catalogue, never a pipeline: `@register` only makes a name known.

Three sources, none of which depends on import order: turbogr's own `passes/` folder (file name = pass
name), the entry-point group `turbogr.passes` of installed packages, and `@register` in the user's program.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from .errors import PipelineError, did_you_mean
from .pass_base import Pass, Phase, site_of

GROUP = "turbogr.passes"
_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_registered: dict[str, type[Pass]] = {}

P = TypeVar("P", bound=type[Pass])


def register(cls: P) -> P:
    """Make a pass known by its name, so that pipelines in text form can mention it."""
    check_pass(cls)
    known = _registered.get(cls.name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise PipelineError(
            f"two passes are named '{cls.name}': {known.__qualname__} ({known.site()}) and "
            f"{cls.__qualname__} ({cls.site()}); rename one of them"
        )
    _registered[cls.name] = cls
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
    if name not in _registered:
        if name in _builtin():
            importlib.import_module(_builtin()[name])
        elif name in _installed():
            _load(_installed()[name])
    if name not in _registered:
        raise PipelineError(
            f"no pass is named {name!r}{did_you_mean(name, names())}; `turbogr passes` lists what there is"
        )
    return _registered[name]


def names() -> list[str]:
    """Every known pass name, sorted."""
    return sorted({*_registered, *_builtin(), *_installed()})


def all_passes() -> list[type[Pass]]:
    """Every pass that can be imported, sorted by name."""
    return [find(name) for name in names()]


@lru_cache(maxsize=1)
def _builtin() -> dict[str, str]:
    from . import passes

    modules = (m.name for m in pkgutil.iter_modules(passes.__path__) if not m.name.startswith("_"))
    return {m.replace("_", "-"): f"{passes.__name__}.{m}" for m in modules}


@lru_cache(maxsize=1)
def _installed() -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group=GROUP)}


def _load(entry: EntryPoint) -> None:
    try:
        loaded = entry.load()
    except Exception as error:
        raise PipelineError(
            f"pass '{entry.name}' of entry point {entry.value!r} cannot be imported: {error}"
        ) from error
    if isinstance(loaded, type) and issubclass(loaded, Pass):
        register(loaded)
