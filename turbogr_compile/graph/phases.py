"""Where on its road a graph is, which graph of a compiled frame it is, and which ops it is made of. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Phase(Enum):
    """Where on the road of a graph a pass runs; vocabulary and invariants differ per phase."""

    PRE_GRAD = "pre-grad"  # captured graph: functional ATen before autograd; almost every rewrite
    JOINT = "joint"  # forward and backward in one graph
    POST_GRAD = "post-grad"  # forward, backward or inference graph
    LOWERING = "lowering"  # just before the target takes over; mutation allowed


@dataclass(frozen=True)
class Vocabulary:
    """The ops that graphs of a phase are made of: below autograd, a target takes some of them apart."""

    phase: Phase
    target: str = ""  # whose decompositions; '' for none
    decompositions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict, compare=False)


class Role(Enum):
    """Which graph of a compiled frame a pass is looking at."""

    CAPTURED = "captured"
    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


ALL_ROLES = frozenset(Role)
