"""Validation, which is on by default: a graph that a pass got wrong is found before its first result is used."""

from __future__ import annotations

import gc
import re
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile import Instrument, Options, Pass, Phase, Remark
from turbogr_compile.check import stand_ins, validate
from turbogr_compile.check.disturbance import Disturbance, disturbances, disturbed
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


@dataclass(frozen=True)
class Doubled(Pass):
    """Wrong: doubles every softmax."""

    name = "doubled"
    phase = Phase.PRE_GRAD
    before = ("pack-rows",)

    def run(self, graph, ctx):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int):
            with ctx.rewrite("double", node):
                with graph.inserting_after(node):
                    twice = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
                    twice.meta = dict(node.meta)
                node.replace_all_uses_with(twice, delete_user_cb=lambda user, own=twice: user is not own)


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


# --- beyond the budget -----------------------------------------------------------------------------------


class Kinds(Instrument):
    """Remarks of validation."""

    def __init__(self) -> None:
        self.said: list[Remark] = []

    def finish(self, run):
        self.said += [r for r in run.remarks if r.pass_name == "validate"]


def within(monkeypatch, **budget):
    monkeypatch.setattr("turbogr_compile.backend.VALIDATION", validate.Plan(1, True, False, **budget))


def long_batch(sequences: int, columns: int, shortest: int = 1) -> torch.Tensor:
    lengths = torch.linspace(shortest, columns, sequences).long()
    ids = torch.randint(1, 30, (sequences, columns))
    return ids.masked_fill(torch.arange(columns) >= lengths[:, None], 0)


def test_fixed_sizes_beyond_the_budget_are_not_tried_and_that_is_said(own, monkeypatch):
    within(monkeypatch, flops=10.0)
    kinds = Kinds()
    compiled(Model(), dynamic=False, instruments=[kinds])(IDS)
    (remark,) = kinds.said
    assert remark.id == "not-compared" and "FLOP" in remark.text and "its sizes are fixed" in remark.text
    (stats,) = own()
    assert stats.compared == 0 and stats.uncompared == remark.text


@pytest.mark.parametrize(
    ("flops", "text"), [(1e5, "2 of 40 sequences are"), (1e4, "3 of 40 sequences, 8 of 32 columns")]
)
def test_beyond_the_budget_a_few_sequences_are_tried(own, monkeypatch, flops, text):
    within(monkeypatch, flops=4 * flops)
    kinds, model = Kinds(), Model()
    ids = long_batch(40, 32)
    assert compiled(model, dynamic=True, instruments=[kinds])(ids).item() == pytest.approx(model(ids).item(), rel=1e-5)
    assert {(r.id, text in r.text) for r in kinds.said} == {("compared-in-part", True)}, kinds.said
    (stats,) = own()
    assert stats.compared == 2 and not stats.fallbacks and not stats.uncompared


def test_columns_alone_are_fewer_where_only_they_vary(own, monkeypatch):
    within(monkeypatch, flops=4e5)
    kinds = Kinds()
    step = compiled(Model(), instruments=[kinds])
    step(long_batch(6, 8))
    step(long_batch(6, 64))
    assert [r.id for r in kinds.said] == ["compared-in-part"] and "sequences" not in kinds.said[0].text
    assert [s.compared for s in own()] == [2, 2]


def test_a_wrong_graph_is_found_on_a_sample(own, monkeypatch):
    within(monkeypatch, flops=4e5)
    model, ids = Model(), long_batch(40, 32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = compiled(model, dynamic=True, passes=[Doubled()])(ids)
    assert loss.item() == model(ids).item()
    (text,) = (t for w in said if "differs from the captured graph" in (t := str(w.message)))
    assert "of 40 sequences of call 1" in text
    assert re.search(r"first after \d+ doubled \(double of %softmax\w*\)", text), "names pass and rewrite"


def test_a_sample_keeps_the_ends_the_padding_and_the_lengths(monkeypatch):
    within(monkeypatch, flops=4e4)
    seen = []

    def kept(self, inputs, made_up=False):
        seen.append(inputs)
        return []

    monkeypatch.setattr(validate.Comparison, "differences", kept)
    table = torch.nn.Embedding(30, 8)

    def step(ids, lengths, times):
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        x = table(ids) + times[..., None]
        scores = (x @ x.transpose(1, 2)).masked_fill(~valid[:, None], float("-inf"))
        return ((scores.softmax(-1) @ x) * valid[..., None]).square().sum()

    ids = long_batch(40, 64, shortest=4)
    lengths, times = (ids != 0).sum(1), torch.arange(64.0).expand(40, 64).t().contiguous().t()
    compiled(step, dynamic=True)(ids, lengths, times)
    tensors = [x for x in seen[0] if isinstance(x, torch.Tensor) and not x.requires_grad]
    few = next(x for x in tensors if x.dtype == torch.int64 and x.dim() == 2)
    assert few.shape[0] < 40 and few.shape[1] < 64
    (new_lengths,) = (x for x in tensors if x.dim() == 1)
    assert torch.equal(new_lengths, (few != 0).sum(1)) and {1, few.shape[1]} <= set(new_lengths.clamp(min=1).tolist())
    (new_times,) = (x for x in tensors if x.is_floating_point())
    assert new_times.t().is_contiguous() and (new_times.diff(dim=1) > 0).all() and new_times[0, -1] == 63


# --- nothing happens twice -------------------------------------------------------------------------------


class Normed(torch.nn.Module):
    """Writes running statistics, a counter and, without gradients, one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(30, 8, padding_idx=0), torch.nn.BatchNorm1d(8)
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, ids):
        x, valid = self.table(ids), ids != 0
        with torch.no_grad():
            self.scale.mul_(0.5)
        pooled = self.norm((torch.tanh(x * self.scale) * valid[..., None]).sum(1))
        return pooled.square().sum()


def test_buffers_and_parameters_are_written_once():
    found = []
    for verify in (None, "validate"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Normed()
        step = model if verify is None else turbogr_compile.compile(model, verify=verify, codegen="aten")
        with torch.no_grad():
            for _ in range(3):
                step(IDS)
        found.append(model.state_dict())
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted)
    assert found[1]["norm.num_batches_tracked"] == 3 and found[1]["scale"][0] == 0.125


COUNTED = []


@torch.library.custom_op("turbogr_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    COUNTED.append(1)
    return x.clone()


counted.register_fake(torch.empty_like)
counted.register_autograd(lambda ctx, grad: grad)


def test_an_op_of_the_user_runs_once_a_step(own):
    kinds, model = Kinds(), Model()
    COUNTED.clear()
    step = compiled(lambda ids: counted(model(ids)) * 2, instruments=[kinds])
    for _ in range(2):
        step(IDS).backward()
    assert len(COUNTED) == 2
    (remark,) = kinds.said
    assert remark.id == "not-compared" and "turbogr_tests.counted.default may do more" in remark.text
    assert remark.line is not None and "counted(model(ids))" in str(remark.line)


def test_an_op_that_only_computes_is_tried(own, monkeypatch):
    monkeypatch.setattr(stand_ins, "_PURE", set())
    stand_ins.only_computes("turbogr_tests::counted")
    model = Model()
    compiled(lambda ids: counted(model(ids)) * 2)(IDS)
    assert [s.compared for s in own()] == [2]


def test_batches_that_were_prepared_ahead_are_used_and_kept(own):
    data = [IDS, IDS.flip(0), IDS.flip(0).clone(), IDS.clone()]
    model = Model()
    step = compiled(model)
    for ids in turbogr_compile.ahead(data):
        assert step(ids).item() == pytest.approx(model(ids).item(), rel=1e-5)
    (stats,) = own()
    assert (stats.calls, stats.compared, stats.ahead) == (4, 2, 3)


def test_gradients_that_are_there_already_stay():
    model = Model()
    model.table.weight.grad = torch.full((30, 8), 7.0)
    compiled(model)(IDS)
    assert (model.table.weight.grad == 7).all()


# --- errors ----------------------------------------------------------------------------------------------


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


def test_one_sequence_has_a_hole_where_no_lengths_are_given():
    """The batch has one with a single row, one full and one with a hole in the middle."""
    ids = long_batch(4, 12)
    new = disturbed([ids], rows(_0=(0, 1)), Disturbance())
    assert new is not None
    valid = new[0] != 0
    holes = [row for row in valid if (row.int().diff() > 0).any() and row[0]]
    assert len(holes) == 1 and valid.sum(1).min() == 1 and valid.all(1).any()
    assert disturbed([ids, (ids != 0).sum(1)], rows(_0=(0, 1), _1=(0,)), Disturbance()) is None


def test_pads_hold_other_finite_values_and_masks_stay_masks():
    ids = long_batch(4, 12)
    times = torch.where(ids != 0, torch.rand(4, 12) + 1, 0.0)
    mask = (ids != 0).float()
    new = disturbed([ids, times, mask], rows(_0=(0, 1), _1=(0, 1), _2=(0, 1)), Disturbance(hole=False))
    assert new is not None
    valid = new[0] != 0
    assert new[1].isfinite().all() and (new[1] > 0).all(), "pads hold what valid rows hold"
    assert torch.equal(new[2] != 0, valid) and not valid.all()


def test_the_most_hostile_batch_comes_first():
    ids = long_batch(4, 12)
    assert len(list(disturbances([ids], rows(_0=(0, 1))))) == 3
    assert len(list(disturbances([ids, (ids != 0).sum(1)], rows(_0=(0, 1), _1=(0,))))) == 2


@dataclass(frozen=True)
class Unmasked(Pass):
    """Wrong: takes for granted that an input is zero in its pads."""

    name = "unmasked"
    phase = Phase.PRE_GRAD
    before = ("pack-rows",)

    def run(self, graph, ctx):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            if node.args[0].op == "placeholder":
                with ctx.rewrite("unmask", node):
                    node.replace_all_uses_with(node.args[0])
                    graph.erase_node(node)


def test_a_graph_that_reads_pads_is_found_by_what_is_in_them(own):
    """Zeros in the pads of the first batch hide that a mask was forgotten."""
    table = torch.nn.Embedding(30, 8, padding_idx=0)

    def step(ids, times):
        valid = ids != 0
        return (torch.tanh(table(ids)) * valid[..., None]).square().sum() * (times * valid).square().sum()

    ids = long_batch(4, 12)
    times = torch.where(ids != 0, torch.rand(4, 12) + 1, 0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = compiled(step, passes=[Unmasked()])(ids, times)
    assert loss.item() == pytest.approx(step(ids, times).item())
    assert any("a batch like that of call 1, differs" in str(w.message) for w in said)
