"""Tests find faults of the compiler itself; validation, which is on by default, would hide them behind a fallback.

What only measures or traces compilations is kept out of them: it takes as long as compiling, and no test reads it.
"""

import gc
import logging
import os
import sys

os.environ.setdefault("TURBOGR_VERIFY", "fast")
os.environ.setdefault("TURBOGR_QUIET", "1")
# Dynamo collects garbage after each graph.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# pytest listens to every logger that does not propagate. To torch's structured trace a listener means that a trace is
# wanted: all graphs would be recorded and explained, which those of users are not.
_trace = logging.getLogger("torch.__trace")
_listen = _trace.addHandler


def _listen_unless_pytest(handler: logging.Handler) -> None:
    if not type(handler).__module__.startswith("_pytest"):
        _listen(handler)


_trace.addHandler = _listen_unless_pytest


def pytest_collection_finish() -> None:
    # Dynamo flushes the processor's caches to measure the guards of each graph, for a line of debugging output.
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0
    # What is imported by now is never garbage: walking over it again and again finds nothing.
    gc.collect()
    gc.freeze()
