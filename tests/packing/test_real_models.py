"""Published models, unmodified, from their own checkouts: eager's loss and gradients without the arithmetic of pads.

The models are third-party code and not part of this repository. Set GR_HARNESS to the folder with one `build` module
per model and GR_ROOT to the folder with the checkouts they import; without them there is nothing to run.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys

import pytest
import torch

import turbogr_compile

from .harness import flops

HARNESS = os.environ.get("GR_HARNESS", "")
pytestmark = pytest.mark.skipif(not (HARNESS and os.environ.get("GR_ROOT")), reason="set GR_HARNESS and GR_ROOT")

# MFLOP of forward and backward at B=32 and 64 items of history, attention counted in full: (as written, packed).
# The packed figures are what hand-computed demand gives for recbole_sasrec and minionerec_qwen.
MFLOP = {
    "recbole_sasrec": (305, 41.7), "recbole_bert4rec": (355, 52.7), "minionerec_qwen": (524, 58.2),
    "meta_sasrec": (318, 55.7), "meta_hstu": (173, 46.2), "meta_stu": (146, 57.0),
}  # fmt: skip


def gradients(step, model, batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = step(model, batch)
    loss.backward()
    return loss.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def compiled(name):
    if HARNESS not in sys.path:
        sys.path.insert(0, HARNESS)
    model, batches, whole = importlib.import_module(name).build(dropout=0.0, batch_size=32)
    model.train()
    torch._dynamo.reset()

    def step(model, batch):
        return whole(model, batch)[0]

    remarks = Remarks()
    run = turbogr_compile.compile(step, target="eager", on_error="raise", instruments=(remarks,))
    for seed in range(3):
        batch = batches(seed=seed)
        expected, wanted = gradients(step, model, copy.deepcopy(batch))
        actual, found = gradients(run, model, copy.deepcopy(batch))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert wanted.keys() == found.keys()
        for key, gradient in wanted.items():
            assert (gradient - found[key]).norm() <= 1e-4 * gradient.norm().clamp(min=1e-6), key
    return model, batches(seed=0), step, run, remarks


class Remarks(turbogr_compile.Instrument):
    def __init__(self):
        self.said = []

    def finish(self, run):
        self.said += run.remarks


@pytest.mark.parametrize("name", MFLOP)
def test_padding_is_gone(name):
    model, batch, step, run, _ = compiled(name)
    written, packed = MFLOP[name]
    assert flops(step, model, batch) == pytest.approx(written * 1e6, rel=0.01)
    assert flops(run, model, batch) <= 1.05 * packed * 1e6
    assert not any(s.fallbacks for s in turbogr_compile.statistics())


def test_attended_pads_are_left_alone_and_named():
    *_, remarks = compiled("pmixer_sasrec")
    (where,) = {str(r.line) for r in remarks.said if r.id == "pads-attended"}
    assert "self.attention_layers[i](" in where
