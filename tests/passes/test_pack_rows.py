"""The pass from outside: what it packs, what it says, what it leaves alone. Numbers are compared in tests/packing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile import Instrument
from turbogr_compile.passes.rows.analysis import analyse
from turbogr_compile.passes.rows.report import analysis_text
from turbogr_compile.testing import trace_graph


class Watch(Instrument):
    explains = True

    def __init__(self):
        self.remarks, self.graph, self.notes = [], None, {}

    def after(self, run, step):
        if step.pass_.name == "pack-rows":
            self.graph = [str(n.target) for n in run.graph.nodes]
            self.notes = step.context.notes

    def finish(self, run):
        self.remarks += run.remarks


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(fn, *args, **options):
    watch = Watch()
    run = turbogr_compile.compile(fn, target="eager", on_error="raise", instruments=(watch,), **options)
    return run(*args), watch


W = torch.randn(8, 8, requires_grad=True)
TABLE = torch.randn(20, 8, requires_grad=True)
RIGHT = torch.tensor([[3, 4, 0, 0, 0, 0], [5, 6, 7, 0, 0, 0], [1, 0, 0, 0, 0, 0]])


def causal_attention(ids, key_mask):
    x = F.embedding(ids, TABLE)
    scores = x @ x.mT
    keep = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    if key_mask:
        keep = keep & (ids != 0)[:, None, :]
    hidden = scores.masked_fill(~keep, -1e9).softmax(-1) @ (x @ W)
    return F.cross_entropy((hidden @ TABLE.T).flatten(0, 1), ids.flatten(), ignore_index=0)


def ids_of(remarks):
    return [r.id for r in remarks]


def test_right_padding_needs_no_key_mask():
    loss, watch = compiled(lambda ids: causal_attention(ids, False), RIGHT)
    torch.testing.assert_close(loss, causal_attention(RIGHT, False))
    assert "packed" in ids_of(watch.remarks) and "pads-attended" not in ids_of(watch.remarks)
    assert "turbogr.jagged_attention.default" in watch.graph


def test_left_padding_without_a_key_mask_is_refused_at_its_line():
    left = RIGHT.flip(1)
    loss, watch = compiled(lambda ids: causal_attention(ids, False), left)
    torch.testing.assert_close(loss, causal_attention(left, False))
    (said,) = [r for r in watch.remarks if r.id == "pads-attended"]
    assert "softmax(-1) @ (x @ W)" in str(said.line) and "pad on the right" in said.hint
    assert "turbogr.jagged_attention.default" not in watch.graph


def test_left_padding_with_a_key_mask_is_packed():
    left = RIGHT.flip(1)
    loss, watch = compiled(lambda ids: causal_attention(ids, True), left)
    torch.testing.assert_close(loss, causal_attention(left, True))
    assert "turbogr.jagged_attention.default" in watch.graph and "pads-attended" not in ids_of(watch.remarks)


def test_rows_kept_are_told_with_the_numbers_of_the_batch():
    _, watch = compiled(lambda ids: causal_attention(ids, True), RIGHT)
    (said, *_) = [r for r in watch.remarks if r.id == "packed"]
    assert "6 of 18 in the batch seen, 33%" in said.text and "!= 0" in said.text


def model_with_visible_pads(ids):
    x = F.embedding(ids, TABLE) @ W
    mask = (ids != 0)[:, None, :]
    return torch.softmax((x @ x.mT).masked_fill(~mask, -1e9), -1) @ x


def test_returned_pads_keep_their_values():
    out, watch = compiled(model_with_visible_pads, RIGHT, deferral=False)
    torch.testing.assert_close(out, model_with_visible_pads(RIGHT))
    (said,) = [r for r in watch.remarks if r.id == "padded-output"]
    assert "padded_outputs" in said.hint


@pytest.mark.parametrize("spelled", [lambda i: i != 0, lambda i: ~(i == 0)], ids=["ne", "not-eq"])
def test_unspecified_outputs_hold_the_valid_rows(spelled):
    def model(ids):
        x = F.embedding(ids, TABLE) @ W
        return torch.softmax((x @ x.mT).masked_fill(~spelled(ids)[:, None, :], -1e9), -1) @ x

    out, watch = compiled(model, RIGHT, padded_outputs="unspecified")
    valid = RIGHT != 0
    torch.testing.assert_close(out[valid], model(RIGHT)[valid])
    assert "turbogr.jagged_attention.default" in watch.graph


def test_mean_over_pads_is_named():
    def step(ids):
        x = F.embedding(ids, TABLE) @ W
        mask = (ids != 0)[:, None, :]
        x = torch.softmax((x @ x.mT).masked_fill(~mask, -1e9), -1) @ x
        return x.mean(1).pow(2).sum()

    loss, watch = compiled(step, RIGHT)
    torch.testing.assert_close(loss, step(RIGHT))
    assert any(r.id == "mixes-rows" and "mean reads every row" in r.text for r in watch.remarks)


def test_gradients_that_stop_inside_attention_stop_there():
    def step(ids, w):
        x = F.embedding(ids, TABLE)
        mask = (ids != 0)[:, None, :]
        weights = torch.softmax(((x @ w) @ x.mT).masked_fill(~mask, -1e9), -1).detach()
        return F.cross_entropy((weights @ (x @ W) @ TABLE.T).flatten(0, 1), ids.flatten(), ignore_index=0)

    w = torch.randn(8, 8, requires_grad=True)
    loss, _ = compiled(step, RIGHT, w)
    loss.backward()
    assert w.grad is None or not w.grad.any()


def test_mixed_precision_inside_attention():
    def step(ids):
        x = F.embedding(ids, TABLE).bfloat16()
        scores = (x.float() @ x.float().mT).masked_fill(~(ids != 0)[:, None, :], -1e9)
        hidden = scores.softmax(-1).bfloat16() @ x
        return F.cross_entropy((hidden.float() @ TABLE.T).flatten(0, 1), ids.flatten(), ignore_index=0)

    loss, watch = compiled(step, RIGHT)
    torch.testing.assert_close(loss, step(RIGHT), rtol=2e-2, atol=2e-2)
    assert "turbogr.jagged_attention.default" in watch.graph


def test_wrong_option_is_named():
    with pytest.raises(turbogr_compile.PipelineError, match="'dropout' takes packed or padded"):
        turbogr_compile.compile(lambda ids: ids, pipeline="pack-rows{dropout=no}")


def test_analysis_reads_as_text():
    def step(ids, x):
        mask = (ids != 0).unsqueeze(-1)
        return (x * mask).sum(1)

    module = trace_graph(step, [RIGHT, torch.randn(3, 6, 8, requires_grad=True)])
    text = analysis_text(analyse(module.graph, [RIGHT, torch.randn(3, 6, 8)]).demand)
    assert "b × n   (3 × 6)" in text and "!= 0   over (b, n)" in text
    assert "test_pack_rows.py" in text  # facts carry the line they come from


def test_dims_are_aligned_by_axis_and_never_by_size():
    def step(a, b):
        return a.sum(0) + b.sum(1)

    module = trace_graph(step, [torch.randn(4, 4), torch.randn(4, 4)])
    a, b = module.graph.find_nodes(op="placeholder")
    typing = analyse(module.graph).demand.typing
    assert typing.atoms(a)[1] == typing.atoms(b)[0]
    assert typing.atoms(a)[0] != typing.atoms(b)[1] and typing.atoms(a)[0] != typing.atoms(a)[1]
