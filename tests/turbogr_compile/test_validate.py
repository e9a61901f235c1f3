"""Validation, which is on by default: a graph that a pass got wrong is found before its first result is used."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile import Options, Pass, Phase
from turbogr_compile.check import validate
from turbogr_compile.check.disturbance import disturbed
from turbogr_compile.check.validate import DIFFERS
from turbogr_compile.pipeline.options import VERIFY
from turbogr_compile.runtime.prologue import InputRows


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def own():
    """Statistics of graphs that this test compiles."""
    gc.collect()
    older = set(turbogr_compile.statistics())
    return lambda: [s for s in turbogr_compile.statistics() if s not in older]


class Model(torch.nn.Module):
    """Attention under a validity mask, read on valid rows."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(30, 8, padding_idx=0)
        self.project = torch.nn.Linear(8, 8)
        self.dropout = dropout

    def forward(self, ids):
        x, valid = self.table(ids), ids != 0
        q = self.project(F.dropout(x, self.dropout))
        scores = (q @ x.transpose(1, 2)).masked_fill(~valid[:, None], float("-inf"))
        return ((scores.softmax(-1) @ x) * valid[..., None]).square().sum()


IDS = torch.tensor([[3, 1, 4, 0, 0, 0], [2, 5, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]])


def compiled(model, **options):
    return turbogr_compile.compile(model, verify="validate", codegen="aten", **options)


def test_it_is_the_default_and_has_a_name_of_its_own():
    assert Options.read({}, {}).verify == "validate" and "validate" in VERIFY
    assert Options.read({}, {}).level() == "fast"


def test_a_right_graph_is_tried_twice_and_then_left_alone(own):
    step = compiled(Model())
    for _ in range(3):
        step(IDS).backward()
    (stats,) = own()
    assert (stats.calls, stats.compared, stats.fallbacks) == (3, 2, {}) and stats.comparing > 0


def test_nothing_is_tried_where_no_pass_changed_anything(own):
    compiled(lambda x: (x.sin() + 1).sum())(torch.ones(3))
    assert [s.compared for s in own()] in ([], [0])


@dataclass(frozen=True)
class Forgetful(Pass):
    """Takes whatever is masked by the validity of ids as valid."""

    name = "forgetful"
    phase = Phase.PRE_GRAD
    after = ("pack-rows",)

    def run(self, graph, ctx):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.where.self):
            with ctx.rewrite("forget", node):
                node.replace_all_uses_with(node.args[1])
                graph.erase_node(node)


def test_a_graph_that_is_wrong_on_other_lengths_alone_is_found(own):
    """Every id of the first batch is small: only another one has the id for which the pass is wrong."""
    table = torch.nn.Embedding(30, 8, padding_idx=0)

    def step(ids):
        x, valid = table(ids), ids != 0
        long = valid.sum(1, keepdim=True) == 6
        return (torch.where(long[..., None], 2 * x, x) * valid[..., None]).square().sum()

    ids = torch.tensor([[3, 1, 4, 0, 0, 0], [2, 5, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0]])
    right = step(ids).item()
    wrong = Forgetful()

    def flipped(ids):
        x, valid = table(ids), ids != 0
        long = valid.sum(1, keepdim=True) == 6
        return (torch.where(~long[..., None], x, 2 * x) * valid[..., None]).square().sum()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert compiled(flipped, passes=[wrong])(ids).item() == right
    (stats,) = own()
    assert stats.fallbacks == {DIFFERS: 1} and stats.compared == 2
    assert any("a batch like that of call" in str(w.message) for w in said)


def test_a_wrong_graph_is_not_used_and_said_once(own, monkeypatch):
    monkeypatch.setattr(validate.Comparison, "differences", lambda self, inputs: ["output 0 is off"])
    model = Model()
    step = compiled(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = [step(IDS).item() for _ in range(2)]
    assert losses == [model(IDS).item()] * 2
    (stats,) = own()
    assert stats.fallbacks == {DIFFERS: 2}
    assert len([w for w in said if "differs from the captured graph" in str(w.message)]) == 1


def test_dropout_is_off_in_both_while_they_are_compared(own):
    step = compiled(Model(dropout=0.5))
    step(IDS).backward()
    (stats,) = own()
    assert stats.compared == 2 and not stats.fallbacks


def test_the_numbers_that_training_draws_are_those_without_validation():
    losses = []
    for verify in ("fast", "validate"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = Model(dropout=0.5)
        step = turbogr_compile.compile(model, verify=verify, codegen="aten")
        losses.append([step(IDS).item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_step_beyond_the_budget_is_not_tried_and_says_so(own, monkeypatch):
    monkeypatch.setattr("turbogr_compile.backend.VALIDATION", validate.Plan(1, True, False, flops=10.0))
    report = turbogr_compile.explain(Model(), IDS, verify="validate", codegen="aten")
    assert "not-compared" in str(report) and "FLOPs" in str(report)


def test_eager_raises_and_so_does_the_first_call():
    """An id beyond the table on a row that nobody reads: the packed graph would not notice."""
    table = torch.nn.Embedding(10, 4)

    def step(ids, mask):
        return (table(ids) * mask[..., None]).sum()

    ids, mask = torch.tensor([[1, 2, 99]]), torch.tensor([[1.0, 1.0, 0.0]])
    with pytest.raises(IndexError):
        step(ids, mask)
    with pytest.raises(IndexError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(step)(ids, mask)


# --- other batches ---------------------------------------------------------------------------------------


def rows(**dims) -> InputRows:
    return InputRows({int(k[1:]): v for k, v in dims.items()}, lambda inputs: inputs[0] != 0)


@pytest.mark.parametrize("left", [False, True])
def test_lengths_differ_and_pads_stay_on_their_side(left):
    ids = IDS.flip(1) if left else IDS
    lengths = (ids != 0).sum(1)
    times = torch.arange(18).view(3, 6)
    new = disturbed([ids, lengths, times, 7], rows(_0=(0, 1), _1=(0,), _2=(0, 1)))
    assert new is not None
    valid = new[0] != 0
    assert new[1].tolist() == valid.sum(1).tolist() != lengths.tolist()
    assert {1, 6} <= set(new[1].tolist()) and new[3] == 7
    side = valid.flip(1) if left else valid
    assert (side.int().diff(dim=1) <= 0).all()
    # A row that came or went has the content of one row, in every input alike.
    source = new[2]
    assert torch.equal(ids.flatten()[source], new[0])


def test_a_batch_without_padding_gives_no_clue_how_pads_look():
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert disturbed([ids], rows(_0=(0, 1))) is None


def test_inputs_are_left_as_they_are():
    before = IDS.clone()
    disturbed([IDS], rows(_0=(0, 1)))
    assert torch.equal(IDS, before)
