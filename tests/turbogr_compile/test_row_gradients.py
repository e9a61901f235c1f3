"""Tables of one process with gradients of rows: the numbers of `nn.Embedding`, and nothing as large as the table."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import turbogr_compile as turbogr
from turbogr_compile import Instrument, OptionError, Pipeline, TurbogrError
from turbogr_compile.runtime.sharding import own
from turbogr_compile.runtime.sharding.table import SLOTS

ITEMS, WIDTH, NEGATIVES = 5000, 32, 40


class Model(nn.Module):
    """Next items against sampled ones, as the training job does it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(ITEMS, WIDTH, padding_idx=0)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        valid = ids != 0
        hidden = torch.tanh(self.inner(self.items(ids))) * valid.unsqueeze(-1)
        wanted, hidden = ids[:, 1:], hidden[:, :-1]
        drawn = torch.randint(1, ITEMS, (*wanted.shape, NEGATIVES))
        own = (hidden * self.items(wanted)).sum(-1, keepdim=True)
        others = torch.einsum("bnd,bnkd->bnk", hidden, self.items(drawn))
        others = others.masked_fill(drawn == wanted.unsqueeze(-1), -1e9)
        losses = -F.log_softmax(torch.cat([own, others], -1), -1)[..., 0]
        there = (wanted != 0).float()
        return (losses * there).sum() / there.sum()


def ids(seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 40, (6, 1), generator=random)
    return torch.randint(1, ITEMS, (6, 40), generator=random) * (torch.arange(40) < lengths)


def trained(rows: bool, steps: int = 3, compiled: bool = True, **options) -> tuple[list[float], Model]:
    torch._dynamo.reset()
    model = Model()
    if rows:
        turbogr.row_gradients(model)
    optimizer = turbogr.RowWiseAdagrad(model, lr=0.1) if rows else None
    sums = torch.zeros(ITEMS)
    step = turbogr.compile(model, **options) if compiled else model
    losses = []
    for i in range(steps):
        torch.manual_seed(i)
        loss = step(ids(i))
        loss.backward()
        losses.append(loss.item())
        if optimizer is not None:
            assert model.items.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():  # Adagrad with a sum for each row, of all rows
                gradient = model.items.weight.grad
                sums += gradient.square().mean(1)
                model.items.weight -= 0.1 * gradient / (sums.sqrt() + 1e-10)[:, None]
            model.zero_grad()
    return losses, model


@pytest.mark.parametrize("how", [{"compiled": False}, {}, {"passes": ["fuse-sampling{share=2}"]}])
def test_the_same_training_as_with_gradients_of_tables(how):
    (expected, dense), (found, rows) = trained(False, **how), trained(True, **how)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(rows.items.weight, dense.items.weight, rtol=1e-5, atol=1e-7)
    assert torch.equal(rows.items.weight[0], Model().items.weight[0])  # padding
    touched = (dense.items.weight != Model().items.weight).any(1)
    assert 1000 < touched.sum() < ITEMS
    assert torch.equal(rows.items.weight[~touched], Model().items.weight[~touched])


class Sizes(Instrument):
    """Values of forward and backward graphs with as many rows as the table; inputs apart."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.graphs = 0

    def finish(self, run) -> None:
        if run.phase is turbogr.Phase.POST_GRAD:
            self.graphs += 1
            for node in run.graph.nodes:
                value = node.meta.get("val")
                if node.op == "call_function" and isinstance(value, Tensor) and value.dim() and value.shape[0] == ITEMS:
                    self.found.append(str(node.target))


def test_no_value_is_as_large_as_the_table():
    seen, dense = Sizes(), Sizes()
    trained(True, 1, instruments=[seen])
    assert seen.graphs >= 2 and not seen.found
    trained(False, 1, instruments=[dense])
    assert dense.found


def test_a_pipeline_without_the_pass_is_right_too():
    less = Pipeline.default("cpu").without("row-gradients")
    torch.testing.assert_close(trained(True, pipeline=less)[0], trained(False)[0], rtol=1e-6, atol=0)


def test_a_wrong_gradient_of_rows_is_noticed(monkeypatch):
    """Receipts alone would look the same."""

    def wrong(graph, found, part, number):
        node = right(graph, found, part, number)
        if node.target is torch.ops.turbogr.own_keep_scores.default:
            query = graph.call_function(torch.ops.aten.mul.Tensor, (node.args[2], 1.01))
            node.prepend(query)
            node.update_arg(2, query)
        return node

    from turbogr_compile.passes import row_gradients

    right = row_gradients._call
    monkeypatch.setattr(row_gradients, "_call", wrong)
    with pytest.warns(UserWarning, match="gradient of .*receipts.* is off"):
        trained(True, 1, verify="validate")
    monkeypatch.setattr(row_gradients, "_call", right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(True, 1, verify="validate")


def rows_of(model: Model) -> Tensor:
    total = torch.zeros(ITEMS, WIDTH)
    found = model.items.table.take(model.items.receipts.grad, model.items.shard)
    if found is not None:
        total[found.rows] = found.values
    model.items.receipts.grad = None
    return total


def test_what_counts_is_decided_as_for_any_parameter():
    model = turbogr.row_gradients(Model())
    torch.autograd.grad(model(ids()), model.inner.weight)
    assert not rows_of(model).any()
    torch.manual_seed(0)
    loss = model(ids())
    loss.backward(retain_graph=True)
    loss.backward()
    twice = rows_of(model)
    torch.manual_seed(0)
    model(ids()).backward()
    torch.testing.assert_close(twice, 2 * rows_of(model))


def test_many_backwards_of_a_step_become_one_gradient():
    apart, together = (turbogr.row_gradients(Model()) for _ in range(2))
    rows = turbogr.RowWiseAdagrad(together)
    for model in (apart, together):
        for i in range(5):
            torch.manual_seed(i)
            model(ids(i)).backward()
            if model is together:
                rows.merge()
                assert len(model.items.table.journal) == 1
    torch.testing.assert_close(rows_of(together), rows_of(apart))


def test_more_backwards_than_there_are_slots():
    model = turbogr.row_gradients(Model())
    rows, few = turbogr.RowWiseAdagrad(model), torch.tensor([[1, 2, 3]])
    for _ in range(SLOTS // 3 + 2):
        model.items(few).sum().backward()
        rows.merge()
    assert rows_of(model)[1:4].eq(SLOTS // 3 + 2).all()


def test_checkpoints_are_those_of_an_embedding(tmp_path):
    _, model = trained(True, 1, compiled=False)
    assert model.state_dict().keys() == Model().state_dict().keys()
    plain = Model()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.items.weight, model.items.weight)
    rows = turbogr.RowWiseAdagrad(model)
    rows.state[model.items.receipts]["sum"].fill_(3)
    turbogr.Checkpoints(tmp_path).save(1, {"model": model, "rows": rows})
    other = turbogr.row_gradients(Model())
    sums = turbogr.RowWiseAdagrad(other)
    assert turbogr.Checkpoints(tmp_path).load({"model": other, "rows": sums}) == 1
    assert torch.equal(other.items.weight, model.items.weight)
    assert sums.state[other.items.receipts]["sum"].eq(3).all()


def test_what_cannot_have_gradients_of_rows_says_so():
    model = Model()
    with pytest.raises(OptionError, match=r"no table 'item' \(did you mean 'items'\?\)"):
        turbogr.row_gradients(model, ["item"])
    tied = Model()
    tied.out = nn.Linear(WIDTH, ITEMS, bias=False)
    tied.out.weight = tied.items.weight
    assert type(turbogr.row_gradients(tied).items) is nn.Embedding
    with pytest.raises(OptionError, match=r"its weight is also out\.weight"):
        turbogr.row_gradients(tied, ["items"])
    turbogr.row_gradients(model)
    assert isinstance(model.items, own.OwnEmbedding) and "gradients of rows" in repr(model.items)
    with pytest.raises(TurbogrError, match="cannot be pickled or copied"):
        copy.deepcopy(model)
    rows = turbogr.RowWiseAdagrad(model)
    (model.items(ids()).sum() + model.items.weight.sum()).backward()
    with pytest.raises(TurbogrError, match="has a gradient of its own"):
        rows.step()
    with pytest.raises(OptionError, match=r"shard\(model, plan\) first, or row_gradients\(model\)"):
        turbogr.RowWiseAdagrad(Model())


def test_a_frozen_table_stays():
    model = Model()
    model.items.weight.requires_grad_(False)
    turbogr.row_gradients(model)
    model(ids()).backward()
    assert not model.items.table.journal
    with pytest.raises(OptionError, match="all tables are frozen"):
        turbogr.RowWiseAdagrad(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_is_frozen_and_thawed_as_its_weight_is(compiled):
    model = turbogr.row_gradients(Model())
    rows, step = turbogr.RowSGD(model, lr=0.1), turbogr.compile(model) if compiled else model
    for trained in (True, False, True):
        model.items.weight.requires_grad_(trained)
        before = model.items.weight.detach().clone()
        step(ids()).backward()
        rows.step()
        assert torch.equal(model.items.weight, before) != trained
    late = Model().requires_grad_(False)
    turbogr.row_gradients(late).requires_grad_(True)
    rows = turbogr.RowSGD(late)
    late(ids()).backward()
    assert late.items.table.journal and rows.tables


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_lookups_of_nothing(shape, compiled):
    torch._dynamo.reset()
    table = turbogr.row_gradients(nn.Sequential(nn.Embedding(5, 3)))
    step = turbogr.compile(table) if compiled else table
    for wanted in (torch.zeros(shape, dtype=torch.int64), torch.tensor([1])):
        step(wanted).sum().backward()
    found = table[0].table.take(table[0].receipts.grad, table[0].shard)
    assert found.rows.tolist() == [1] and found.values.eq(1).all()


def test_hooks_are_not_lost():
    model = Model()
    model.items.register_forward_hook(lambda module, given, rows: rows * 2)
    assert type(turbogr.row_gradients(model).items) is nn.Embedding
    masked = Model()
    masked.items.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(OptionError, match="hooks are called for it"):
        turbogr.row_gradients(masked, ["items"])


def test_several_processes_are_told_apart_from_one(monkeypatch):
    """Nobody would average the gradients of their tables."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(OptionError, match=r"for one process, and there are 2"):
        turbogr.row_gradients(Model())


def test_values_of_tables_are_drawn_by_a_function():
    with pytest.raises(OptionError, match="init must be a function of rows and a generator, got 3"):
        turbogr.row_gradients(nn.ModuleDict({"table": nn.Embedding(10, 4, device="meta")}), init=3)
