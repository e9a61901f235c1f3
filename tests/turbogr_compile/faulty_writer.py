"""Every call to the system that writes fails in turn, and what is found afterwards. Run as a process of its own, with
faulty_io.c preloaded:

    python faulty_writer.py library folder subject [only every so many]
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from turbogr_compile import CheckpointError, Checkpoints
from turbogr_compile.errors import TurbogrError
from turbogr_compile.files import replace_file

HERE = Path(__file__).parent


def model(value: float) -> nn.Module:
    made = nn.Linear(3, 2)
    with torch.no_grad():
        made.weight.fill_(value), made.bias.fill_(-value)
    return made


class File:
    """The old one or the new one."""

    def before(self, folder: Path) -> None:
        (folder / "file").write_text("old")

    def act(self, folder: Path) -> None:
        replace_file(folder / "file", "new")

    def after(self, folder: Path, failed: Exception | None) -> None:
        assert (folder / "file").read_text() == ("old" if failed else "new")
        assert [path.name for path in folder.iterdir()] == ["file"]
        assert failed is None or isinstance(failed, OSError)


class Checkpoint:
    """The old one or both, and the next save works."""

    def before(self, folder: Path) -> None:
        Checkpoints(folder, keep=2).save(1, {"model": model(1)})
        Checkpoints(folder, keep=2).save(2, {"model": model(2)})

    def act(self, folder: Path) -> None:
        Checkpoints(folder, keep=2).save(3, {"model": model(3)})

    def after(self, folder: Path, failed: Exception | None) -> None:
        assert failed is None or (isinstance(failed, CheckpointError) and "step 2 is still there" in str(failed)), (
            failed
        )
        for step in (2 if failed else 3, 4):
            here = model(0)
            assert Checkpoints(folder).load({"model": here}) == step
            assert here.weight.eq(step).all() and here.bias.eq(-step).all()
            if step != 4:
                Checkpoints(folder).save(4, {"model": model(4)})
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]


class Dump:
    """Whatever happens, the numbers come, and what is there can be read."""

    def before(self, folder: Path) -> None:
        torch._dynamo.reset()

    def act(self, folder: Path) -> None:
        step = torch.compile(lambda x: (x * 2).relu().sum(), backend="turbogr", options={"dump": str(folder / "dump")})
        assert step(torch.ones(3, 4)).item() == 24

    def after(self, folder: Path, failed: Exception | None) -> None:
        assert failed is None, failed
        for path in folder.rglob("*.json"):
            json.loads(path.read_text())
        assert not list(folder.rglob("*.partial"))


class Cache:
    """The histories, or an error that names a file; afterwards the histories."""

    def before(self, folder: Path) -> None:
        from turbogr_compile.training.data.kuairand import COLUMNS

        (folder / "raw").mkdir()
        rows = [",".join(COLUMNS)]
        for user in range(40):
            for item in range(5):
                known = {"user_id": user, "video_id": item, "time_ms": 1_650_000_000_000 + item, "is_click": 1}
                rows.append(",".join(str(known.get(name, 0)) for name in COLUMNS))
        (folder / "raw" / "log_standard_4_08_to_4_21_1k.csv").write_text("\n".join(rows) + "\n")

    def act(self, folder: Path) -> None:
        from turbogr_compile.training.data import open_histories

        self.found = open_histories(folder / "raw", cache=folder / "cache")

    def after(self, folder: Path, failed: Exception | None) -> None:
        assert failed is None or (isinstance(failed, OSError) and failed.errno), repr(failed)
        self.act(folder)
        assert len(self.found.items) == 200
        assert [path.name for path in (folder / "cache").iterdir() if path.name.startswith(".")] == []


class Run:
    """It ends, or stops with a message; what is there can be read, and it goes on from there."""

    def act(self, folder: Path) -> None:
        self.train(folder, resume=False)

    def before(self, folder: Path) -> None:
        pass

    def train(self, folder: Path, resume: bool) -> None:
        from turbogr_compile.training import loop
        from turbogr_compile.training.config import Config

        config = {
            "dim": 16, "layers": 1, "max_len": 24, "batch": 8, "negatives": 16, "users": 60, "items": 50, "threads": 1,
            "mean_length": 8, "evaluate_users": 20, "steps": 3, "save_every": 2, "warmup": 2, "backend": "eager",
        }  # fmt: skip
        loop.train(Config.read(config), folder / "run", quiet=True, resume=resume)

    def after(self, folder: Path, failed: Exception | None) -> None:
        assert failed is None or (isinstance(failed, (OSError, TurbogrError)) and str(failed)), repr(failed)
        for path in (folder / "run").rglob("*.json"):
            json.loads(path.read_text())
        self.train(folder, resume=(folder / "run" / "run.json").exists())
        lines = [json.loads(line) for line in (folder / "run" / "steps.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3], lines


SUBJECTS = {"file": File, "checkpoint": Checkpoint, "dump": Dump, "cache": Cache, "run": Run}


def main(library: str, folder: str, name: str, every: int = 1) -> None:
    warnings.simplefilter("ignore")
    faults, subject = ctypes.CDLL(library), SUBJECTS[name]()
    faults.faults.restype = ctypes.c_long
    outcomes = []
    for number in range(0, 100_000, every):
        place = Path(folder).resolve() / f"{name}-{number}"
        place.mkdir(parents=True)
        faults.fault_below(str(place).encode())
        subject.before(place)
        faults.fault_after(ctypes.c_long(number))
        failed: Exception | None = None
        try:
            subject.act(place)
        except Exception as error:
            failed = error
        seen = faults.faults()
        faults.fault_after(ctypes.c_long(-1))
        try:
            subject.after(place, failed)
        except Exception as error:
            raise AssertionError(f"{name}: call {number} failed, and then: {error!r}") from (failed or error)
        shutil.rmtree(place)
        outcomes.append(type(failed).__name__)
        if seen <= number:
            break
    print(json.dumps({"sites": len(outcomes) - 1, "stopped": len(outcomes) - outcomes.count("NoneType")}))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
