"""All settings of one compilation, in one frozen value; `options=` and the environment are read here only."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError, did_you_mean
from .capacity import Capacity
from .instrument import INSTRUMENTS, Instrument
from .pipeline import Pipeline
from .target import find_target
from .worth import Worth

VERIFY = ("off", "fast", "strict", "numeric", "validate", "shadow")
SHADOW_CALLS = 3
ON_ERROR = ("fallback", "raise")
PADDED_OUTPUTS = ("strict", "unspecified")
DEFERRAL = {"0": False, "off": False, "1": True, "on": True, "always": "always"}
_EXPECTED = re.compile(r"\s*(?P<relation>>=|<=|==|>|<)?\s*(?P<count>\d+)\s*$")
_ENVIRONMENT = (
    "target", "codegen", "pipeline", "dump", "verify", "on_error", "stop_after", "padded_outputs", "capacity", "worth",
    "deferral",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., backend="turbogr", options={...})` accepts."""

    target: str = "cpu"  # who runs the graphs
    codegen: str | None = None  # code generator of the target; None: the target's default
    target_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings that only this target has
    pipeline: Pipeline | None = None  # the whole pipeline; None: the target's default
    passes: tuple[Any, ...] = ()  # passes to add to the pipeline
    without: tuple[str, ...] = ()  # passes to leave out of it
    dump: Path | None = None  # directory for pass dumps
    verify: str = "validate"  # off, fast, strict, numeric, validate, shadow, 'shadow:calls'
    on_error: str = "fallback"  # when a pass fails: go on without it, or raise
    expect: Mapping[str, str | int] = dataclasses.field(default_factory=dict)  # rewrites that must happen
    instruments: tuple[Instrument, ...] = ()  # your own watchers
    padded_outputs: str = "strict"  # or "unspecified": padded rows of returned tensors may hold anything
    capacity: Any = None  # numbers of packed rows: None as they come, 64 in multiples, 'pow2', (256, 1024) in buckets
    worth: Any = None  # what packing must save: None the shipped prices, 'always', 'flops=1e11,call=2e-5' (worth.py)
    deferral: Any = True  # outputs wait for what is done with them; False: not; 'always': without gradients, too
    stop_after: str | None = None  # 'pass' or 'pass:k': stop there, or after its k-th rewrite (bisection)

    @staticmethod
    def read(options: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Options:
        """Options from a user's mapping; what it does not say comes from TURBOGR_* variables, then the defaults."""
        given = dict(options or {})
        known = {f.name for f in dataclasses.fields(Options)}
        for name in given:
            if name not in known:
                raise OptionError(
                    f"unknown option {name!r}{did_you_mean(name, known)}; turbogr knows: {', '.join(sorted(known))}"
                )
        environment = os.environ if environment is None else environment
        from_environment = set()
        for name in _ENVIRONMENT:
            value = environment.get(f"TURBOGR_{name.upper()}")
            if value and given.get(name) is None:
                given[name] = value
                from_environment.add(name)
        # One setting for all of a program's models: it applies to the targets that have it.
        if "codegen" in from_environment and given["codegen"] not in find_target(given.get("target", "cpu")).codegens:
            del given["codegen"]
        return Options(**{k: v for k, v in given.items() if v is not None})

    def __post_init__(self) -> None:
        target = find_target(self.target)
        self._set("codegen", target.check_codegen(self.codegen))
        self._set("target_options", target.check_options(self.target_options))
        _one_of("verify", "shadow" if self.shadow() else self.verify, VERIFY)
        _one_of("on_error", self.on_error, ON_ERROR)
        _one_of("padded_outputs", self.padded_outputs, PADDED_OUTPUTS)
        self._set("capacity", Capacity.read(self.capacity))
        self._set("worth", Worth.read(self.worth))
        if not isinstance(self.deferral, bool):
            _one_of("deferral", self.deferral, tuple(DEFERRAL))
            self._set("deferral", DEFERRAL[self.deferral])
        pipeline = Pipeline.default(self.target) if self.pipeline is None else Pipeline.of(self.pipeline)
        extra = (self.passes,) if isinstance(self.passes, str) else tuple(self.passes)
        left_out = (self.without,) if isinstance(self.without, str) else tuple(self.without)
        pipeline = pipeline.with_(*Pipeline.of(list(extra)).items) if extra else pipeline
        pipeline = pipeline.without(*left_out) if left_out else pipeline
        self._set("pipeline", pipeline)
        self._set("passes", ())
        self._set("without", ())
        if self.dump is not None:
            self._set("dump", Path(self.dump))
        named = [INSTRUMENTS.find(given)() if isinstance(given, str) else given for given in self.instruments]
        self._set("instruments", tuple(named))
        for instrument in self.instruments:
            if not isinstance(instrument, Instrument):
                kind = type(instrument).__name__
                raise OptionError(f"option 'instruments' takes Instrument objects or their names, got {kind}")
        here = [p.name for p in pipeline.passes()]
        if self.stop_after is not None and self.stop()[0] not in here:
            hint = did_you_mean(self.stop()[0], here)
            raise OptionError(f"option 'stop_after' names {self.stop()[0]!r}, which is not in the pipeline{hint}")
        for name, count in self.expect.items():
            if name not in here:
                hint = did_you_mean(name, here)
                raise OptionError(f"option 'expect' names {name!r}, which is not in the pipeline{hint}")
            read_expectation(name, count)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def level(self) -> str:
        """What the verifier checks after each pass; comparing compiled graphs comes on top of 'fast'."""
        return "fast" if self.shadow() or self.verify == "validate" else self.verify

    def shadow(self) -> int:
        """How many calls of each compiled graph to compare with the captured one."""
        name, colon, calls = str(self.verify).partition(":")
        if name != "shadow":
            return 0
        if not colon:
            return SHADOW_CALLS
        if not calls.isdecimal() or int(calls) < 1:
            raise OptionError(
                f"option 'verify' takes 'shadow' or 'shadow:calls' with at least 1 call to compare, got {self.verify!r}"
            )
        return int(calls)

    def stop(self) -> tuple[str, int | None]:
        """Pass to stop after, and the number of rewrites it may do; ('', None) to run them all."""
        name, _, count = (self.stop_after or "").partition(":")
        if count and not count.isdigit():
            raise OptionError(f"option 'stop_after' takes 'pass' or 'pass:number', got {self.stop_after!r}")
        return name, int(count) if count else None

    def plan(self) -> Pipeline:
        """The pipeline that will run."""
        assert self.pipeline is not None
        return self.pipeline


def read_expectation(name: str, count: str | int) -> tuple[str, int]:
    """('>=', 1) for '>=1'; a bare number means exactly."""
    found = _EXPECTED.match(str(count))
    if not found:
        raise OptionError(f"option 'expect' for {name!r} takes a number or a text such as '>=1', got {count!r}")
    return found["relation"] or "==", int(found["count"])


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"option {name!r} takes {', '.join(known)}; got {value!r}{did_you_mean(str(value), known)}")
