"""Option `worth`: what packing must save before it is done.

A packed step leaves work out and adds calls: a prologue, gathers, ops of turbogr's own. Both are counted on the batch
seen and priced with a few constants. Nothing is timed, so that the same program is packed on every machine and rank, or
on none. The shipped constants are fitted to steps of a small transformer on one core of a server CPU;
`turbogr bench --worth` prints those of the machine at hand.

A step that is tiny even when padded is packed whatever it costs: a few milliseconds matter to nobody at that size, and
whoever tries turbogr on it wants to see what it does.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from ..errors import OptionError, did_you_mean

ALWAYS = "always"
BEARABLE = 0.05  # of a padded step may be lost on the fullest of batches
_PART = re.compile(r"\s*(\w+)\s*=\s*([0-9.eE+-]+)\s*$")


@dataclass(frozen=True)
class Work:
    """Of one forward."""

    flops: float = 0.0
    bytes: float = 0.0  # read or written
    ops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.ops + other.ops)


@dataclass(frozen=True)
class Added:
    """By packing, to one forward."""

    calls: int = 0
    moved: float = 0.0  # bytes of rows that are gathered or scattered


@dataclass(frozen=True)
class Worth:
    """Prices. A training step does everything about three times: once forward, twice backward."""

    flops: float = 100e9  # per second
    bytes: float = 50e9  # per second, read or written
    moved: float = 10e9  # bytes per second, of rows that are gathered or scattered
    op: float = 10e-6  # seconds for each op of a padded step, beside its arithmetic
    call: float = 40e-6  # seconds for each call of an op that packing adds
    step: float = 600e-6  # seconds for what runs around each packed step
    tiny: float = 10e-3  # seconds of a padded step that is not weighed at all

    @staticmethod
    def read(value: Any) -> Worth:
        """From an option: None for the shipped prices, 'always', or 'flops=1e11,call=2e-5'."""
        if value is None or isinstance(value, Worth):
            return value or Worth()
        if value == ALWAYS:
            return Worth(call=0.0, step=0.0, moved=math.inf)  # what costs nothing pays
        known = [f.name for f in fields(Worth)]
        found = {}
        for part in str(value).split(","):
            match = _PART.match(part)
            if not match:
                wanted = "'always' or prices such as 'flops=1e11,call=2e-5'"
                raise OptionError(f"option 'worth' takes {wanted}, got {value!r}")
            if match[1] not in known:
                raise OptionError(f"option 'worth' has no price {match[1]!r}{did_you_mean(match[1], known)}")
            found[match[1]] = float(match[2])
        return Worth(**found)

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name):.3g}" for f in fields(self))

    def seconds(self, work: Work) -> float:
        """Of a training step, for work of its forward."""
        return 3 * (work.flops / self.flops + work.bytes / self.bytes + work.ops * self.op)

    def added(self, more: Added) -> float:
        """Seconds of a training step that packing costs."""
        return self.step + 2 * more.calls * self.call + 3 * more.moved / self.moved

    def pays(self, whole: Work, usually: Work, here: Work, more: Added) -> bool:
        """Is less taken than given, `usually`; and is next to nothing lost on the batch seen, where that is fuller?"""
        added = self.added(more)
        return added <= self.seconds(usually) and added - self.seconds(here) <= BEARABLE * self.seconds(whole)
