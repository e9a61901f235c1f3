"""The fusion passes behind pack-rows: an unchanged padded model trains the same, in the kernels meant for it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile import Instrument
from turbogr_compile.testing import Flops

FUSED = ["fuse-embedding", "fuse-loss{min_logits=0}", "fuse-norm-gate", "fuse-silu-split"]


@pytest.fixture
def hstu(monkeypatch):
    """The example's model."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("hstu")


class Watch(Instrument):
    """Ops of the captured graph in the end, and what was said."""

    def __init__(self):
        self.ops, self.remarks = [], []

    def finish(self, run):
        if run.name.endswith("captured"):
            self.ops = [str(n.target).removesuffix(".default") for n in run.graph.nodes if n.op == "call_function"]
            self.remarks = run.remarks


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("codegen", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_hstu_trains_the_same_in_fused_kernels(hstu, codegen):
    model = hstu.Recommender(items=60, dim=8, heads=2, layers=2, max_len=12).double()
    batches = [hstu.histories(5, 12, 60, seed) for seed in range(3)]
    watch = Watch()
    step = turbogr_compile.compile(
        model.loss, codegen=codegen, passes=FUSED, instruments=(watch,), on_error="raise", verify="strict"
    )
    for ids in batches:
        expected = model.loss(ids)
        wanted = gradients(model, expected)
        actual = step(ids)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients(model, actual), wanted)
    counted = {name: watch.ops.count(f"turbogr.{name}") for name in ("embedding", "norm_gate", "silu_split")}
    assert counted == {"embedding": 2, "norm_gate": 2, "silu_split": 2}
    assert watch.ops.count("turbogr.linear_cross_entropy_total") == watch.ops.count("turbogr.jagged_attention") / 2 == 1
    assert not {"aten.silu", "aten.embedding", "aten.cross_entropy_loss", "aten.matmul"} & set(watch.ops)
    assert not [r for r in watch.remarks if r.kind.value in ("missed", "failed")]


def masked(model, ids):
    logits, mask = model(ids)[:, :-1] @ model.items.weight.T, ids[:, 1:] != 0
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(mask.shape)
    return (losses * mask).sum() / mask.sum()


def transposed(model, ids):
    logits = (model(ids)[:, :-1] @ model.items.weight.T) / 0.5
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=0, label_smoothing=0.1)


def indexed(model, ids):
    target = ids[:, 1:]
    return F.cross_entropy(F.linear(model(ids)[:, :-1], model.items.weight)[target != 0], target[target != 0])


@pytest.mark.parametrize("loss", [masked, transposed, indexed])
def test_other_losses_of_packed_rows(hstu, loss):
    model = hstu.Recommender(items=60, dim=8, heads=2, layers=1, max_len=12).double()
    ids, watch = hstu.histories(5, 12, 60, 0), Watch()
    step = turbogr_compile.compile(
        lambda ids: loss(model, ids), codegen="aten", passes=FUSED, instruments=(watch,), on_error="raise"
    )
    expected, actual = loss(model, ids), step(ids)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected))
    assert "turbogr.linear_cross_entropy_total" in watch.ops


def test_no_product_is_computed_twice(hstu):
    """Gradients of the loss come along with it."""
    model = hstu.Recommender(items=60, dim=8, heads=2, layers=1, max_len=12)
    ids = hstu.histories(5, 12, 60, 0)
    counted = []
    plain = [spec.partition("{")[0] for spec in FUSED]
    for options in ({"without": plain}, {"passes": FUSED}):
        torch._dynamo.reset()
        step = turbogr_compile.compile(model.loss, codegen="aten", on_error="raise", **options)
        step(ids).backward()
        with Flops() as flops:
            step(ids).backward()
        counted.append(flops.total)
    assert counted[0] == counted[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(hstu, dtype):
    model = hstu.Recommender(items=60, dim=16, heads=2, layers=1, max_len=12)
    ids = hstu.histories(5, 12, 60, 0)

    def loss(ids):
        with torch.autocast("cpu", dtype=dtype):
            return model.loss(ids)

    watch = Watch()
    step = turbogr_compile.compile(loss, codegen="aten", passes=FUSED, instruments=(watch,), on_error="raise")
    with torch.no_grad():
        exact = model.loss(ids)
    expected, actual = loss(ids), step(ids)
    assert actual.dtype == expected.dtype
    assert (actual - exact).abs() <= (expected - exact).abs() + 0.02 * exact.abs()
    assert "turbogr.linear_cross_entropy_total" in watch.ops and "turbogr.silu_split" in watch.ops
    wanted, found = gradients(model, expected), gradients(model, actual)
    for name in wanted:
        assert (wanted[name] - found[name]).norm() <= 0.05 * wanted[name].norm() + 1e-4, name
