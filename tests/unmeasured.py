"""Compilations that are not measured: that takes as long as compiling a small graph, and no test reads the result."""

import os
import sys

# Dynamo collects garbage after each graph, too. Of processes that tests start as well.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")


def guards_are_not_timed() -> None:
    """Dynamo flushes the processor's caches to time the guards of each graph, for a line of debugging output."""
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0
