"""`turbogr doctor --fetch-torchair`: torchair for the simulator, without an installed torch_npu.

An installed torch_npu makes `import torch` fail on a machine without CANN. So its wheel is unpacked into turbogr's
cache, where nothing imports it by itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ...errors import TurbogrError
from ...kernels.cpu.cache import Refused, obstacle, user_folder


def fetch_torchair() -> Path:
    """The folder it was unpacked into; pip's own settings say from where."""
    from .load import release

    try:
        folder = user_folder()
    except Refused as reason:
        raise TurbogrError(f"{reason}: name a folder of your own in TURBOGR_CACHE_DIR") from None
    if reason_against := obstacle(folder):
        raise TurbogrError(f"{reason_against}: name a folder of your own in TURBOGR_CACHE_DIR")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    wheel = f"torch_npu=={release()}.*"
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, wheel]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise TurbogrError(f"pip cannot fetch {wheel}: {said}\n  try: the same by hand: {' '.join(command[1:])}")
        target = folder / "torchair"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(place, target)
    target.chmod(0o700)
    return target
