"""`turbogr doctor --fetch-torchair`, with a stand-in for pip."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from turbogr_compile.commands import main
from turbogr_compile.errors import TurbogrError
from turbogr_compile.lowering.torchair import fetch
from turbogr_compile.lowering.torchair import load as torchair


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TURBOGR_CACHE_DIR", str(folder))
    monkeypatch.delenv("TURBOGR_TORCHAIR", raising=False)
    return folder


def pip(status: int, said: str = ""):
    """Unpacks a wheel that holds next to nothing."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command and command[-1].startswith("torch_npu==2.13.")
        if status == 0:
            package = Path(command[command.index("--target") + 1]) / "torch_npu" / "dynamo" / "torchair"
            package.mkdir(parents=True)
            (package / "npu_fx_compiler.py").touch()
        return subprocess.CompletedProcess(command, status, "", said)

    return run


def test_what_was_fetched_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetch.subprocess, "run", pip(0))
    (cache / "torchair").mkdir()  # an older one makes room
    (cache / "torchair" / "old").touch()
    folder = fetch.fetch_torchair()
    assert folder == cache / "torchair" and not (folder / "old").exists()
    assert torchair.find() == folder / "torch_npu" / "dynamo" / "torchair"
    assert [p.name for p in cache.iterdir()] == ["torchair"]


def test_what_pip_says_is_passed_on(cache: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(fetch.subprocess, "run", pip(1, "ERROR: no network\n"))
    assert main(["doctor", "--fetch-torchair"]) == 1
    assert "no network" in capsys.readouterr().err
    assert not list(cache.iterdir())


def test_a_cache_of_others_is_not_used(cache: Path):
    cache.chmod(0o777)
    with pytest.raises(TurbogrError, match="TURBOGR_CACHE_DIR"):
        fetch.fetch_torchair()
