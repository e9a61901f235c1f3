"""Compute layer norms and the gates they meet in one sweep."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import (
    kernels,  # noqa: F401  (defines the ops)
)
from ..graph.phases import Phase
from ..graph.shapes import same_shape
from ..rules.match import Match
from ..rules.rule import RuleSet

ops = torch.ops.turbogr

fuse_norm_gate = RuleSet(
    "fuse-norm-gate",
    phase=Phase.PRE_GRAD,
    doc="Compute layer_norm(x) * gate, as an HSTU block ends, in one sweep over x.",
    after=("remove-noops", "fold-views", "pack-rows", "eliminate-common", "recognize-activations", "simplify-masks"),
    before=("eliminate-dead-code",),
)


@fuse_norm_gate.rule(inputs="float[..., d], float[..., d], float[d], float[d]")
def norm_gate(x, gate, weight, bias, *, eps: float):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps) * gate


@norm_gate.replace
def _(x, gate, weight, bias, *, eps):
    return ops.norm_gate(x, gate, weight, bias, eps)[0]


@fuse_norm_gate.rule(inputs="float[..., d], float[..., d], float[d]")
def scaled_norm_gate(x, gate, weight, *, eps: float):
    """nn.LayerNorm(..., bias=False)."""
    return F.layer_norm(x, x.shape[-1:], weight, None, eps) * gate


@scaled_norm_gate.replace
def _(x, gate, weight, *, eps):
    return ops.norm_gate(x, gate, weight, None, eps)[0]


@fuse_norm_gate.rule(inputs="float[..., d], float[..., d]")
def plain_norm_gate(x, gate, *, eps: float):
    """nn.LayerNorm(..., elementwise_affine=False)."""
    return F.layer_norm(x, x.shape[-1:], None, None, eps) * gate


@plain_norm_gate.replace
def _(x, gate, *, eps):
    return ops.norm_gate(x, gate, None, None, eps)[0]


def _alike(m: Match) -> None:
    m.require(
        same_shape(m.x.shape, m.gate.shape),
        "the gate is {}, x is {}: not provably of one shape",
        m.gate.shape,
        m.x.shape,
    )
    m.require(m.x.dtype == m.gate.dtype, "the gate is {}, x is {}", m.gate.dtype, m.x.dtype, hint="cast one of them")


for each in (norm_gate, scaled_norm_gate, plain_norm_gate):
    each.when(_alike)
