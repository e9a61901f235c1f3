"""Where the rooms of the house lie, and what can be found in them by name.

Passes, targets, commands, row ops and instruments are found alike: as modules of a room (file name = name), through an
entry-point group of installed packages, or because the program registered them. None depends on the order of imports.
A package that cannot be imported, or whose name is taken, is named in `troubles()` and harms nobody who did not ask
for it.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import TurbogrError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
PACKAGE = __name__.rpartition(".")[0]
HOME = Path(__file__).resolve().parent
# In a checkout these rooms lie beside the package; in a wheel they lie inside of it, like all others.
BESIDE = ("passes", "lowering", "kernels", "training", "benchmarks", "examples")
CHECKOUT = HOME.parent if (HOME.parent / "pyproject.toml").is_file() and not (HOME / BESIDE[0]).is_dir() else None


class Beside(MetaPathFinder):
    """Imports `turbogr_compile.passes` from the folder beside the package.

    The checkout's root as a second entry of the package's `__path__` would do that too, but it holds the package
    itself: whoever walks the submodules, as TORCH_LOGS does, would never arrive.
    """

    @classmethod
    def announce(cls) -> None:
        if CHECKOUT is not None and not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, room = fullname.rpartition(".")
        return PathFinder.find_spec(fullname, [str(CHECKOUT)]) if package == PACKAGE and room in BESIDE else None


def _rooms() -> dict[str, Path]:
    folders = [*HOME.iterdir(), *(CHECKOUT / room for room in BESIDE if CHECKOUT is not None)]
    return {d.name: d for d in sorted(folders) if (d / "__init__.py").is_file()}


ROOMS = _rooms()


def modules_of(room: str) -> list[str]:
    """Names of the modules that lie in the room itself; packages beside them hold their parts."""
    return sorted(m.name for m in pkgutil.iter_modules([str(ROOMS[room])]) if not m.ispkg and m.name[0] != "_")


def sources_of(room: str) -> list[str]:
    """Names of all modules of the room, however deep, as they are imported."""
    return sorted(_module_name(room, file.relative_to(ROOMS[room])) for file in ROOMS[room].rglob("*.py"))


def _module_name(room: str, file: Path) -> str:
    parts = [PACKAGE, room, *file.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Registry(Generic[T]):
    """Things of one kind by name.

    `load` turns what was imported (a module of the room, or what an entry point names) into the thing; None where
    importing it was all there was to do, because the module registers its things itself.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        load: Callable[[Any], T | None],
        error: type[TurbogrError],
        room: str | None = None,
        listing: str = "",  # where a person finds the names, instead of all of them in an error
    ) -> None:
        self.kind, self.group, self.room, self.error = kind, group, room, error
        self._load, self._listing = load, listing
        self._registered: dict[str, T] = {}

    def register(self, name: str, thing: T) -> None:
        self._registered[name] = thing

    def registered(self, name: str) -> T | None:
        return self._registered.get(name)

    def names(self) -> list[str]:
        """Every known name, sorted; nothing is imported."""
        return sorted({*self._registered, *self._builtin(), *self._installed()})

    def find(self, name: str) -> T:
        """The thing of that name, imported on demand."""
        if name not in self._registered:
            if name in self._builtin():
                self._adopt(name, importlib.import_module(self._builtin()[name]))
            elif name in self._installed():
                self._adopt_installed(name, self._installed()[name])
        if name not in self._registered:
            known = self.names()
            there = self._listing or (
                f"there are: {', '.join(known)}" if known else f"no package has any ({self.group})"
            )
            raise self.error(f"no {self.kind} is named {name!r}{did_you_mean(name, known)}; {there}")
        return self._registered[name]

    def all(self) -> list[T]:
        """Everything that can be imported, sorted by name; `troubles()` names the rest."""
        return [self.find(name) for name in self.names() if name not in self._broken()]

    def troubles(self) -> list[str]:
        """A sentence for each package that cannot be imported or whose name is taken. Imports all of them."""
        return [*self._twins(), *self._broken().values()]

    def _adopt_installed(self, name: str, entry: EntryPoint) -> None:
        imported = self._imported(entry)
        try:
            self._adopt(name, imported)
        except TurbogrError as problem:
            raise self.error(f"{self.kind} '{name}' of {_source(entry)} cannot be used: {problem}") from problem
        if name not in self._registered:
            raise self.error(f"{self.kind} '{name}' of {_source(entry)} is not there: importing it registers none")

    def _adopt(self, name: str, imported: Any) -> None:
        thing = self._load(imported)
        if thing is not None:
            self._registered[name] = thing

    def _builtin(self) -> dict[str, str]:
        if self.room is None:
            return {}
        return {m.replace("_", "-"): f"{PACKAGE}.{self.room}.{m}" for m in _modules(self.room)}

    def _installed(self) -> dict[str, EntryPoint]:
        """By name; of two packages with one name the first in the order of packages."""
        return {e.name: e for e in reversed(_installed(self.group)) if e.name not in self._builtin()}

    def _imported(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except (Exception, SystemExit) as problem:
            said = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise self.error(
                f"{self.kind} '{entry.name}' of {_source(entry)} cannot be imported: {type(problem).__name__}: {said}"
            ) from problem

    def _broken(self) -> dict[str, str]:
        found = {}
        for name in self._installed():
            try:
                self.find(name)
            except TurbogrError as problem:
                found[name] = str(problem)
        return found

    def _twins(self) -> list[str]:
        taken: dict[str, str] = dict.fromkeys(self._builtin(), "turbogr")
        found = []
        for entry in _installed(self.group):
            if entry.name in taken:
                found.append(
                    f"{self.kind} '{entry.name}' of {_source(entry)} is not used: {taken[entry.name]} has one of that "
                    "name; rename one of them"
                )
            taken.setdefault(entry.name, _source(entry))
        return found


def version_of(package: str) -> str:
    """Of an installed package; '' where it is not installed, as turbogr itself in a checkout that is used as it is."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@lru_cache(maxsize=16)
def _modules(room: str) -> tuple[str, ...]:
    return tuple(modules_of(room))


@lru_cache(maxsize=16)
def _installed(group: str) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # takes longer to import than all of this module

    return tuple(sorted(entry_points(group=group), key=lambda e: (_distribution(e), e.name, e.value)))


def packages_with(group: str) -> list[str]:
    """Installed packages that offer something in a group, with their versions, for keys of caches."""
    return [f"{_distribution(e)} {version_of(_distribution(e))} {e.name}={e.value}" for e in _installed(group)]


def _distribution(entry: EntryPoint) -> str:
    package = getattr(entry, "dist", None)
    return package.name if package is not None else ""


def _source(entry: EntryPoint) -> str:
    package = _distribution(entry)
    return f"package {package} ({entry.value})" if package else f"entry point {entry.value!r}"
