"""The loss as the backend runs it, compiled on a batch that is the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import turbogr_compile as turbogr

from . import storage
from .config import SHARED, Config


def passes_of(features: tuple[str, ...]) -> list[str]:
    """What `turbogr_compile.compile` is asked for, beyond the default pipeline."""
    sampling = [f"share={SHARED}"] * ("share" in features) + ["half=true"] * ("half" in features)
    asked = [f"fuse-sampling{{{', '.join(sampling)}}}"] * bool(sampling)
    asked += ["offload-sampling"] * ("offload" in features)
    # Lookups of several ranks can be taken apart if ids are known before the step.
    sharded = ["draws=true"] * ("offload" in features) + ["staleness=1"] * ("semi-async" in features)
    return asked + [f"expand-lookups{{{', '.join(sharded)}}}"] * bool(sharded)


class Loss:
    """`loss(ids, times)` of a model, and what the compiler said about it."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model = model
        self._recording = turbogr.Recording()
        self.call = self._compile(storage.method(model, "loss"), config)

    def _compile(self, plain: Callable[..., Tensor], config: Config) -> Callable[..., Tensor]:
        if config.backend == "eager":
            return plain
        if config.backend == "inductor":
            return torch.compile(plain)
        options: dict[str, Any] = {"codegen": config.codegen, "instruments": (self._recording,)}
        if passes := passes_of(config.features):
            options["passes"] = passes
        return turbogr.compile(plain, **options)

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.call(batch["ids"], batch["times"])

    def warm_up(self, batch: Mapping[str, Tensor]) -> None:
        """Compile, forward and backward. The compiler decides by the batch that it sees first, so that one is fixed."""
        self(batch).backward()
        self.model.zero_grad(set_to_none=True)

    @property
    def passes(self) -> list[dict[str, str]]:
        """A summary for each graph."""
        return [{"graph": r["graph"], "text": str(turbogr.Report((r,)))} for r in self._recording.records]

    @property
    def remarks(self) -> list[dict[str, Any]]:
        return [{**remark, "line": _line(r, remark)} for r in self._recording.records for remark in r["remarks"]]


# Pairs of positions that padded eager looks at, below which compiling takes longer than it saves (two layers: ten
# seconds, the time of so many pairs).
WORTH_COMPILING = 100_000_000


def encoder(model: nn.Module, config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """The vectors of histories, `last(ids, times)`; what is run depends on the settings alone, as its rounding does."""
    plain = storage.method(model, "last")
    return turbogr.compile(plain, codegen=config.codegen, deferral=False) if compiles_evaluation(config) else plain


def compiles_evaluation(config: Config) -> bool:
    pairs = config.evaluate_users * config.max_len**2 * config.heads
    return config.backend == "turbogr" and pairs >= WORTH_COMPILING


def _line(record: dict[str, Any], remark: dict[str, Any]) -> str:
    """The user's line that a remark is about, as text; a record keeps its place in a list."""
    if remark["line"] is None:
        return ""
    found = record["lines"][remark["line"]]
    return f"{found['where']}  {found['code']}"
