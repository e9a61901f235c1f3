"""`turbogr doctor --fetch-torchair`, with a stand-in for pip."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import zipfile
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


def wheel(*names: str) -> bytes:
    """A wheel that holds next to nothing."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return packed.getvalue()


GOOD = wheel("torch_npu/dynamo/torchair/npu_fx_compiler.py", "torch_npu/__init__.py")


def pip(status: int, said: str = "", content: bytes = GOOD, count: int = 1):
    """Downloads this, whatever its hash is."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert {"--no-deps", "--only-binary=:all:", "--require-hashes"} <= set(command) and "download" in command
        assert re.match(r"torch_npu==2\.13\.0( --hash=sha256:[0-9a-f]{64})+\n$", Path(command[-1]).read_text())
        for number in range(count if status == 0 else 0):
            Path(command[command.index("--dest") + 1], f"torch_npu-{number}.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, status, "", said)

    return run


def know(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setitem(fetch.WHEELS, "2.13", ("2.13.0", (hashlib.sha256(content).hexdigest(),)))


def test_what_was_fetched_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch):
    know(monkeypatch, GOOD)
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


@pytest.mark.parametrize(
    "content, known, message",
    [
        (GOOD, False, "is not the wheel that is known"),
        (wheel("torch_npu/__init__.py"), True, "holds no torchair"),
        (wheel("../evil.py", "torch_npu/dynamo/torchair/npu_fx_compiler.py"), True, "outside of itself"),
        (wheel("/evil.py", "torch_npu/dynamo/torchair/npu_fx_compiler.py"), True, "outside of itself"),
        (GOOD[:-30], True, "is damaged"),
    ],
)
def test_a_wheel_that_is_not_the_one_is_not_used(cache: Path, monkeypatch, content, known, message):
    """And what was there before stays."""
    if known:
        know(monkeypatch, content)
    (cache / "torchair").mkdir()
    (cache / "torchair" / "old").touch()
    monkeypatch.setattr(fetch.subprocess, "run", pip(0, content=content))
    with pytest.raises(TurbogrError, match=message):
        fetch.fetch_torchair()
    assert (cache / "torchair" / "old").exists() and [p.name for p in cache.iterdir()] == ["torchair"]


def test_a_release_without_hashes_is_not_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchair, "release", lambda: "9.9")
    with pytest.raises(TurbogrError, match=r"is known by its hash for torch 9\.9"):
        fetch.fetch_torchair()


def test_a_rename_that_fails_leaves_the_older_one(cache: Path, monkeypatch: pytest.MonkeyPatch):
    know(monkeypatch, GOOD)
    monkeypatch.setattr(fetch.subprocess, "run", pip(0))
    (cache / "torchair").mkdir()
    (cache / "torchair" / "old").touch()
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(fetch.os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        fetch.fetch_torchair()
    assert (cache / "torchair" / "old").exists()


def test_a_cache_of_others_is_not_used(cache: Path):
    cache.chmod(0o777)
    with pytest.raises(TurbogrError, match="TURBOGR_CACHE_DIR"):
        fetch.fetch_torchair()
