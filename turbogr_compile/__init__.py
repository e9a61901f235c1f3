"""turbogr: a compiler for generative recommenders.

    step = torch.compile(model, backend="turbogr")

Write an ordinary padded PyTorch model; turbogr rewrites its training step and shows what it did.
"""

from .registry import Beside as _Beside

_Beside.announce()

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
from .graph.shapes import known
from .pipeline.catalogue import register
from .pipeline.context import Context
from .pipeline.instrument import GraphRun, Instrument, Step
from .pipeline.options import Options
from .pipeline.pass_base import Pass, Phase, Role
from .pipeline.pipeline import Pipeline, Repeat
from .pipeline.remarks import Remark, RemarkKind
from .rules.rule import Rule, RuleSet, rule
from .runtime.ahead import ahead
from .runtime.checkpoint import CheckpointError, Checkpoints
from .runtime.prologue import RunStatistics, statistics
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
    plan,
    shard,
)

__all__ = [
    "CheckpointError", "Checkpoints", "ColumnWise", "Context", "ExpectationError", "GraphRun", "Hierarchical",
    "Instrument", "LazyAdam", "OptionError", "Options", "Pass", "PassError", "Phase", "Pipeline", "PipelineError",
    "RanksLost", "Remark", "RemarkKind", "Repeat", "Replicated", "Report", "Role", "RowAdagrad", "RowSGD", "RowWise",
    "RowWiseAdagrad", "Rule", "RuleError", "RuleSet", "RunStatistics", "Step", "TableWise", "TargetError",
    "TurbogrError", "VerifyError", "ahead", "average_gradients", "compile", "explain", "known", "plan", "random_state",
    "register", "replay", "rule", "shard", "statistics", "watch_ranks",
]  # fmt: skip
