"""The folder of a run: what reports read. A killed run leaves it readable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..files import read_json, read_text, replace_file

FORMAT = 1


class RunFolder:
    """run.json, steps.jsonl, evals.jsonl, summary.json. Only the first rank writes."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        if writes:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OptionError(f"cannot write the run to {path}: {error.strerror}") from error

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def begun(self) -> bool:
        return (self.path / "run.json").exists()

    def write(self, name: str, value: dict[str, Any]) -> None:
        if self.writes:
            replace_file(self.path / name, json.dumps(value, indent=1) + "\n")

    def append(self, name: str, value: dict[str, Any]) -> None:
        if self.writes:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self.path / name, dict)
        except (OSError, ValueError) as error:
            raise OptionError(f"{self.path} holds no run to go on with: {name}: {error}") from error

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All complete lines; a killed run may have left half of one."""
        path, found = self.path / name, []
        for text in read_text(path, errors="replace").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                break
            if not isinstance(line, dict) or type(line.get("step")) is not int:
                break
            found.append(line)
        return found

    def go_back_to(self, step: int) -> None:
        """Forget steps that are done again: those after the checkpoint that a run goes on from."""
        for name in ("steps.jsonl", "evals.jsonl"):
            kept = [line for line in self.lines(name) if line["step"] <= step]
            if self.writes:
                replace_file(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))

    def clear(self, data: bool) -> None:
        """Begin anew; generated data of other settings, too, must not stay."""
        for name in ("run.json", "steps.jsonl", "evals.jsonl", "summary.json"):
            if self.writes:
                (self.path / name).unlink(missing_ok=True)
        if data and self.writes:
            shutil.rmtree(self.path / "data", ignore_errors=True)
