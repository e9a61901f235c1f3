"""Every kind of file that turbogr reads: how one is made, and what reading a damaged one may end in.

`read` returns 'read', 'error' or 'made anew'. What raises is a fault: an error must be one that says which file it is
about, and what is read of a checkpoint or a cache must be what was written.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from turbogr_compile import CheckpointError, Checkpoints
from turbogr_compile.commands import main
from turbogr_compile.errors import OptionError

TESTS = Path(__file__).parents[1]


def command(*words: object) -> str:
    """What it says when something is wrong is a line of its own, and never a traceback."""
    said, shown = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8")  # as strict as a terminal
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        try:
            status = main(list(map(str, words)))
        except SystemExit as ended:  # argparse
            status = ended.code
    text = said.getvalue()
    assert status in (0, 1, 2), (words, status)
    shown.flush()
    assert "Traceback" not in text + shown.buffer.getvalue().decode(), text
    if status:
        assert [line for line in text.splitlines() if line.startswith("turbogr")] or status == 1, (words, text)
    return "error" if status else "read"


class Kind:
    files: tuple[str, ...]

    def make(self, folder: Path) -> None:
        raise NotImplementedError

    def read(self, folder: Path) -> str:
        raise NotImplementedError


class Dump(Kind):
    files = ("run.json", "rank0/*/record.json", "rank0/files.json")

    def make(self, folder: Path) -> None:
        torch._dynamo.reset()
        step = torch.compile(lambda x: (x * 2).relu().sum(), backend="turbogr", options={"dump": str(folder)})
        step(torch.ones(3, 4))
        torch._dynamo.reset()
        shutil.copytree(folder, folder.with_name("other"))

    def read(self, folder: Path) -> str:
        outcomes = {command("view", folder), command("diff", folder, folder.with_name("other"))}
        return "error" if "error" in outcomes else "read"


class Benchmark(Kind):
    files = ("bench.json",)

    def make(self, folder: Path) -> None:
        shutil.copy(TESTS / "training" / "bench_tiny.json", folder / "bench.json")

    def read(self, folder: Path) -> str:
        return command("bench", "--from", folder / "bench.json")


class Costs(Kind):
    files = ("costs.json",)

    def make(self, folder: Path) -> None:
        from turbogr_compile.simulator.calibration import SHIPPED

        shutil.copy(SHIPPED, folder / "costs.json")

    def read(self, folder: Path) -> str:
        small = ("--devices=8", "--steps=1", "--layers=1", "--variant=naive")
        return command("simulate", "--costs", folder / "costs.json", *small)


class Rates(Kind):
    """What `overlap{costs=FILE}` takes."""

    files = ("rates.json",)

    def make(self, folder: Path) -> None:
        rates = {"flops": 1e10, "bytes": 8e9, "ops": {"aten.mm": 1e-3, "aten.add": 2e-6}}
        (folder / "rates.json").write_text(json.dumps(rates))

    def read(self, folder: Path) -> str:
        from turbogr_compile.passes.schedule.costs import read_costs

        try:
            read_costs(str(folder / "rates.json"), "cpu")
        except OptionError as error:
            assert "rates.json" in str(error)
            return "error"
        return "read"


class Settings(Kind):
    """Of `turbogr train --config`; what is well-formed and wrong is named as a setting."""

    files = ("settings.json",)

    def make(self, folder: Path) -> None:
        given = {"model": "hstu", "size": "tiny", "steps": 3, "lr": 0.1, "features": ["packed"], "deterministic": True}
        (folder / "settings.json").write_text(json.dumps(given))

    def read(self, folder: Path) -> str:
        from turbogr_compile.training.config import Config, read_file

        try:
            Config.read(read_file(folder / "settings.json"))
        except OptionError as error:
            assert str(error)
            return "error"
        return "read"


class Run(Kind):
    """A run's folder, by the report and by whoever goes on with it."""

    files = ("run.json", "steps.jsonl", "evals.jsonl", "summary.json")

    def make(self, folder: Path) -> None:
        from tests.training.report_runs import write_run

        folder.rmdir()
        write_run(folder, "turbogr")

    def read(self, folder: Path) -> str:
        from turbogr_compile.training.folder import RunFolder

        outcome = command("report", folder, "--html", folder.with_name("report.html"))
        run = RunFolder(folder, writes=False)
        try:
            assert isinstance(run.read("run.json"), dict)
        except OptionError as error:
            assert "run.json" in str(error)
            outcome = "error"
        for name in ("steps.jsonl", "evals.jsonl"):
            assert all(isinstance(line["step"], int) for line in run.lines(name))
        return outcome


class Cache(Kind):
    """The same histories, always."""

    files = ("cache/*/sums.json", "cache/*/problems.json", "cache/*/*.npy")

    def make(self, folder: Path) -> None:
        from turbogr_compile.training.data import open_histories
        from turbogr_compile.training.data.kuairand import COLUMNS

        rows = [",".join(COLUMNS)]
        for user in range(20):
            for item in range(4):
                known = {"user_id": user, "video_id": item, "time_ms": 1_650_000_000_000 + item, "is_click": 1}
                rows.append(",".join(str(known.get(name, 0)) for name in COLUMNS))
        (folder / "raw").mkdir()
        (folder / "raw" / "log_standard_4_08_to_4_21_1k.csv").write_text("\n".join([*rows, "bad,row"]) + "\n")
        open_histories(folder / "raw", cache=folder / "cache")

    def read(self, folder: Path) -> str:
        from turbogr_compile.training.data import open_histories

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = open_histories(folder / "raw", cache=folder / "cache")
        wanted = open_histories(folder / "raw")
        for name in ("items", "times", "offsets", "users", "item_ids"):
            assert (getattr(found, name) == getattr(wanted, name)).all(), name
        assert found.problems.to_json() == wanted.problems.to_json()
        assert len(said) <= 1
        return "made anew" if said else "read"


class Checkpoint(Kind):
    """What was saved, or an error."""

    files = ("step-00000003/*", "step-00000003/.metadata")

    def make(self, folder: Path) -> None:
        Checkpoints(folder).save(3, self.state(3.0))

    def state(self, value: float) -> dict[str, Any]:
        model = torch.nn.Linear(5, 4)
        with torch.no_grad():
            model.weight.fill_(value), model.bias.fill_(-value)
        optimizer = torch.optim.Adam(model.parameters(), lr=value)
        model(torch.ones(5)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def read(self, folder: Path) -> str:
        here, wanted = self.state(0.0), self.state(3.0)
        try:
            assert Checkpoints(folder).load(here) == 3
        except CheckpointError as error:
            assert "step-00000003" in str(error), error
            return "error"
        assert all(torch.equal(x, wanted["model"].state_dict()[n]) for n, x in here["model"].state_dict().items())
        assert here["optimizer"].param_groups[0]["lr"] == 3.0
        return "read"


KINDS: dict[str, type[Kind]] = {
    "dump": Dump, "benchmark": Benchmark, "costs": Costs, "rates": Rates, "settings": Settings, "run": Run,
    "cache": Cache, "checkpoint": Checkpoint,
}  # fmt: skip
