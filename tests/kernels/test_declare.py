"""Declaring ops: once, and again."""

from __future__ import annotations

import importlib
import subprocess
import sys

import torch

from turbogr_compile import kernels
from turbogr_compile.kernels import declare, jagged_attention, rows, segment

OPS = (
    "gather_rows",
    "scatter_rows",
    "segment_softmax",
    "segment_softmax_backward",
    "jagged_attention",
    "jagged_attention_backward",
)


def test_loading_again_keeps_the_ops():
    before = {name: getattr(torch.ops.turbogr, name).default for name in OPS}
    contracts = dict(declare.CONTRACTS)
    for module in (declare, rows, segment, jagged_attention, kernels):
        importlib.reload(module)
    assert {name: getattr(torch.ops.turbogr, name).default for name in OPS} == before
    assert all(declare.CONTRACTS[name] is contracts[name] for name in OPS)  # those that the ops were registered with
    x = torch.eye(3).requires_grad_()
    torch.ops.turbogr.gather_rows(x, torch.tensor([1])).sum().backward()
    assert x.grad is not None and x.grad.sum(1).tolist() == [0.0, 3.0, 0.0]


def test_importing_anew_keeps_the_ops():
    """Another interpreter, since this one's modules are in use."""
    program = """
import gc, sys, torch
import turbogr_compile.kernels
for name in [n for n in sys.modules if n.startswith("turbogr_compile")]:
    del sys.modules[name]
del turbogr_compile
gc.collect()
import turbogr_compile.kernels
gc.collect()
assert torch.ops.turbogr.gather_rows(torch.eye(2), torch.tensor([1])).tolist() == [[0.0, 1.0]]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# Arguments that came later stand behind all others, with a default, so that calls and graphs from before stay valid.
LATER = {"sink", "score_cap"}


def test_later_arguments_have_defaults():
    for name in OPS:
        arguments = getattr(torch.ops.turbogr, name).default._schema.arguments
        later = [a for a in arguments if a.name in LATER]
        if not name.endswith("_backward"):  # that one is called by ours alone
            assert arguments[len(arguments) - len(later) :] == later
            assert all(a.has_default_value() for a in later)


def test_schemas_put_tensors_first_and_have_no_scalars():
    for name in OPS:
        arguments = getattr(torch.ops.turbogr, name).default._schema.arguments
        kinds = [str(a.type) for a in arguments if a.name not in LATER]
        tensors = [kind in ("Tensor", "Optional[Tensor]") for kind in kinds]
        assert tensors == sorted(tensors, reverse=True), name
        assert not any("Scalar" in kind or kind == "number" for kind in kinds), name


def test_arguments_are_those_of_the_schema():
    names = [a.name for a in torch.ops.turbogr.jagged_attention.default._schema.arguments]
    assert names == list(jagged_attention.Inputs._fields)
    tensors = {a.name for a in torch.ops.turbogr.jagged_attention.default._schema.arguments if "Tensor" in str(a.type)}
    assert set(jagged_attention.DIFFERENTIABLE) <= tensors
