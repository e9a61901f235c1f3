"""Checkpoints of one process: exact, complete or not there, and clear about what cannot be loaded.

Those of several ranks are tested in tests/distributed/test_elastic.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from turbogr_compile import CheckpointError, Checkpoints, OptionError, random_state
from turbogr_compile.runtime import checkpoint as checkpointing
from turbogr_compile.runtime import draws

HERE = Path(__file__).parent


class Counter:
    """Something with a state of its own kind."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return dict(self.state)

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = net(torch.randint(0, 7, (5,))).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD([{"params": list(p), "lr": 0.3}], lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_to_the_last_bit(tmp_path, kind: str):
    """Losses, parameters, statistics and moments, with dropout and random batches."""
    net = model()
    optimizer = OPTIMIZERS[kind](net.parameters())
    for _ in range(3):
        step(net, optimizer)
    Checkpoints(tmp_path).save(3, {"model": net, "dense": optimizer, "random": random_state()})
    wanted = [step(net, optimizer) for _ in range(4)]

    fresh = model(9)
    other = OPTIMIZERS[kind](fresh.parameters())
    assert Checkpoints(tmp_path).load({"model": fresh, "dense": other, "random": random_state()}) == 3
    assert [step(fresh, other) for _ in range(4)] == wanted
    for (name, a), b in zip(net.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert a.equal(b), name


def test_every_leaf_comes_back_as_it_was(tmp_path):
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]
    state = {
        "tensors": [torch.arange(3).to(d) for d in dtypes] + [torch.zeros(0, 4), torch.tensor(5)],
        "pair": (1, torch.tensor([float("nan"), -0.0])),
        "plain": {3: "int keys", "none": None, "empty": {}, "list": [1, 2.5], "array": np.arange(2)},
        "view": torch.arange(12).view(3, 4).t()[1:],
    }
    counter = Counter()
    Checkpoints(tmp_path).save(0, {"counter": Counter(**state)})
    assert Checkpoints(tmp_path).load({"counter": counter}) == 0
    found = counter.state
    for a, b in zip(found["tensors"], state["tensors"], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    assert found["pair"][0] == 1 and found["pair"][1].view(torch.int32).equal(state["pair"][1].view(torch.int32))
    assert found["view"].equal(state["view"]) and type(found["pair"]) is tuple
    assert found["plain"].pop("array").tolist() == [0, 1]
    assert found["plain"] == {3: "int keys", "none": None, "empty": {}, "list": [1, 2.5]}


def test_random_numbers_go_on(tmp_path):
    draws.load_state_dict({"seed": torch.initial_seed(), "calls": {"a graph": 5}})
    Checkpoints(tmp_path).save(1, {"random": random_state()})
    wanted = random.random(), np.random.rand(), torch.rand(3).tolist(), torch.initial_seed()
    torch.manual_seed(wanted[3] + 1)
    random.seed(1), np.random.seed(1)
    draws.load_state_dict({"seed": torch.initial_seed(), "calls": {}})
    Checkpoints(tmp_path).load({"random": random_state()})
    assert draws.state_dict()["calls"]["a graph"] == 5
    assert (random.random(), np.random.rand(), torch.rand(3).tolist(), torch.initial_seed()) == wanted
    draws.load_state_dict({"seed": torch.initial_seed(), "calls": {}})


def test_names_do_not_depend_on_wrappers(tmp_path):
    net = model()
    compiled = torch.compile(net, backend="eager")
    Checkpoints(tmp_path).save(1, {"model": compiled})
    fresh = model(9)
    Checkpoints(tmp_path).load({"model": fresh})
    assert fresh[0].weight.equal(net[0].weight)


def test_torch_reads_them_too(tmp_path):
    net = model()
    where = Checkpoints(tmp_path).save(1, {"model": net})
    wanted = {"model": {k: torch.zeros_like(v) for k, v in net.state_dict().items()}}
    torch.distributed.checkpoint.load(wanted, checkpoint_id=where, no_dist=True)
    assert wanted["model"]["0.weight"].equal(net[0].weight)


def test_the_last_ones_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder", keep=2)
    assert checkpoints.load({"counter": Counter()}) is None and checkpoints.latest is None
    for number in (1, 5, 12, 12):
        checkpoints.save(number, {"counter": Counter(step=number, x=torch.tensor(number))})
    assert checkpoints.steps == [12, 12] and checkpoints.latest.name == "step-00000012.1"
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-00000012", "step-00000012.1"]
    assert Checkpoints(checkpoints.folder, keep=None).save(13, {"counter": Counter()}).name == "step-00000013"
    assert checkpoints.steps == [12, 12, 13]


@pytest.mark.parametrize("steps", [[1], [1, 2, 3]])
def test_a_save_that_is_killed_leaves_the_one_before(tmp_path, steps: list[int]):
    """At any operation on files, of the first save and of one that also removes an old checkpoint."""
    command = [sys.executable, str(HERE / "killed_saver.py"), str(tmp_path), json.dumps(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    before = steps[-2] if steps[1:] else None
    assert len(found) > 8 and found[-1]["code"] == 0
    assert all(each["code"] == -signal.SIGKILL for each in found[:-1])
    assert all(each["exact"] and each["resumed"] and each["left"] == [] for each in found), found
    reached = [each["step"] for each in found]
    assert set(reached) <= {before, steps[-1]} and reached[0] == before and reached[-1] == steps[-1]
    committed = reached.index(steps[-1])
    assert all(step == steps[-1] for step in reached[committed:])  # there is one moment when it begins to exist


# --- what cannot be loaded -----------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path) -> Path:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"model": model(), "counter": Counter()})
    checkpoints.save(4, {"model": model(), "counter": Counter()})
    return tmp_path


def refusal(folder: Path, **state) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder).load(state or {"model": model(), "counter": Counter()})
    return str(caught.value)


def test_another_model(stored):
    larger = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    text = refusal(stored, model=larger, counter=Counter())
    assert "of another model" in text and "step-00000004" in text
    assert "model.0.weight is torch.float32 (7, 4) there, and torch.float32 (8, 4) here" in text
    assert "model.3.bias is not stored" in text
    text = refusal(stored, model=nn.Sequential(nn.Embedding(7, 4)), counter=Counter())
    assert "model.1.weight is stored, and nothing here takes it" in text
    assert "torch.float64 (7, 4) here" in refusal(stored, model=model().double(), counter=Counter())
    assert "nothing is stored for 'rows'" in refusal(stored, model=model(), counter=Counter(), rows=Counter())


def test_nothing_changes_when_it_is_refused(stored):
    net = model(9)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    refusal(stored, model=net, counter=Counter(), rows=Counter())
    assert all(v.equal(before[k]) for k, v in net.state_dict().items())


def test_damage(stored):
    latest = Checkpoints(stored).latest
    data = next(latest.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-10])
    text = refusal(stored)
    assert f"damaged: {data.name} has {len(whole) - 10} bytes of {len(whole)}" in text
    assert "remove it to go on from step 3" in text
    data.unlink()
    assert f"{data.name} is missing" in refusal(stored)
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"{data.name} is not as it was written" in refusal(stored)
    data.unlink()
    (latest / "about.json").unlink()
    assert "was not written by turbogr" in refusal(stored)


def test_foreign_folders(stored, tmp_path):
    latest = Checkpoints(stored).latest
    assert "is a checkpoint itself" in refusal(latest)
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        Checkpoints(latest).save(1, {"counter": Counter()})
    about = json.loads((latest / "about.json").read_text())
    (latest / "about.json").write_text(json.dumps({**about, "format": 99}))
    assert "has format 99" in refusal(stored)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("something else")
    assert Checkpoints(tmp_path / "other").load({"counter": Counter()}) is None


def test_a_job_that_forgot_to_load_does_not_overwrite(stored):
    with pytest.raises(CheckpointError, match=r"step 1 would come after step 4.*load\(\) first"):
        Checkpoints(stored).save(1, {"counter": Counter()})


def test_what_has_no_state(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(OptionError, match="'step' is a int, without state_dict"):
        checkpoints.save(1, {"step": 3})
    with pytest.raises(OptionError, match="is not a name"):
        checkpoints.save(1, {"my.model": Counter()})
    with pytest.raises(OptionError, match=r"'counter': .*lambda"):
        checkpoints.save(1, {"counter": Counter(f=lambda: 0)})
    with pytest.raises(OptionError, match=r"two of its tensors have the name 'counter\.a\.b'"):
        checkpoints.save(1, {"counter": Counter(**{"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})})
    with pytest.raises(OptionError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)
    assert checkpoints.latest is None and list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": model()})
    before = sorted(tmp_path.iterdir())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.distributed.checkpoint.FileSystemWriter, "write_data", full)
    with pytest.raises(
        CheckpointError, match=r"step 2 could not be written(.|\n)*step 1 is still there(.|\n)*No space"
    ):
        checkpoints.save(2, {"model": model()})
    assert checkpoints.steps == [1]
    assert sorted(tmp_path.iterdir()) == before


def test_a_checkpoint_that_somebody_else_put_there(tmp_path, monkeypatch):
    """Reading it would run what is in it."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"counter": Counter(n=1)})
    monkeypatch.setattr(checkpointing, "foreign", lambda found: True)
    assert checkpoints.load({"counter": Counter()}) == 1  # whoever owns the folder was chosen with it
    real = Path.lstat
    stranger = SimpleNamespace(st_uid=12345)
    for name in ("step-00000001", "rest.pickle", ".metadata"):
        monkeypatch.setattr(Path, "lstat", lambda path, name=name: stranger if path.name == name else real(path))
        with pytest.raises(CheckpointError, match=f"{name} belongs to another user than {tmp_path}"):
            checkpoints.load({"counter": Counter()})


def test_metadata_of_another_torch(tmp_path, monkeypatch):
    """It is as it was written, and names what is not here."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": nn.Linear(2, 3)})

    def read_metadata(reader):
        raise AttributeError("module has no attribute 'TensorStorageMetadata2'")

    monkeypatch.setattr(checkpointing.dcp.FileSystemReader, "read_metadata", read_metadata)
    with pytest.raises(CheckpointError, match=r"step-00000001/.metadata is damaged, or of another version"):
        checkpoints.load({"model": nn.Linear(2, 3)})


def test_an_old_one_that_cannot_be_removed_is_no_failure(tmp_path, monkeypatch):
    checkpoints, real = Checkpoints(tmp_path, keep=1), os.rename
    checkpoints.save(1, {"counter": Counter(n=1)})

    def rename(source, target):
        if Path(source).name == "step-00000001":
            raise PermissionError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.warns(UserWarning, match=r"step-00000001 cannot be removed \(Permission denied\); it stays"):
        checkpoints.save(2, {"counter": Counter(n=2)})
    assert checkpoints.steps == [1, 2]
