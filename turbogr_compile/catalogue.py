"""Which passes exist. A catalogue, never a pipeline: `@register` only makes a name known.

Three sources, none of which depends on import order: turbogr's own `passes/` folder (file name = pass
name), the entry-point group `turbogr.passes` of installed packages, and `@register` in the user's program.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from .errors import PipelineError, did_you_mean
from .pass_base import Pass, site_of

GROUP = "turbogr.passes"
_registered: dict[str, type[Pass]] = {}

P = TypeVar("P", bound=type[Pass])


def register(cls: P) -> P:
    """Make a pass known by its name, so that pipelines in text form can mention it."""
    for attribute in ("name", "phase"):
        if not hasattr(cls, attribute):
            raise PipelineError(f"{cls.__qualname__} ({site_of(cls)}) has no class attribute '{attribute}'")
    known = _registered.get(cls.name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise PipelineError(
            f"two passes are named '{cls.name}': {known.__qualname__} ({known.site()}) and "
            f"{cls.__qualname__} ({cls.site()}); rename one of them"
        )
    _registered[cls.name] = cls
    return cls


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
