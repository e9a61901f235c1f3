"""Pass dumps on disk: numbered, complete, deterministic, safe to share.

    turbogr_dump/
      index.html               everything in one offline page
      run.json                 versions, pipeline, cache key, legend of names
      rank0/0.0-captured/      compile id and role of the graph
        000-input.txt
        003-fuse-rms-norm.txt  only passes that changed the graph; number = position in the pipeline
        003-fuse-rms-norm.diff, .json, .svg, .dot
        014-overlap.timeline.svg, .timeline.txt   when things run on which stream, by estimate
        009-ge-graph.txt       what the target was given, where it says so; a number after all passes
        summary.txt            every pass, also unchanged, skipped and failed ones, and why
        record.json            all of it as data
        repro.py               the input graph and the pipeline, runnable

Training never stops because a dump could not be written: the first failure becomes one warning, and dumping ends.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..files import foreign, read_json, replace_file
from ..graph.text import diff_text
from ..pipeline.cache_key import cache_key
from ..pipeline.instrument import GraphRun, Step
from ..pipeline.options import Options
from ..pipeline.remarks import Remark, warn
from ..registry import version_of
from . import diagram
from .record import snapshot_text
from .recording import UnobtrusiveRecording, add_lowered
from .report import step_header, summary_text
from .reproduce import repro_source
from .timeline import timeline_svg
from .view import write_view

FORMAT = 1
LEGEND = (
    "rank<r>/<frame>.<compile>-<role>/<number>-<pass>.<kind>: frame and compile are Dynamo's, role is captured (before "
    "autograd), joint, forward, backward or inference, number is the pass's position in the pipeline, 000 the graph as "
    "it arrived."
)


class Dump(UnobtrusiveRecording):
    """Records every graph and writes it when its passes are done, or when one of them failed."""

    def __init__(self, directory: Path, options: Options) -> None:
        super().__init__()
        self.options = options
        self.directory = open_directory(directory.absolute(), _rank(), os.getpid())
        self.refusal = self.directory.refusal

    def give_up(self, reason: str) -> None:
        self.refusal = reason
        self.directory.give_up(reason)

    def start(self, run: GraphRun) -> None:
        super().start(run)
        # The passes edit the graph in place; a reproduction starts from the graph as it arrived.
        self._repro = self.guarded(lambda: repro_source(run)) or ""

    def failed(self, run: GraphRun, step: Step, error: Exception) -> None:
        super().failed(run, step, error)
        if self.options.on_error == "raise":
            self._write(self.recorder.data)

    def finish(self, run: GraphRun) -> None:
        super().finish(run)
        if self.records:
            self._write(self.records.pop())

    def lowered(self, run: GraphRun, remarks: Sequence[Remark], texts: Mapping[str, str]) -> None:
        self.guarded(lambda: self.directory.add(run.name, remarks, texts))

    def _write(self, record: dict[str, Any]) -> None:
        self.guarded(lambda: self.directory.write(record, self._repro, self.options))


@lru_cache(maxsize=64)
def open_directory(root: Path, rank: int, process: int) -> DumpDirectory:
    """One object per directory and process: it knows which files are its own."""
    directory = DumpDirectory(root, rank)
    directory.prepare()
    return directory


class DumpDirectory:
    def __init__(self, root: Path, rank: int) -> None:
        self.root, self.rank = root, rank
        self.folder = root / f"rank{rank}"
        self.refusal = ""
        self.files: list[str] = []
        self.names: Counter[str] = Counter()
        self.last = ""

    def prepare(self) -> None:
        """Make the directory ours, or say why not; removes only files an earlier run listed as its own."""
        try:
            if self.root.exists() and not self.root.is_dir():
                return self.give_up(f"{self.root} is a file")
            if self.root.is_dir() and foreign(self.root.stat()):
                return self.give_up(f"{self.root} belongs to another user")
            if self.root.is_dir() and any(self.root.iterdir()) and not _is_ours(self.root):
                return self.give_up(
                    f"{self.root} holds files that turbogr did not write; name a new or an empty directory"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            if foreign(self.folder.lstat()) or self.folder.is_symlink():
                return self.give_up(f"{self.folder} belongs to another user, or leads elsewhere")
            self._remove_earlier()
        except OSError as error:
            self.give_up(f"{error.strerror or error} ({error.filename or self.root})")
        except ValueError as error:
            self.give_up(f"{error} ({str(self.root)!r})")

    def give_up(self, reason: str) -> None:
        self.refusal = reason
        warn(f"no pass dumps: {reason}; training goes on")

    def write(self, record: dict[str, Any], repro: str, options: Options) -> None:
        self._file(self.root / "run.json", json.dumps(run_facts(options), indent=1, sort_keys=True), listed=False)
        if record["graph"] != self.last:  # else Dynamo started over: this is the same graph again
            self.names[record["graph"]] += 1
        self.last = record["graph"]
        again = self.names[record["graph"]]
        if again > 1:  # Dynamo was reset: ids start over
            record = record | {"graph": f"{record['graph']}-{again}"}
        folder = self.folder / record["graph"]
        folder.mkdir(parents=True, exist_ok=True)
        last = ""
        for step in record["steps"]:
            if step["status"] not in ("input", "changed", "failed"):
                continue
            stem = f"{step['number']:03d}-{step['name']}"
            body = snapshot_text(record, step["snapshot"])
            self._file(folder / f"{stem}.txt", step_header(record, step) + body)
            if step["status"] == "changed":
                self._file(folder / f"{stem}.diff", diff_text(last, body))
                self._file(folder / f"{stem}.json", json.dumps(step_facts(record, step), indent=1))
                self._file(folder / f"{stem}.svg", diagram.region_svg(record, record["steps"].index(step)))
                self._file(folder / f"{stem}.dot", diagram.region_dot(record, record["steps"].index(step)))
            last = body
        for step in record["steps"]:
            for name, text in step.get("notes", {}).items():
                self._file(folder / f"{step['number']:03d}-{step['name']}.{name}.txt", text)
            if "timeline" in step:
                self._file(folder / f"{step['number']:03d}-{step['name']}.timeline.svg", timeline_svg(step["timeline"]))
        self._file(folder / "repro.py", repro)
        self._write_end(folder, record)

    def add(self, graph: str, remarks: Sequence[Remark], texts: Mapping[str, str]) -> None:
        """What the target says of a graph that is written already."""
        folder = self.folder / (graph if self.names[graph] < 2 else f"{graph}-{self.names[graph]}")
        if not (folder / "record.json").is_file():
            return
        record = read_json(folder / "record.json", dict)
        add_lowered(record, remarks, texts)
        for name, text in texts.items():
            self._file(folder / f"{len(record['steps']):03d}-{name}.txt", text)
        self._write_end(folder, record)

    def _write_end(self, folder: Path, record: dict[str, Any]) -> None:
        self._file(folder / "summary.txt", summary_text(record))
        self._file(folder / "record.json", json.dumps(record, separators=(",", ":")))
        self._file(self.folder / "files.json", json.dumps(sorted(set(self.files))), listed=False)
        write_view(self.root)

    def _file(self, path: Path, text: str, listed: bool = True) -> None:
        replace_file(path, text)
        if listed:
            self.files.append(path.relative_to(self.folder).as_posix())

    def _remove_earlier(self) -> None:
        listing = self.folder / "files.json"
        if not listing.is_file():
            return
        folders = set()
        for name in self._earlier(listing):
            path = self.folder / name
            # A list that was tampered with must not lead outside of our folder.
            if path.is_file() and path.resolve().is_relative_to(self.folder.resolve()):
                path.unlink()
                folders.add(path.parent)
        for folder in folders:
            if folder != self.folder and not any(folder.iterdir()):
                folder.rmdir()

    def _earlier(self, listing: Path) -> list[str]:
        """Files that an earlier run listed; they stay where the list is damaged."""
        try:
            found = read_json(listing, list)
        except ValueError as error:
            warn(f"pass dumps of an earlier run stay beside new ones: {error}")
            return []
        return [name for name in found if isinstance(name, str) and "\0" not in name]


def _is_ours(root: Path) -> bool:
    try:
        return bool(read_json(root / "run.json", dict).get("writer") == "turbogr")
    except (OSError, ValueError):
        # Several ranks start at once: another rank's folder, before its run.json, is ours too.
        return all(p.name.startswith("rank") and p.is_dir() for p in root.iterdir())


def run_facts(options: Options) -> dict[str, Any]:
    return {
        "writer": "turbogr",
        "format": FORMAT,
        "turbogr": version_of("turbogr"),
        "torch": torch.__version__,
        "pipeline": options.plan().spec,
        "key": cache_key(options),
        "options": {
            "target": options.target,
            "codegen": options.codegen,
            "verify": options.verify,
            **({"target_options": dict(options.target_options)} if options.target_options else {}),
        },
        "legend": LEGEND,
    }


def step_facts(record: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    """One pass with the nodes its rewrites removed and added; no times, so that runs can be compared."""
    ids = sorted({i for r in step["rewrites"] for i in (*r["removed"], *r["added"])})
    facts = {k: v for k, v in step.items() if k not in ("seconds", "snapshot")}
    return facts | {"nodes": {str(i): record["nodes"][i] for i in ids}}


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)
