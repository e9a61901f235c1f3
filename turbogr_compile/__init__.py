"""turbogr: a compiler for generative recommenders.

    step = torch.compile(model, backend="turbogr")

Write an ordinary padded PyTorch model; turbogr rewrites its training step and shows what it did.

Importing this package imports nothing else, not even torch: a public name brings its module along when it is used.
"""

from __future__ import annotations

import threading as _threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .ops import announce as _announce_ops
from .registry import ROOMS as _ROOMS
from .registry import Beside as _Beside

if TYPE_CHECKING:
    from .api import Report, compile, explain, replay
    from .errors import (
        ExpectationError,
        OptionError,
        PassError,
        PipelineError,
        RuleError,
        TargetError,
        TurbogrError,
        VerifyError,
    )
    from .graph.phases import Phase, Role
    from .graph.shapes import known
    from .passes.rows.declaration import row_op
    from .pipeline.catalogue import register
    from .pipeline.context import Context
    from .pipeline.instrument import GraphRun, Instrument, Step
    from .pipeline.options import Options
    from .pipeline.pass_base import Pass
    from .pipeline.pipeline import Pipeline, Repeat
    from .pipeline.remarks import Remark, RemarkKind
    from .rules.rule import Rule, RuleSet, rule
    from .runtime.ahead import ahead
    from .runtime.checkpoint import CheckpointError, Checkpoints
    from .runtime.draws import seed
    from .runtime.random_state import random_state
    from .runtime.ranks.watch import RanksLost, watch_ranks
    from .runtime.sharding import (
        ColumnWise,
        Hierarchical,
        LazyAdam,
        Replicated,
        RowAdagrad,
        RowSGD,
        RowWise,
        RowWiseAdagrad,
        TableWise,
        average_gradients,
        row_gradients,
        shard,
    )
    from .runtime.sharding.plan import plan
    from .runtime.statistics import RunStatistics, statistics
    from .show.recording import Recording

# Threads that ask for names at once import one after the other: rooms import each other's parts from several ends.
_IMPORTING = _threading.RLock()
_Beside.announce()
_announce_ops()

_FROM = {
    "api": "Report compile explain replay",
    "errors": "ExpectationError OptionError PassError PipelineError RuleError TargetError TurbogrError VerifyError",
    "graph.phases": "Phase Role",
    "graph.shapes": "known",
    "passes.rows.declaration": "row_op",
    "pipeline.catalogue": "register",
    "pipeline.context": "Context",
    "pipeline.instrument": "GraphRun Instrument Step",
    "pipeline.options": "Options",
    "pipeline.pass_base": "Pass",
    "pipeline.pipeline": "Pipeline Repeat",
    "pipeline.remarks": "Remark RemarkKind",
    "rules.rule": "Rule RuleSet rule",
    "runtime.ahead": "ahead",
    "runtime.checkpoint": "CheckpointError Checkpoints",
    "runtime.draws": "seed",
    "runtime.random_state": "random_state",
    "runtime.ranks.watch": "RanksLost watch_ranks",
    "runtime.sharding": "ColumnWise Hierarchical LazyAdam Replicated RowAdagrad RowSGD RowWise RowWiseAdagrad "
    "TableWise average_gradients row_gradients shard",
    "runtime.sharding.plan": "plan",
    "runtime.statistics": "RunStatistics statistics",
    "show.recording": "Recording",
}
_PUBLIC = {name: module for module, names in _FROM.items() for name in names.split()}
# `import turbogr_compile` is enough to use modules, too.
_MODULES = (*_ROOMS, "api", "backend", "errors", "files", "losses")

__all__ = [
    "CheckpointError", "Checkpoints", "ColumnWise", "Context", "ExpectationError", "GraphRun", "Hierarchical",
    "Instrument", "LazyAdam", "OptionError", "Options", "Pass", "PassError", "Phase", "Pipeline", "PipelineError",
    "RanksLost", "Recording", "Remark", "RemarkKind", "Repeat", "Replicated", "Report", "Role", "RowAdagrad", "RowSGD",
    "RowWise", "RowWiseAdagrad", "Rule", "RuleError", "RuleSet", "RunStatistics", "Step", "TableWise", "TargetError",
    "TurbogrError", "VerifyError", "ahead", "average_gradients", "compile", "explain", "known", "plan", "random_state",
    "register", "replay", "row_gradients", "row_op", "rule", "seed", "shard", "statistics", "watch_ranks",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        with _IMPORTING:
            found = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
        globals()[name] = found
        return found
    if name in _MODULES:
        with _IMPORTING:
            return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
