"""Replace hand-written activations by the op that computes them in one sweep."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..graph.phases import Phase
from ..rules.rule import RuleSet

recognize_activations = RuleSet(
    "recognize-activations",
    phase=Phase.PRE_GRAD,
    doc="Replace hand-written activations (x * sigmoid(x), the erf form of GELU) by one op.",
    after=("remove-noops", "eliminate-common"),
)


@recognize_activations.rule(inputs="float")
def silu(x):
    return x * torch.sigmoid(x)


@silu.replace
def _(x):
    return F.silu(x)


@recognize_activations.rule(inputs="float")
def gelu(x):
    """As BERT and its descendants write it."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@gelu.variant
def _(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


@gelu.variant
def _(x):
    return x * (0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))))


@gelu.variant
def _(x):
    return 0.5 * x * (1.0 + torch.erf(x * (1.0 / math.sqrt(2.0))))


@gelu.replace
def _(x):
    return F.gelu(x)
