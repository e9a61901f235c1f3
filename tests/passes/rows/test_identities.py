"""Ops that are taken apart by an identity: the same numbers and gradients as the op, and rows that stay apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile.passes.rows import identities

from .test_row_ops import BATCHES, COLUMNS, FEATURES, SEQUENCES, Watch, assert_same, masked

pytestmark = pytest.mark.usefixtures("fresh")

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)
TWICE = torch.tensor([0, 2, 2])


def floats(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=G)


def places(*shape, below=4):
    return torch.randint(0, below, shape, generator=G)


X, ROWS = floats(4, 5), places(3, 5)
X[0, 0] = -0.0
STATISTICS = (floats(5), floats(5).abs())
HALF = tuple(s.float() for s in STATISTICS)
IMAGES = floats(2, 8, 4, 6)
SHARES = (floats(4, 5).sigmoid(), floats(4, 5).sigmoid())
CALLS = [
    *[(loss.default, SHARES, {"weight": ROWS[:1].double(), "reduction": kind}) for kind in (1, 2)
      for loss in (aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits)],
    *[(loss.default, SHARES, {"reduction": kind}) for kind in (1, 2)
      for loss in (aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.kl_div)],
    (aten.scatter_add.default, (X, 0, ROWS, floats(3, 5))),
    (aten.scatter_add.default, (places(4, 5), 1, ROWS, places(3, 5))),
    (aten.index_add.default, (X, 0, TWICE, floats(3, 5)), {"alpha": 0.5}),
    (aten._unsafe_masked_index_put_accumulate.default, (X, torch.tensor([[True], [False], [True]]), [TWICE],
     floats(3, 5))),
    *[(aten.scatter_reduce.two, (X, 0, ROWS, floats(3, 5), kind), {"include_self": own})
      for kind in ("sum", "prod", "mean", "amax") for own in (True, False)],
    *[(aten.scatter_reduce.two, (places(4, 5), 0, ROWS, places(3, 5) - 2, kind), {"include_self": own})
      for kind in ("sum", "prod", "mean", "amax", "amin") for own in (True, False)],
    *[(aten.scatter_reduce.two, (X > 0, 0, ROWS, X[1:] > 0.3, kind), {"include_self": own})
      for kind in ("sum", "prod", "amax", "amin") for own in (True, False)],
    (aten.scatter_reduce.two, (X, 0, ROWS, floats(3, 5).masked_fill(ROWS == 1, 0), "prod")),
    (aten.scatter.src, (X, 0, ROWS, floats(3, 5))),
    (aten.scatter.value, (X, 1, ROWS, 2.5)),
    (aten.index_copy.default, (X, 0, torch.tensor([3, 1]), floats(2, 5))),
    (aten.index_put.default, (X, [TWICE, None], floats(3, 5))),
    (aten.index_put.default, (X, [TWICE, TWICE], floats(3), True)),
    (aten.index_put.default, (X, [X > 0.3], floats(int((X > 0.3).sum())))),
    (aten.index_put.default, (X, [None, torch.tensor([-1, 0])], floats(4, 1))),
    (aten.put.default, (X, torch.tensor([7, -1, 3]), floats(3))),
    (aten.put.default, (X, torch.tensor([7, 7, 3]), floats(3), True)),
    (aten.masked_scatter.default, (X, X > 0, floats(30))),
    (aten.masked_scatter.default, (X, torch.tensor([True, False, True, False, True]), floats(30))),
    (aten.index_fill.int_Scalar, (X, 1, TWICE, 2.5)),
    (aten.tril.default, (X, -1)),
    (aten.triu.default, (floats(2, 4, 5), 1)),
    (aten.diagonal_scatter.default, (X, floats(4), 1)),
    (aten.select_scatter.default, (X, floats(4), 1, -2)),
    (aten.select_scatter.default, (X[:1], floats(5), 0, 0)),
    (aten.slice_scatter.default, (X, floats(4, 3), 1, 2, 9)),
    (aten.slice_scatter.default, (X, floats(4, 2), 1, 1, 5, 2)),
    (aten.slice_scatter.default, (X, floats(4, 5), 1)),
    (aten.slice_scatter.default, (X, floats(2, 5), 0, -3, -1)),
    (aten.addr.default, (X, floats(4), floats(5)), {"alpha": 2.0, "beta": 0.5}),
    (aten.addr.default, (X, floats(4), floats(5)), {"beta": 0.0}),
    (aten.addr.default, (X > 0, X[:, 0] > 0, X[0] > 0)),
    (aten.addmv.default, (floats(4), X, floats(5))),
    (aten.addmm.default, (X, floats(4, 3), floats(3, 5)), {"beta": 0.5}),
    (aten.baddbmm.default, (floats(2, 4, 5), floats(2, 4, 3), floats(2, 3, 5)), {"alpha": 3.0}),
    (aten.addbmm.default, (X, floats(2, 4, 3), floats(2, 3, 5)), {"beta": 2.0}),
    *[(aten.rot90.default, (floats(2, 4, 5), k, [2, 1])) for k in range(-1, 4)],
    (aten.resize_as.default, (ROWS, places(3, 5))),
    (aten.resize_as.default, (ROWS, places(5, 3))),
    (aten.pixel_shuffle.default, (IMAGES, 2)),
    (aten.pixel_unshuffle.default, (IMAGES, 2)),
    (aten.channel_shuffle.default, (IMAGES, 4)),
    (aten.batch_norm.default, (X, floats(5), floats(5), *STATISTICS, False, 0.1, 1e-5, True)),
    (aten.batch_norm.default, (X, floats(5), floats(5), *STATISTICS, True, 0.1, 1e-5, True)),
    (aten.batch_norm.default, (X.bfloat16(), None, None, *HALF, False, 0.1, 1e-5, True)),
    (aten._native_batch_norm_legit_no_training.default, (X, floats(5), None, *STATISTICS, 0.1, 1e-5)),
    (aten.instance_norm.default, (IMAGES, floats(8), floats(8), None, None, True, 0.1, 1e-5, True)),
    (aten.instance_norm.default, (X[..., None], floats(5), None, *STATISTICS, False, 0.1, 1e-5, True)),
]  # fmt: skip
UNKNOWN = {"amax of floats": 2, "beta of zero, booleans": 2, "training, dtypes": 2, "another size": 1}


def called(fn, args, kwargs):
    """The first result and the gradients of all operands."""
    given = [id(a) for a in (*STATISTICS, *HALF)]
    live = [a.clone().requires_grad_(a.is_floating_point() and id(a) not in given) if isinstance(a, torch.Tensor) else a
            for a in args]  # fmt: skip
    found = fn(*live, **kwargs)
    if found is NotImplemented:
        return found
    y = found[0] if isinstance(found, tuple) else found
    slopes = []
    if y.requires_grad:
        operands = [a for a in live if isinstance(a, torch.Tensor) and a.requires_grad]
        slopes = torch.autograd.grad((y * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum(), operands,
                                     allow_unused=True)  # fmt: skip
    return y.detach(), slopes


@pytest.mark.parametrize("along", [False, True], ids=["anywhere", "along"])
def test_identities_hold(along):
    """For values, signs of zeros among them, and gradients, with duplicates and operands that have no influence."""
    unknown = 0
    for target, args, *more in CALLS:
        kwargs = more[0] if more else {}
        wanted, found = (called(fn, args, kwargs) for fn in (target, identities.identity_of(target, along)))
        if found is NotImplemented:
            unknown += 1
            continue
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12, msg=str(target))
        if target in WRITES and wanted[0].is_floating_point():
            assert torch.equal(found[0].signbit(), wanted[0].signbit()), target
        assert [g is None for g in found[1]] == [g is None for g in wanted[1]], target
        for mine, its in zip(found[1], wanted[1], strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10, msg=str(target))
    assert unknown == sum(UNKNOWN.values()) + (2 if along else 0)  # a step, a start from the end


LARGE = torch.full((1, 1, 1), -60000.0, dtype=torch.float16)
SAME, MORE = torch.tensor([0, 0]), torch.full((2,), 40000.0, dtype=torch.float16)
NARROW = [
    (aten.addmm.default, (LARGE[0], -LARGE[0] / 256, LARGE[0] / -200)),
    (aten.addmm.default, (-LARGE[0], LARGE[0] / 256, LARGE[0] / -200), {"beta": 1.5}),
    (aten.baddbmm.default, (LARGE, -LARGE / 256, LARGE / -200)),
    (aten.baddbmm.default, (LARGE, -LARGE, LARGE / -200), {"alpha": 1 / 256}),
    (aten.addbmm.default, (LARGE[0], -LARGE / 256, LARGE / -200)),
    (aten.scatter_add.default, (LARGE[0, 0], 0, SAME, MORE)),
    (aten.index_add.default, (LARGE[0, 0], 0, SAME, MORE)),
    (aten.index_put.default, (LARGE[0, 0], [SAME], MORE, True)),
    (aten.put.default, (LARGE[0, 0], SAME, MORE, True)),
    (aten._unsafe_masked_index_put_accumulate.default, (LARGE[0, 0], torch.tensor([True, True]), [SAME], MORE)),
    (aten.scatter_reduce.two, (LARGE[0, 0], 0, SAME, MORE, "sum")),
    (aten.scatter_reduce.two, (LARGE[0, 0], 0, SAME, MORE, "mean")),
    (aten.scatter_reduce.two, (LARGE[0, 0] / -6e7, 0, SAME, MORE / 100, "prod")),
]  # fmt: skip


@pytest.mark.parametrize("call", NARROW, ids=lambda call: str(call[0]))
def test_parts_may_be_larger_than_a_half_type_holds(call):
    """What is written takes away again what the op itself never has as a number of its own."""
    target, args, *more = call
    wanted, found = (
        called(fn, args, more[0] if more else {}) for fn in (target, identities.identity_of(target, False))
    )
    assert bool(wanted[0].isfinite().all())
    for mine, its in zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-3, atol=1e-3)


WRITES = {target for target, *_ in CALLS if "scatter" in str(target) or "put" in str(target)} - {
    aten.scatter_reduce.two
}


def test_every_identity_is_tried():
    assert {target for target, *_ in CALLS} == set(identities._IDENTITIES)


# --- rows that stay apart ----------------------------------------------------------------------------

SPOTS, NEW = torch.tensor([1, 4, 4]), torch.linspace(-1, 1, 3 * FEATURES, dtype=torch.float64).reshape(3, FEATURES)


def _columns_added(x):
    return x.index_add(1, SPOTS[:2], NEW[:2].expand(SEQUENCES, 2, FEATURES))


def _first_column_set(x):
    y = x.clone()
    y[:, 0] = NEW[0]
    return y


def _shifted_into(x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y


def _some_elements(x):
    return x.index_put([torch.tensor([0, 2, 2]), SPOTS], NEW)


def _by_mask(x):
    return x.masked_scatter((torch.arange(COLUMNS) == 2)[:, None].expand(SEQUENCES, -1, FEATURES), NEW.flatten())


def _evaluated_norm(x):
    return F.batch_norm(x, POSITIONS_MEAN, POSITIONS_MEAN.abs() + 1)


POSITIONS_MEAN = torch.linspace(-1, 1, COLUMNS, dtype=torch.float64)
APART = [_columns_added, _first_column_set, _shifted_into, _some_elements, _by_mask, _evaluated_norm]


@pytest.mark.parametrize("change", APART, ids=lambda f: f.__name__.strip("_"))
def test_rows_that_are_written_to_are_packed(change, table):
    watch = Watch()

    def step(ids):
        return masked(ids, change(F.embedding(ids, table)).tanh())

    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=[watch])
    assert watch.looks_up_packed


def _largest(x):
    """Maxima share a gradient among equals: no identity says how."""
    return x.scatter_reduce(
        1, SPOTS[:2, None].expand(SEQUENCES, 2, FEATURES), NEW[:2].expand(SEQUENCES, 2, FEATURES), "amax"
    )


def _from_other_rows(x):
    return x.index_copy(1, SPOTS[:2], x.mean(1, keepdim=True).expand(-1, 2, -1))


@pytest.mark.parametrize("change", [_largest, _from_other_rows], ids=lambda f: f.__name__.strip("_"))
def test_rows_that_meet_others_stay_padded(change, table):
    watch = Watch()

    def step(ids):
        return masked(ids, change(F.embedding(ids, table)).tanh())

    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=[watch])
    assert not watch.looks_up_packed


def test_features_that_a_mask_calls_rows_come_from_their_table(table):
    """A second mask makes rows of (row, feature): the table is looked up for rows all the same."""
    watch, shown = Watch(), torch.rand(SEQUENCES, COLUMNS, FEATURES, generator=G) < 0.5

    def step(ids, shown):
        x = F.embedding(ids, table)
        return masked(ids, torch.where(shown, x, 0.0).tanh() + x)

    assert_same(step, table, *[(ids, shown) for ids in BATCHES], (BATCHES[0], ~shown), instruments=[watch])
    assert watch.looks_up_packed


def test_a_pending_conjugation_is_no_copy():
    """`resolve_conj` of a conjugated tensor is its conjugate; removing it would leave memory as it was."""

    def step(x):
        return torch.view_as_real(torch.fft.ifft(x).resolve_conj()).square().sum() + torch.fft.ifft(x).imag.sum()

    x = torch.randn(3, 8, dtype=torch.float64)
    compiled = turbogr_compile.compile(step, target="eager", on_error="raise")
    torch.testing.assert_close(compiled(x), step(x))
