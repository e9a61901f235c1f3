"""Hostile programs against the compiler: generated, judged against eager in float64, shrunk, printed.

python -m tests.fuzz run --n 1000 --seed 0       (make fuzz N=1000)
python -m tests.fuzz sweep --per 3               programs for every construct of the vocabulary
python -m tests.fuzz list --n 2000 > now.json    what is packed; `compare old.json now.json` names what was lost
"""

from .replay import check

__all__ = ["check"]
