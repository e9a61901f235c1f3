"""Calls whose rows torch treats in a way that is easily missed: each gives what eager gives, packed or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import turbogr_compile
from turbogr_compile import Instrument, RuleError
from turbogr_compile.passes.rows import apart, declaration
from turbogr_compile.passes.rows.declaration import EVERY, Declaration
from turbogr_compile.passes.rows.ops import pointwise

pytestmark = pytest.mark.usefixtures("fresh")
aten = torch.ops.aten

SEQUENCES, COLUMNS, FEATURES = 3, 6, 4
BATCHES = [
    torch.tensor([[3, 1, 4, 0, 0, 0], [2, 5, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0]]),
    torch.tensor([[0] * 6, [7, 0, 0, 2, 0, 0], [1, 0, 3, 0, 5, 0]]),
    torch.tensor([[1, 2, 3, 4, 5, 6]] * 3),
]
POSITIONS = torch.arange(1.0, 1 + COLUMNS, dtype=torch.float64)


def told(fn, table, *batch):
    """Loss and gradient, or the error."""
    table.grad = None
    try:
        loss = fn(*batch)
    except (RuntimeError, IndexError) as error:
        return type(error)
    loss.backward()
    return loss.detach(), table.grad.clone()


def assert_same(step, table, *batches, **options):
    """In eager and compiled; a failing pass raises."""
    compiled = turbogr_compile.compile(step, target="eager", on_error="raise", **options)
    for batch in batches:
        expected, found = told(step, table, *batch), told(compiled, table, *batch)
        if isinstance(expected, type):
            assert found is expected
        else:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class Watch(Instrument):
    """The graph after packing."""

    def after(self, run, step):
        if step.pass_.name == "pack-rows":
            found = [n.meta["val"] for n in run.graph.nodes if n.target is torch.ops.aten.embedding.default]
            self.looks_up_packed = all(free_unbacked_symbols(value) for value in found)
            self.targets = [str(n.target) for n in run.graph.nodes]


def masked(ids, y):
    return (y * (ids != 0)[..., None]).sum()


def test_gather_takes_no_negative_column(table):
    """Advanced indexing counts -1 from the end, gather does not."""

    def gathers(ids, lengths):
        x = F.embedding(ids, table)
        return x.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, FEATURES)).sum()

    def indexes(ids, lengths):
        return F.embedding(ids, table)[torch.arange(SEQUENCES), lengths - 1].sum()

    batches = [(BATCHES[0], torch.tensor([3, 2, 5])), (BATCHES[0], torch.tensor([3, 0, 5]))]
    assert_same(gathers, table, *batches)
    assert_same(indexes, table, *batches)


def test_selected_rows_are_not_zero_where_they_were(table):
    def step(ids, order):
        x = (F.embedding(ids, table) + POSITIONS[order][:, None]) * (ids != 0)[..., None]
        return (x.index_select(1, order) * POSITIONS[:, None]).sum()

    assert_same(step, table, *[(BATCHES[0], torch.arange(COLUMNS).flip(0)), (BATCHES[0], torch.arange(COLUMNS))])


@pytest.mark.parametrize("start", [-10, -50, -3])
def test_a_slice_that_begins_before_the_batch(table, start):
    def step(ids):
        x = F.embedding(ids, table)[:, start:-1]
        return F.cross_entropy((x @ table.T).flatten(0, 1), ids[:, 1:][:, start + 1 :].flatten(), ignore_index=0)

    def whole(ids):
        x = F.embedding(ids, table)[:, start:-1]
        return F.cross_entropy((x @ table.T).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)

    assert_same(step if start == -3 else whole, table, *[(ids,) for ids in BATCHES])


@pytest.mark.parametrize("more, classes", [(2, 2), (1, 4)])
def test_classes_behind_another_dim(table, more, classes):
    def step(ids):
        scores = F.embedding(ids, table).view(SEQUENCES, COLUMNS, classes, more).permute(3, 2, 0, 1)
        target = (ids % classes)[None].expand(more, SEQUENCES, COLUMNS)
        return (F.cross_entropy(scores, target, reduction="none") * (ids != 0)).sum()

    assert_same(step, table, *[(ids,) for ids in BATCHES])


def test_shares_of_classes_in_more_dims(table):
    shares = torch.rand(SEQUENCES, 2, COLUMNS, 2, dtype=torch.float64)

    def step(ids):
        x = F.embedding(ids, table) * (ids != 0)[..., None]
        return F.cross_entropy(x.view(SEQUENCES, COLUMNS, 2, 2).permute(0, 2, 1, 3), shares)

    assert_same(step, table, *[(ids,) for ids in BATCHES])


def test_calls_that_took_the_whole_pass_down(table):
    above, below, nothing = torch.tensor(2.0), torch.tensor(3.0), torch.zeros(0, FEATURES, dtype=torch.float64)

    def stable(ids):
        return masked(ids, torch.sort(F.embedding(ids, table), dim=-1, stable=True)[0] * POSITIONS[:, None])

    def quotient(ids):
        return masked(ids, torch.addcdiv(F.embedding(ids, table), above, below))

    def no_features(ids):
        product = nothing @ F.embedding(ids, table).flatten(0, 1).T * (ids != 0).flatten()
        return product.sum() + masked(ids, F.embedding(ids, table))

    def legacy_empty(ids):
        return masked(ids, torch.cat([torch.tensor([]), F.embedding(ids, table)], 1) * POSITIONS[:, None])

    def cast_empty(ids):
        """Features behind the last one, none, cast by autocast."""
        x = F.embedding(ids, table)
        return masked(ids, torch.cat([x, x[..., FEATURES:].float().double()], -1) * POSITIONS[:, None])

    for step in (stable, quotient, no_features, legacy_empty, cast_empty):
        assert_same(step, table, *[(ids,) for ids in BATCHES])


def test_a_declaration_is_whole():
    with pytest.raises(RuleError, match="'mixes' and 'packed' go together"):
        turbogr_compile.row_op("shop::half", models=("x",), mixes=lambda check, node, space: None)
    with pytest.raises(RuleError, match="a list of argument names"):
        turbogr_compile.row_op("shop::half", models="x")


@pytest.mark.parametrize(
    "then", [(aten.slice.Tensor, 1, 0, 1), (aten.unsqueeze.default, 1), (aten.to.dtype, torch.half)]
)
def test_a_rule_that_gives_something_else_is_refused(table, monkeypatch, then):
    """Other dims would be broadcast into the rest, another type cast: the op stays padded, the rest is packed."""
    target, *more = then

    def packed(e, n, chosen):
        return e.call(target, pointwise.packed(e, n, chosen), *more)

    wrong = Declaration(EVERY, pointwise.broadcast, pointwise.aligned, packed=packed)
    monkeypatch.setitem(declaration._DECLARED, "sinh", wrong)
    said = Remarks()

    def step(ids):
        return masked(ids, F.embedding(ids, table).tanh().sinh())

    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=(said,))
    assert "rule-failed" in said.ids and "packed" in said.ids


def test_an_argument_that_is_not_modelled_is_named():
    """`view` to another dtype is not a view of shapes; `mm` into another dtype is another product."""
    from turbogr_compile.passes.rows.declaration import declared, why_undeclared
    from turbogr_compile.testing import trace_graph

    x = torch.randn(3, 4)
    module = trace_graph(lambda x: (x.view(torch.int32), x.view(4, 3)), [x])
    cast = module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
    assert cast and declared(cast[0]) is None
    assert why_undeclared(cast[0]) == "no row rule for view with dtype=torch.int32"


class Remarks(Instrument):
    explains = True

    def __init__(self):
        self.mixed, self.ids = [], []

    def finish(self, run):
        self.mixed += [r.text for r in run.remarks if r.id == "mixes-rows"]
        self.ids += [r.id for r in run.remarks]


ORDER = torch.tensor([2, 0])


def halves(x):
    """(rows, 2, 2)."""
    return x.reshape(-1, 2, 2)


def beside(x):
    return x.reshape(SEQUENCES, COLUMNS, FEATURES)


FEATURE_OPS = {
    "topk": lambda x: x.topk(2)[0].repeat(1, 1, 2),
    "topk_by_keyword": lambda x: torch.topk(x, 2, dim=-1, largest=False)[0].repeat(1, 1, 2),
    "sort": lambda x: x.sort(-1, descending=True)[0],
    "sort_stable": lambda x: torch.sort(x, dim=-1, stable=True)[0],
    "argsort": lambda x: x * x.argsort(-1),
    "argsort_stable": lambda x: x * torch.argsort(x, dim=-1, stable=True),
    "median": lambda x: x * x.median(-1, keepdim=True)[0],
    "nanmedian": lambda x: x * x.nanmedian(-1, keepdim=True)[0],
    "kthvalue": lambda x: x * x.kthvalue(2, -1, keepdim=True)[0],
    "mode": lambda x: x * x.round().mode(-1, keepdim=True)[0],
    "quantile": lambda x: x * x.quantile(0.3, -1, keepdim=True),
    "count_nonzero": lambda x: x * x.count_nonzero(-1)[..., None],
    "nansum": lambda x: x * x.nansum(-1, keepdim=True),
    "bucketize": lambda x: x * torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype), right=True),
    "isin": lambda x: x * torch.isin(x.round(), torch.tensor([0.0, 1.0], dtype=x.dtype)),
    "max": lambda x: x * x.max(-1, keepdim=True)[0],
    "cummax": lambda x: x.cummax(-1)[0],
    "cummin": lambda x: x.cummin(-1)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "glu": lambda x: F.glu(x, -1).repeat(1, 1, 2),
    "softmin": lambda x: F.softmin(x, -1),
    "diff": lambda x: F.pad(x.diff(dim=-1), (0, 1)),
    "picked_features": lambda x: x[..., [-2, 0, 0, 3]],
    "picked_in_the_middle": lambda x: beside(x.view(SEQUENCES, COLUMNS, 2, 2)[:, :, [-1, 0]]),
    "one_picked": lambda x: x + beside(x.view(SEQUENCES, COLUMNS, 2, 2)[:, :, [-1], :].repeat(1, 1, 2, 1)),
    "picked_by_a_table": lambda x: x.view(SEQUENCES, COLUMNS, 4)[..., torch.tensor([[0, 1], [-1, 2]])].flatten(2),
    "cat_nothing": lambda x: torch.cat([x[..., :4].tanh(), x[..., 4:]], -1),
    "cat_nothing_of_another_dtype": lambda x: torch.cat([x.float(), x[..., 4:]], -1),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0)[..., :FEATURES],
    "pad_inner": lambda x: beside(F.pad(x.view(SEQUENCES, COLUMNS, 2, 2), (0, 1, 1, 0))[..., 1:, :2]),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "unfold": lambda x: x.unfold(-1, 2, 1).sum(-2).repeat(1, 1, 2),
    "tril": lambda x: beside(x.view(SEQUENCES, COLUMNS, 2, 2).tril()),
    "triu": lambda x: beside(halves(x).triu(1)),
    "cosine_similarity": lambda x: x * F.cosine_similarity(x, x.tanh(), dim=-1)[..., None],
    "hardswish": F.hardswish,
    "rsub": lambda x: torch.rsub(x, x.tanh(), alpha=2),
    "maximum_of_two": lambda x: torch.max(x, x.tanh()),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1], dtype=x.dtype)),
    "prelu_channels": lambda x: beside(F.prelu(x.flatten(0, 1), torch.arange(4, dtype=x.dtype))),
    "group_norm": lambda x: beside(F.group_norm(x.flatten(0, 1), 2)),
    "instance_norm": lambda x: beside(F.instance_norm(halves(x))),
    "batch_norm_eval": lambda x: beside(F.batch_norm(x.flatten(0, 1), x.new_ones(4), x.new_ones(4))),
    "batch_norm_eval_turned": lambda x: F.batch_norm(x.mT, x.new_ones(4), x.new_ones(4)).mT,
    "baddbmm": lambda x: beside(torch.baddbmm(halves(x), halves(x), halves(x).tanh(), beta=2, alpha=3)),
    "index_fill": lambda x: x.index_fill(-1, ORDER, 2.0),
    "index_copy": lambda x: x.index_copy(-1, ORDER, x[..., :2].tanh()),
    "index_add": lambda x: x.index_add(-1, ORDER, x[..., :2].tanh(), alpha=2),
    "select_scatter": lambda x: x.select_scatter(x.sum(-1), -1, 1),
    "slice_scatter": lambda x: x.slice_scatter(x[..., 1:3], -1, 0, 2),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(-1), -1),
    "scatter": lambda x: x.scatter(-1, x.argsort(-1), x.tanh()),
    "scatter_add": lambda x: x.scatter_add(-1, x.argsort(-1), x.tanh()),
    "scatter_value": lambda x: x.scatter(-1, x.argsort(-1)[..., :2], 7.0),
}


@pytest.mark.parametrize("fn", FEATURE_OPS.values(), ids=FEATURE_OPS)
def test_features_of_packed_rows(table, fn):
    """Ops on features run on the rows that count, and no rows are mixed."""

    def step(ids):
        x = fn(F.embedding(ids, table) + POSITIONS[:, None] / 7)
        return F.cross_entropy((x @ table.T).flatten(0, 1), ids.flatten(), ignore_index=0)

    told = Remarks()
    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=(told,))
    assert told.mixed == []


def test_gradients_that_only_a_value_without_elements_has(table):
    """Zero, and not missing: such a value is not made without what it is made of."""
    weight = torch.randn(FEATURES, FEATURES, dtype=torch.float64, requires_grad=True)

    def step(ids):
        x = F.embedding(ids, table)
        x = torch.cat([x, (x @ weight)[..., FEATURES:]], -1)
        return F.cross_entropy((x @ table.T).flatten(0, 1), ids.flatten(), ignore_index=0)

    turbogr_compile.compile(step, target="eager", on_error="raise")(BATCHES[0]).backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(
    "fn, stays",
    [
        (lambda x: F.elu(x, 2.0), True),
        (lambda x: F.hardtanh(x, 0.5, 1.0), False),
        (lambda x: F.hardtanh(x, -0.5, 1.0), True),
        (lambda x: F.threshold(x, 0.1, 3.0), False),
        (lambda x: F.threshold(x, -0.1, 3.0), True),
        (lambda x: x.round(decimals=1), True),
        (lambda x: x.clamp(min=0.5), False),
        (lambda x: x.clamp(max=0.5), True),
        (lambda x: x**0, False),
        (lambda x: x**2, True),
        (lambda x: x.gt(-1), False),
        (lambda x: x.add(1), False),
        (torch.cos, False),
        (torch.sin, True),
        (lambda x: torch.atan2(x, x), False),  # of two negative zeros it is -pi
        (torch.signbit, False),
    ],
)
def test_the_op_itself_says_what_it_makes_of_zero(fn, stays):
    from tests.ops.declared import Declarations

    said = Declarations(fn, [torch.randn(3, 4)])
    assert said.keeps_zero(said.nodes[-1]) is stays


@pytest.mark.parametrize(
    "told_apart",
    [
        lambda x: torch.atan2(x, torch.tensor(-1.0)),
        lambda x: torch.atan2(-x.reshape(-1, FEATURES), torch.tensor(-1.0)),
        lambda x: torch.atan2(torch.cat([x, x + 1], -1), torch.tensor(-1.0)),
        lambda x: torch.ones_like(x).copysign(x),
        lambda x: x.signbit().double() + 0 * x,
        lambda x: torch.atan(1 / x.detach()) + 0 * x,
    ],
)
def test_a_zero_on_a_pad_keeps_its_sign_where_it_matters(table, told_apart):
    """-2.0 * 0 is -0.0, and a row that is not computed is 0.0."""

    def step(ids):
        x = F.embedding(ids, table) * (ids != 0)[..., None]
        return told_apart(x).sum()

    with torch.no_grad():
        table.copy_(-table.abs())
    assert_same(step, table, *[(ids,) for ids in BATCHES])


def test_a_sign_that_nobody_sees_costs_nothing(table):
    def step(ids):
        x = F.embedding(ids, table) * (ids != 0)[..., None]
        return torch.sigmoid(x).sum() + (1 / (1 + x.exp())).sum()

    run = packed(step, table)
    assert run.looks_up_packed


def packed(step, table):
    """What was seen of the compiled step, which gives what eager gives."""
    watch = Watch()
    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=(watch,), worth="always")
    return watch


@pytest.mark.parametrize(
    "op",
    [
        lambda x, w: torch.addcmul(x, w, w.sum()),
        lambda x, w: torch.lerp(x, w, 0.3),
        lambda x, w: torch.addcdiv(x, w, w.exp(), value=0.5),
    ],
)
def test_three_operands_of_different_shapes(table, op):
    weight = torch.randn(FEATURES, dtype=torch.float64)

    def step(ids):
        return masked(ids, op(F.embedding(ids, table), weight))

    assert packed(step, table).looks_up_packed


def test_complex_numbers_mean_nothing_and_break_nothing(table):
    def step(ids):
        mask = (ids == 0).double()
        bias = torch.complex(mask, mask)[:, None, :].abs() * -1e9
        x = F.embedding(ids, table)
        return masked(ids, (x @ x.mT + bias).softmax(-1) @ x)

    assert_same(step, table, *[(ids,) for ids in BATCHES[::2]])


@pytest.mark.parametrize(
    "op, packs",
    [
        (lambda x: F.pairwise_distance(x, x.flip(-1)), True),
        (lambda x: x.nanmean(-1), True),
        (lambda x: torch.tensordot(x, torch.eye(FEATURES, dtype=torch.float64), 1), True),
        (lambda x: torch.isclose(x, x * 1.0000001).double() * x, True),
        (lambda x: torch.hstack([x.flatten(0, 1), x.flatten(0, 1)]), True),
        (lambda x: x.nanmean(1, keepdim=True) + x, False),
        (lambda x: torch.nanmean(x.flatten(0, 1), 0) + x, False),
    ],
)
def test_ops_that_torch_knows_as_others(table, op, packs):
    """Taken apart where all of it is computed on rows, and whole elsewhere."""

    def step(ids):
        y = op(F.embedding(ids, table))
        mask = (ids != 0).reshape(y.shape[: ids.dim()] if y.shape[:2] == ids.shape else (-1,))
        return (y * mask.reshape(*mask.shape, *[1] * (y.dim() - mask.dim()))).sum()

    watch = packed(step, table)
    assert watch.looks_up_packed == packs
    if not packs:
        assert any("nanmean" in target for target in watch.targets)


def test_a_size_is_not_taken_apart(monkeypatch):
    """The op that reads it is known to torch as itself: tried, it would be tried again, until the stack is full."""
    tried = []
    monkeypatch.setattr(apart, "_traced", lambda node, whole: tried.append(node.target))
    graph = make_fx(lambda x: x.reshape(-1, x.shape[0]) * 2, tracing_mode="symbolic")(torch.rand(3, 4)).graph
    assert graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    assert apart.take_apart(graph) == [] and not tried


def rotated(x):
    """Rotary positions by complex numbers."""
    angle = torch.polar(torch.ones(2, dtype=torch.float64), torch.arange(2.0, dtype=torch.float64))
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * angle
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize(
    "op",
    [
        rotated,
        lambda x: torch.linalg.cross(x[..., :3], x[..., 1:]),
        lambda x: torch.linalg.cross(x[..., :3].transpose(0, 2), x[..., 1:].transpose(0, 2), dim=0).transpose(0, 2),
        lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho"), n=FEATURES, norm="ortho"),
        lambda x: torch.diag_embed(x).flatten(-2),
        lambda x: (x[..., None] * x[..., None, :]).diagonal(dim1=-2, dim2=-1),
        lambda x: torch.std_mean(x, -1, keepdim=True)[0] * x,
        lambda x: F.avg_pool1d(x, 2, 1),
        lambda x: torch.frexp(x).mantissa * x,
    ],
)
def test_ops_that_were_found_to_keep_rows_apart(table, op):
    def step(ids):
        return masked(ids, op(F.embedding(ids, table)))

    assert packed(step, table).looks_up_packed


def test_a_piece_without_elements(table):
    def step(ids):
        x, none = F.embedding(ids, table).split([FEATURES, 0], -1)
        return masked(ids, x) + none.reshape(-1, FEATURES).sum() + (ids[:0].reshape(-1, 2) != 0).sum()

    assert_same(step, table, *[(ids,) for ids in BATCHES])


def test_queries_that_are_pairs_are_read_as_they_are(table):
    """Scores times scores: features of these queries run over columns, too, and are no rows."""

    def step(ids):
        x = F.embedding(ids, table)
        scores = (x @ x.transpose(1, 2)) @ torch.full((SEQUENCES, COLUMNS, COLUMNS), 0.5, dtype=torch.float64)
        return masked(ids, scores.masked_fill((ids == 0)[:, None, :], -1e9).softmax(-1) @ x)

    assert_same(step, table, *[(ids,) for ids in BATCHES])


@pytest.mark.parametrize("numbers", [lambda ids: ids, lambda ids: ids.double() / 2, lambda ids: (ids > 1) & (ids != 4)])
def test_rows_are_kept_by_what_is_not_zero(numbers, table):
    """Numbers count as truth where they are not zero, and not only where they are one."""
    watch = Watch()

    def step(ids):
        rows = numbers(ids).flatten().nonzero().squeeze(1)
        return F.embedding(ids, table).flatten(0, 1)[rows].square().sum()

    assert_same(step, table, *((ids,) for ids in BATCHES), worth="always", instruments=[watch])
    assert watch.looks_up_packed


def test_masks_that_are_expanded_over_features_select_rows(table):
    watch = Watch()

    def step(ids):
        x = F.embedding(ids, table)
        return x.masked_select((ids != 0).unsqueeze(-1).expand_as(x)).view(-1, FEATURES).square().sum()

    assert_same(step, table, *((ids,) for ids in BATCHES), worth="always", instruments=[watch])
    assert watch.looks_up_packed


def test_losses_with_two_weights(table):
    watch = Watch()

    def step(ids):
        weight, more = (ids != 0).double(), torch.full((), 2.0, dtype=torch.float64)
        scores = F.embedding(ids, table).sum(-1)
        return F.binary_cross_entropy_with_logits(scores, weight / 3, weight=weight, pos_weight=more)

    assert_same(step, table, *((ids,) for ids in BATCHES), worth="always", instruments=[watch])
    assert watch.looks_up_packed


def test_masks_of_single_elements_select_elements(table):
    def step(ids):
        x = F.embedding(ids, table)
        return x.masked_select((ids != 0).unsqueeze(-1) & (x.detach() > 0)).square().sum()

    assert_same(step, table, *((ids,) for ids in BATCHES), worth="always")
