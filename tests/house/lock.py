"""What `make setup LOCKED=1` installs: versions and hashes of all that development needs.

    python tests/house/lock.py            # writes requirements-dev.lock from what is installed
    python tests/house/lock.py --check    # whether it covers what pyproject.toml declares

Hashes are those of every file of a version that the index of this machine's pip has, so that the lock serves every
platform. torch is not in it: which build of it there is depends on the machine, and pip is told its version exactly.
"""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-dev.lock"
EXTRAS = ("dev", "cli", "test", "sim")
APART = {"torch", "turbogr"}
HEAD = """\
# Written by tests/house/lock.py. Everything that development needs but torch:
#   pip install "torch==2.13.0" && pip install --no-deps --require-hashes --only-binary=:all: -r requirements-dev.lock
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(root: str, extras: tuple[str, ...], follows: Callable[[str], bool] = lambda name: True) -> Iterator[str]:
    """Names of what a package needs here, itself included, by way of others too, as far as they are followed."""
    from packaging.requirements import Requirement

    seen, waiting = set(), [(root, extras)]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        yield name
        if name not in APART and not follows(name):
            continue
        try:
            requirements = distribution(name).requires or ()
        except PackageNotFoundError:
            raise SystemExit(f"{name} is needed and not installed: make setup first") from None
        for text in requirements:
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
                waiting.append((normal(one.name), tuple(sorted(one.extras))))


def locked() -> dict[str, tuple[str, list[str]]]:
    """Versions and hashes by name."""
    found: dict[str, tuple[str, list[str]]] = {}
    for entry in re.split(r"\n(?=\S)", LOCK.read_text().partition("\n\n")[2]):
        if pinned := re.match(r"([\w.-]+)==(\S+)", entry):
            found[pinned[1]] = (pinned[2], re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
    return found


def index() -> str:
    from pip._internal.models.index import PyPI

    said = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True)
    return said.stdout.decode().strip() or PyPI.simple_url


def hashes(name: str, version: str) -> list[str]:
    request = urllib.request.Request(f"{index().rstrip('/')}/{name}/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        page = answer.read().decode()
    wheel = rf"{name.replace('-', '[-_.]+')}-{re.escape(version)}-[^/\"#]*\.whl"
    return sorted(set(re.findall(rf"/{wheel}#sha256=([0-9a-f]{{64}})", page, re.IGNORECASE)))


def main() -> int:
    if "--check" in sys.argv:
        have = locked()
        # What a newer version than the locked one asks for is not the lock's business.
        known = needed("turbogr", EXTRAS, lambda name: name not in have or distribution(name).version == have[name][0])
        absent = sorted(set(known) - APART - have.keys())
        sys.stdout.write(f"{len(have)} versions, not locked: {', '.join(absent) or 'none'}\n")
        return bool(absent)
    entries = []
    for name in sorted(set(needed("turbogr", EXTRAS)) - APART):
        version = distribution(name).version
        found = hashes(name, version)
        if not found:
            raise SystemExit(f"the index has no wheel of {name}=={version}")
        entries.append(" \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in found)]))
    LOCK.write_text(HEAD + "\n" + "\n".join(entries) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
