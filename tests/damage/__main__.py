"""Damaged files of every kind that turbogr reads: a clear error each, or the file is made anew.

python -m tests.damage --n 2000                       # of each kind
python -m tests.damage --kind checkpoint --n 500 --first 7000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .kinds import KINDS
from .ways import version


def tried(kind: str, folder: Path, numbers: range) -> Iterator[tuple[int, str, str]]:
    """Number, file and outcome of each; what is raised is a fault, and its outcome a traceback."""
    how = KINDS[kind]()
    place = folder / kind
    place.mkdir(parents=True)
    how.make(place)
    how.read(place)
    files = sorted(path for pattern in how.files for path in place.glob(pattern))
    whole = {path: path.read_bytes() for path in files}
    for number in numbers:
        path = files[number % len(files)]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(version(whole[path], number // len(files)))
        try:
            outcome = how.read(place)
        except Exception:
            outcome = traceback.format_exc(limit=-4)
        yield number, path.name, outcome
        for each, content in whole.items():
            each.parent.mkdir(parents=True, exist_ok=True)
            each.write_bytes(content)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=2000, help="of each kind")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="of these kinds only")
    options = parser.parse_args()
    wrong = 0
    for kind in options.kind or KINDS:
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for number, name, outcome in tried(kind, Path(folder), range(options.first, options.first + options.n)):
                known = outcome in ("read", "error", "made anew")
                counts[outcome if known else "fault"] += 1
                if not known and counts["fault"] <= 3:
                    sys.stdout.write(f"{kind} {number} ({name}):\n{outcome}\n")
        wrong += counts["fault"]
        sys.stdout.write(f"{kind}: {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}\n")
        sys.stdout.flush()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
