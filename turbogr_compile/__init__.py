"""turbogr: a compiler for generative recommenders.

    step = torch.compile(model, backend="turbogr")

Write an ordinary padded PyTorch model; turbogr rewrites its training step and shows what it did.
"""

from .api import Report, compile, explain, replay
from .catalogue import register
from .context import Context
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
from .instrument import GraphRun, Instrument, Step
from .options import Options
from .pass_base import Pass, Phase, Role
from .pipeline import Pipeline, Repeat
from .prologue import RunStatistics, statistics
from .remarks import Remark, RemarkKind
from .rule import Rule, RuleSet, rule
from .runtime.ahead import ahead
from .shapes import known

__all__ = [
    "Context", "ExpectationError", "GraphRun", "Instrument", "OptionError", "Options", "Pass", "PassError", "Phase",
    "Pipeline", "PipelineError", "Remark", "RemarkKind", "Repeat", "Report", "Role", "Rule", "RuleError", "RuleSet",
    "RunStatistics", "Step", "TargetError", "TurbogrError", "VerifyError", "ahead", "compile", "explain", "known",
    "register", "replay", "rule", "statistics",
]  # fmt: skip
