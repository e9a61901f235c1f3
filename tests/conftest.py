"""Tests find faults of the compiler itself; validation, which is on by default, would hide them behind a fallback."""

import gc
import logging
import os

from .unmeasured import guards_are_not_timed

os.environ.setdefault("TURBOGR_VERIFY", "fast")
os.environ.setdefault("TURBOGR_QUIET", "1")
# Read when torch is imported: threads that wait for one another spin, and hold the processors that others need. Tests
# run beside tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# pytest listens to every logger that does not propagate. To torch's structured trace a listener means that a trace is
# wanted: all graphs would be recorded and explained, which those of users are not, and takes as long as compiling them.
_trace = logging.getLogger("torch.__trace")
_listen = _trace.addHandler


def _listen_unless_pytest(handler: logging.Handler) -> None:
    if not type(handler).__module__.startswith("_pytest"):
        _listen(handler)


_trace.addHandler = _listen_unless_pytest


def pytest_collection_finish() -> None:
    guards_are_not_timed()
    # What is imported by now is never garbage: walking over it again and again finds nothing. Graphs are many small
    # objects, after 700 of which Python would look for garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
