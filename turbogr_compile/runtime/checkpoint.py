"""Numbered checkpoints of a training job: complete or not there, on any number of ranks, to the last bit.

    checkpoints = Checkpoints("runs/a")
    state = {"model": model, "rows": rows, "dense": dense, "sampler": sampler, "random": random_state()}
    done = checkpoints.load(state) or 0              # None in a new folder
    for step in range(done, steps):
        ...
        checkpoints.save(step + 1, state)

`torch.distributed.checkpoint` writes the tensors: what is spread over ranks (a DTensor, as sharded tables are) is
stored once and cut anew for whoever loads it. A checkpoint gets its name when all of it is on disk, and a rename has no
middle: a job that is killed while it saves goes on from the one before. Every file is read once before anything of it
is used, and has the sum that it was written with.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import OptionError, TurbogrError
from ..files import (
    Damaged,
    foreign,
    name_folder,
    read_json,
    read_sealed,
    reading,
    replace_file,
    sealed,
    sum_of,
    unchanged,
)
from .ranks.together import Together
from .sharding.optim import RowOptimizer
from .sharding.state import ORDER

FORMAT = 2
ABOUT, REST = "about.json", "rest.pickle"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


class CheckpointError(TurbogrError):
    """A checkpoint cannot be written, or what is found cannot be loaded into what is here."""


class Checkpoints:
    """Checkpoints in one folder, which all ranks can reach; the last `keep` of them stay (None for all).

    All ranks of the group (of the job by default) call `save` and `load` together. Values of a state are modules,
    optimizers, or anything else with `state_dict` and `load_state_dict`. What is spread over ranks is stored whole; of
    what every rank has, the first rank's is stored.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3, group: Any = None) -> None:
        if keep is not None and keep < 1:
            raise OptionError(f"Checkpoints keeps at least 1, or None for all of them, not {keep}")
        self.folder, self.keep, self.group = Path(folder), keep, group

    @property
    def latest(self) -> Path | None:
        """The complete checkpoint of the last step; None in a new folder."""
        return max(self._complete(), default=(0, 0, None))[2]

    @property
    def steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending."""
        return sorted(step for step, _, _ in self._complete())

    def _complete(self) -> Iterator[tuple[int, int, Path]]:
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if found := _NAME.fullmatch(path.name):
                yield int(found[1]), int(found[2] or 0), path

    # --- save --------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write what `state` is after so many steps; returns where. Nothing is there, or all of it."""
        ranks = Together(self.group)
        parts, wrong = _parts(state)
        if problems := sorted({p for each in ranks.gather(wrong) for p in each}):
            raise OptionError("cannot be saved:\n  " + "\n  ".join(problems))
        try:
            name, partial = (Path(p) for p in ranks.decide(lambda: self._begin(step)))
        except OSError as failed:
            raise CheckpointError(self._not_written(step, str(failed))) from failed
        tensors = {key: x for part in parts.values() for key, x in part.tensors.items()}
        try:
            metadata = _written(tensors, partial, ranks)
            written = sorted({info.relative_path for info in (metadata.storage_data or {}).values()})
            sums = _sums(partial, written, ranks)
            rest = {name: part.rest for name, part in parts.items()}
            ranks.decide(lambda: self._finish(step, partial, name, sums, rest, ranks.count))
        except (Exception, dcp.CheckpointException) as failed:  # the latter is none of the former
            if ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(failed, (OSError, dcp.CheckpointException)):
                raise CheckpointError(self._not_written(step, _first(failed))) from failed
            raise
        return name

    def _begin(self, step: int) -> tuple[str, str]:
        if (self.folder / ".metadata").exists():
            raise CheckpointError(f"{self.folder} is a checkpoint itself: give Checkpoints a folder of its own")
        stored = self.steps
        if stored and step < stored[-1]:
            raise CheckpointError(
                f"step {step} would come after step {stored[-1]}, which {self.folder} already has: load() first to go "
                "on from there, or give another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".step-*.partial"):  # of a job that was killed
            shutil.rmtree(left)
        again = stored.count(step)
        name = self.folder / (f"step-{step:08d}" + (f".{again}" if again else ""))
        partial = self._hidden(name)
        partial.mkdir()
        return str(name), str(partial)

    def _finish(self, step: int, partial: Path, name: Path, sums: dict[str, Any], rest: Any, ranks: int) -> None:
        replace_file(partial / REST, pickle.dumps(rest))
        sums |= {each: sum_of(partial / each) for each in (REST, ".metadata")}
        about = {"format": FORMAT, "step": step, "ranks": ranks, "torch": torch.__version__, "files": sums}
        replace_file(partial / ABOUT, sealed(about))
        name_folder(partial, name)
        self._forget_old()

    def _forget_old(self) -> None:
        old = sorted(self._complete())[: -self.keep] if self.keep else []
        for _, _, path in old:  # out of the way first: what is half deleted must not look like a checkpoint
            try:
                path.rename(self._hidden(path))
            except OSError as failed:
                warnings.warn(f"{path} cannot be removed ({failed.strerror}); it stays", stacklevel=5)
            else:
                shutil.rmtree(self._hidden(path), ignore_errors=True)

    def _hidden(self, name: Path) -> Path:
        return name.with_name(f".{name.name}.partial")

    def _not_written(self, step: int, why: str) -> str:
        try:
            stored = self.steps
        except OSError:  # the folder itself cannot be read
            stored = []
        kept = f"step {stored[-1]} is still there" if stored else "there is none yet"
        return f"the checkpoint of step {step} could not be written to {self.folder}; {kept}\n  {why}"

    # --- load --------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any]) -> int | None:
        """Make `state` what it was when the latest checkpoint was saved; returns its step, or None where none is."""
        ranks = Together(self.group)
        parts, wrong = _parts(state)
        found = ranks.decide(self._choose)
        if found is None:
            if problems := sorted({p for each in ranks.gather(wrong) for p in each}):
                raise OptionError("cannot be loaded later:\n  " + "\n  ".join(problems))
            return None
        path, about = Path(found[0]), found[1]
        try:
            names = sorted(about["files"])[ranks.rank :: ranks.count]
            ranks.each(lambda: unchanged(path, about["files"], names))
            rest = _unpickled(path / REST, lambda: pickle.loads((path / REST).read_bytes()))
            stored = _unpickled(path / ".metadata", dcp.FileSystemReader(path).read_metadata).state_dict_metadata
        except (Damaged, OSError) as damage:
            raise CheckpointError(f"{damage}{self._older()}") from damage
        targets, lacking, left = _targets(state, parts, rest, stored)
        said = ranks.gather((wrong + lacking, left))
        problems = sorted({p for each, _ in said for p in each})
        nobodys = sorted(set.intersection(*(set(keys) for _, keys in said)))
        problems += [f"{key} is stored, and nothing here takes it" for key in nobodys]
        if problems:
            raise CheckpointError(_of_another(path, problems))
        try:
            _read(targets, path, ranks)
        except dcp.CheckpointException as failed:
            raise CheckpointError(f"{path} cannot be read: {_first(failed)}") from failed
        for name, value in state.items():
            value = _bare(value)
            tree = _overlaid(parts[name].rest, rest[name], targets) if _knows_itself(value) else rest[name]
            value.load_state_dict(_filled(tree, targets))
        return int(about["step"])

    def _choose(self) -> tuple[str, dict[str, Any]] | None:
        if (self.folder / ".metadata").exists():
            raise CheckpointError(
                f"{self.folder} is a checkpoint itself, not a folder of them: "
                "torch.distributed.checkpoint.load reads it"
            )
        path = self.latest
        if path is None:
            return None
        try:
            owner = self.folder.stat().st_uid
            for each in (path, *path.iterdir()):
                if foreign(found := each.lstat()) and found.st_uid != owner:
                    raise CheckpointError(
                        f"{each} belongs to another user than {self.folder}, and loading it would run what that user "
                        "has put there: copy it if you trust it"
                    )
            if (format := read_json(path / ABOUT, dict).get("format")) != FORMAT:
                raise CheckpointError(f"{path} has format {format}, and this version of turbogr reads {FORMAT}")
            return str(path), read_sealed(path / ABOUT)
        except (OSError, Damaged) as error:
            raise CheckpointError(f"{path} was not written by turbogr, or lost its {ABOUT}{self._older()}") from error

    def _older(self) -> str:
        others = self.steps[:-1]
        return f"; remove it to go on from step {others[-1]}" if others else "; there is no older one"


# --- states as tensors and the rest --------------------------------------------------------------------


class At(NamedTuple):
    """Stands for a tensor in the rest of a state."""

    key: str


class _Part(NamedTuple):
    rest: Any
    tensors: dict[str, Tensor]


def _parts(state: Mapping[str, Any]) -> tuple[dict[str, _Part], list[str]]:
    """States by name, and what is wrong with the others: all ranks must hear of that, not only this one."""
    parts, wrong = {}, []
    for name, value in state.items():
        tensors: dict[str, Tensor] = {}
        value = _bare(value)
        if not name.isidentifier():
            wrong.append(f"{name!r} is not a name: use letters, digits and underscores")
        elif not callable(getattr(value, "state_dict", None)) or not callable(getattr(value, "load_state_dict", None)):
            wrong.append(f"{name!r} is a {type(value).__name__}, without state_dict() and load_state_dict()")
        else:
            try:
                rest = _split(value.state_dict(), name, tensors)
                pickle.dumps(rest)
                parts[name] = _Part(rest, tensors)
            except Exception as error:
                wrong.append(f"{name!r}: {type(error).__name__}: {error}")
    return parts, wrong


def _bare(value: Any) -> Any:
    """Without the wrappers of torch.compile and DDP, which put a prefix before every name."""
    while isinstance(value, nn.Module):
        inner = getattr(value, "_orig_mod", None)
        if isinstance(value, nn.parallel.DistributedDataParallel):
            inner = value.module
        if inner is None:
            break
        value = inner
    return value


def _knows_itself(value: Any) -> bool:
    """What it is made of, before anything is loaded. Optimizers of torch do not: their state comes with the first step.

    Ranks may be made of different things: the rank that has the whole of a table, and the others.
    """
    return isinstance(value, (nn.Module, RowOptimizer))


def _split(tree: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        if key in tensors:
            raise OptionError(f"two of its tensors have the name {key!r}")
        tensors[key] = tree
        return At(key)
    if isinstance(tree, Mapping):
        return {k: _split(v, f"{key}.{k}", tensors) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_split(v, f"{key}.{i}", tensors) for i, v in enumerate(tree))
    return tree


def _filled(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(rest, At):
        return tensors[rest.key]
    if isinstance(rest, dict):
        return {k: _filled(v, tensors) for k, v in rest.items()}
    if type(rest) in (list, tuple):
        return type(rest)(_filled(v, tensors) for v in rest)
    return rest


def _overlaid(mine: Any, stored: Any, tensors: Mapping[str, Tensor]) -> Any:
    """This rank's tensors, and whatever else is stored."""
    if isinstance(mine, dict) and isinstance(stored, dict):
        return {k: _overlaid(mine[k], stored[k], tensors) if k in stored else mine[k] for k in mine}
    return mine if isinstance(mine, At) else stored


def _keys(rest: Any) -> Iterator[str]:
    if isinstance(rest, At):
        yield rest.key
    elif isinstance(rest, (dict, list, tuple)):
        for value in rest.values() if isinstance(rest, dict) else rest:
            yield from _keys(value)


def _targets(
    state: Mapping[str, Any], parts: Mapping[str, _Part], rest: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Tensors to read into, what is lacking for them, and what is stored and not read here."""
    targets: dict[str, Tensor] = {}
    lacking = [f"nothing is stored for {name!r}" for name in state if name not in rest]
    for name in (n for n in parts if n in rest):
        own = parts[name].tensors
        if _knows_itself(_bare(state[name])):
            targets |= own
            lacking += [text for key, x in own.items() if (text := _difference(key, x, stored.get(key)))]
        else:
            targets |= {
                key: own[key] if key in own and not _difference(key, own[key], stored[key]) else _empty(stored[key])
                for key in _keys(rest[name])
            }
    return targets, lacking, [key for key in stored if key not in targets]


def _difference(key: str, mine: Tensor, stored: Any) -> str:
    if not isinstance(stored, TensorStorageMetadata):
        return f"{key} is not stored"
    here, there = (tuple(mine.shape), mine.dtype), (tuple(stored.size), stored.properties.dtype)
    return f"{key} is {there[1]} {there[0]} there, and {here[1]} {here[0]} here" if here != there else ""


def _empty(stored: Any) -> Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _of_another(path: Path, problems: list[str]) -> str:
    shown = problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])
    order = any(ORDER in p for p in problems)
    hint = "\n  a plan must keep the order of rows ('block' or 'hash') that the table was saved with" if order else ""
    return f"{path} is of another model, optimizer or plan than the one here:\n  " + "\n  ".join(shown) + hint


# --- torch.distributed.checkpoint ----------------------------------------------------------------------


def _written(tensors: dict[str, Any], path: Path, ranks: Together) -> Any:
    # Of equal tensors the first rank's is taken: should they differ, it is at least known whose is stored.
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer = dcp.FileSystemWriter(path, overwrite=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is known
        return dcp.save(
            tensors, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=not ranks.many
        )


def _read(tensors: dict[str, Any], path: Path, ranks: Together) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), process_group=ranks.group, no_dist=not ranks.many)


def _sums(folder: Path, names: list[str], ranks: Together) -> dict[str, list[int]]:
    """Of all these files, which the ranks have written; each reads some."""

    def some() -> dict[str, list[int]]:
        return {name: sum_of(folder / name) for name in names[ranks.rank :: ranks.count]}

    try:
        return {name: each for part in ranks.each(some) for name, each in part.items()}
    except FileNotFoundError as absent:
        raise CheckpointError(
            f"{absent.filename} is not here, which another rank wrote: the folder must be on a file system that all "
            "nodes share"
        ) from absent


def _unpickled(path: Path, read: Callable[[], Any]) -> Any:
    """What is in order may still name classes that are not here."""
    with reading(path):
        try:
            return read()
        except (pickle.UnpicklingError, EOFError, ImportError) as error:
            raise Damaged(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def _first(failed: BaseException) -> str:
    if not isinstance(failed, dcp.CheckpointException):
        return str(failed)
    rank, (error, _) = next(iter(failed.failures.items()))
    return f"rank {rank}: {type(error).__name__}: {error}"
