"""`turbogr doctor --fetch-torchair`: torchair for the simulator, without an installed torch_npu.

An installed torch_npu makes `import torch` fail on a machine without CANN. So its wheel is unpacked into turbogr's
cache, where nothing imports it by itself.

What is unpacked will be imported, so only wheels that are known by their hash are; source distributions, which run code
while they are built, never are. Nothing of the wheel runs here: pip downloads it, and a zip file is unpacked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from ...errors import TurbogrError
from ...files import make_private, obstacle
from ...kernels.cpu.cache import Refused, user_folder

# By release of torch: the version, and SHA-256 of its wheels for Linux (CPython 3.10 to 3.13, aarch64 and x86_64).
WHEELS = {
    "2.13": (
        "2.13.0",
        (
            "da6b7785ce005a5459308ad7c88104a5739865d6f23d453dd53ff967c7e17200",
            "3084a5ebdab53d45acbbf3154f7cb45d1e00c463b76f0b9b2149b96c1f12ba67",
            "d0e64a90b3e640b0274511e47c65284d3a7dedae5f6ad2b95d91de12ff9a29ff",
            "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0",
            "ebb895735bf3c347e8c971c3f9083bb5ec032a1b139876ce019f03ee408d81fa",
            "f27cf44167b6e0a4b8cf82097c688d2bf532edf503d3e5d6a7ced80a7e759ea6",
            "359a055deaf9b94de35ffadff2e68e9fb4a3b3576796ed3617e85d16a42df259",
            "20441bfb56c4054a427560ff413fa033db921b993e06c3d67d0f7edc23d40513",
        ),
    ),
}
PACKAGE = PurePosixPath("torch_npu/dynamo/torchair/npu_fx_compiler.py")
MOST_BYTES = 2 << 30  # of what a wheel holds
BY_HAND = "unpack a torch_npu wheel that you trust, and name its folder in TURBOGR_TORCHAIR"


def fetch_torchair() -> Path:
    """The folder it was unpacked into; pip's own settings say from where it comes, the hash says what it is."""
    from .load import release

    if release() not in WHEELS:
        raise TurbogrError(f"no wheel of torch_npu is known by its hash for torch {release()}: {BY_HAND}")
    version, hashes = WHEELS[release()]
    folder = _folder()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        wheel = _downloaded(version, hashes, Path(place))
        unpacked = Path(place) / "torchair"
        _unpack(wheel, unpacked)
        return _put(unpacked, folder / "torchair", Path(place))


def _folder() -> Path:
    try:
        folder = user_folder()
    except Refused as reason:
        raise TurbogrError(f"{reason}: name a folder of your own in TURBOGR_CACHE_DIR") from None
    if reason_against := obstacle(folder):
        raise TurbogrError(f"{reason_against}: name a folder of your own in TURBOGR_CACHE_DIR")
    make_private(folder)
    return folder


def _downloaded(version: str, hashes: tuple[str, ...], place: Path) -> Path:
    """The wheel for this machine, as it is known."""
    wanted = place / "wanted.txt"
    wanted.write_text(" ".join([f"torch_npu=={version}", *(f"--hash=sha256:{h}" for h in hashes)]) + "\n")
    strict = ("--no-deps", "--only-binary=:all:", "--require-hashes")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *strict]
    command += ["--dest", str(place), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise TurbogrError(f"pip cannot fetch torch_npu=={version}: {said}\n  try: {BY_HAND}")
    wheels = list(place.glob("*.whl"))
    if len(wheels) != 1:
        raise TurbogrError(f"pip has fetched {len(wheels)} wheels of torch_npu=={version}, and there should be one")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest not in hashes:
        raise TurbogrError(f"{wheels[0].name} is not the wheel that is known (SHA-256 {digest}): it is not used")
    return wheels[0]


def _unpack(wheel: Path, into: Path) -> None:
    """All of it, after a look at the names: nothing leaves the folder, and torchair is there."""
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = [PurePosixPath(name) for name in packed.namelist()]
            if any(name.is_absolute() or ".." in name.parts for name in names):
                raise TurbogrError(f"{wheel.name} names files outside of itself: it is not used")
            if PACKAGE not in names:
                raise TurbogrError(f"{wheel.name} holds no torchair ({PACKAGE}): it is not used")
            if sum(entry.file_size for entry in packed.infolist()) > MOST_BYTES:
                raise TurbogrError(f"{wheel.name} unpacks to more than {MOST_BYTES} bytes: it is not used")
            into.mkdir(mode=0o700)
            packed.extractall(into)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise TurbogrError(f"{wheel.name} is damaged: {error}") from error


def _put(unpacked: Path, target: Path, aside: Path) -> Path:
    """In place of an older one, by renaming: at no time is there half of it."""
    if target.exists():
        os.replace(target, aside / "older")
    try:
        os.replace(unpacked, target)
    except OSError:
        if (aside / "older").exists():
            os.replace(aside / "older", target)
        raise
    shutil.rmtree(aside / "older", ignore_errors=True)
    return target
