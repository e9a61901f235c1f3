"""Models trained through torchair's conversion and the GE interpreter, against eager; and what torchair gets wrong."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F

from turbogr_compile.lowering.ge import interpreter, prototypes
from turbogr_compile.lowering.ge.prototypes import Attribute, Port, Prototype
from turbogr_compile.lowering.ge.text import graph_text
from turbogr_compile.lowering.torchair import load as torchair
from turbogr_compile.lowering.torchair import native

from .models import HSTU, MLP, SASRec
from .simulator import Simulated, needs_torchair

pytestmark = needs_torchair


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def compare_step(model, compiled, twin, batch):
    for each in (model, twin):
        each.zero_grad()
    loss, wanted = compiled(*batch), twin(*batch)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [MLP, SASRec, HSTU])
def test_training_step_equals_eager(kind, dynamic):
    model = kind()
    twin = copy.deepcopy(model)
    compiled = Simulated(model, dynamic=dynamic)
    sizes = [(3, 7), (4, 11), (5, 12)] if dynamic else [(3, 7), (3, 7)]
    for size in sizes:
        compare_step(model, compiled, twin, kind.batch(*size))
    assert len(compiled.compiled) == 2, "one graph forward and one backward serve every size"


def test_several_steps_of_training_follow_eager():
    model = HSTU()
    twin = copy.deepcopy(model)
    compiled = Simulated(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin)]
    for _ in range(5):
        compare_step(model, compiled, twin, HSTU.batch(3, 7))
        for optimizer in optimizers:
            optimizer.step()


def test_half_types():
    def step(x, w):
        return F.layer_norm(F.silu(x.bfloat16() @ w.bfloat16()), (8,)).float().square().mean()

    x, w = torch.randn(5, 6), torch.randn(6, 8, requires_grad=True)
    loss = Simulated(step, dynamic=True)(x, w)
    loss.backward()
    found, w.grad = w.grad, None
    step(x, w).backward()
    torch.testing.assert_close(found, w.grad, rtol=2e-2, atol=2e-3)


def test_dropout_keeps_its_share_and_its_mask():
    x = torch.ones(64, 64, requires_grad=True)
    compiled = Simulated(lambda x: F.dropout(x, 0.25, True))
    first, second = compiled(x), compiled(x)
    for result in (first, second):
        kept = result != 0
        assert abs(kept.float().mean() - 0.75) < 0.03
        torch.testing.assert_close(result[kept], torch.full_like(result[kept], 1 / 0.75))
    assert not torch.equal(first, second), "every call draws anew"
    second.sum().backward()
    torch.testing.assert_close(x.grad, second.detach(), msg="the backward graph reads the forward's mask")


def test_the_seed_repeats_a_run():
    compiled = Simulated(lambda x: F.dropout(x, 0.5, True) + torch.rand(8, 8))
    runs = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        runs.append(compiled(torch.ones(8, 8)))
    assert torch.equal(runs[0], runs[2]) and not torch.equal(runs[0], runs[1])


def test_dropout_in_a_model_trains():
    model = SASRec(dropout=0.2)
    compiled = Simulated(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = SASRec.batch(4, 9)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_inputs_that_are_written():
    def step(total, x):
        old = total.reshape(-1) * 1.0
        total.add_(x)
        return old, total * 2

    total, twin, x = torch.ones(4), torch.ones(4), torch.arange(4.0)
    compiled = Simulated(step)
    for _ in range(2):
        with torch.no_grad():
            for found, wanted in zip(compiled(total, x), step(twin, x), strict=True):
                torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(total, twin)


def test_written_inputs_as_reference_data():
    def configure(config):
        config.experimental_config.enable_ref_data = True

    total, x = torch.ones(4), torch.arange(4.0)
    compiled = Simulated(lambda total, x: total.add_(x).sum(), configure=configure)
    with torch.no_grad():
        assert compiled(total, x) == 10 and compiled(total, x) == 16
    assert "RefData" in compiled.types
    assert "graph(%arg0_1: f32[4] written, %arg1_1: f32[4]):" in graph_text(compiled.graphs[0])


def test_sizes_that_no_tensor_has_are_inputs_on_the_host():
    compiled = Simulated(lambda x, n: x.expand(n, 4) * n, dynamic=True)
    for n in (3, 5):
        torch.testing.assert_close(compiled(torch.arange(4.0), n), torch.arange(4.0).expand(n, 4) * n)
    assert len(compiled.compiled) == 1
    assert any(node.host and node.outputs[0].dtype == torch.int64 for node in compiled.graphs[0].inputs)


def test_graphs_are_kept_no_longer_than_their_owners():
    with native.watching() as seen:
        compiled = Simulated(lambda x: x + 1)
        compiled(torch.ones(2))
    assert [g.runs for g in seen] == [1] and seen[0] in native.loaded()
    number = seen[0].number
    seen.clear()
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert number not in [g.number for g in native.loaded()]


@torch.library.custom_op("turbogr_ge_test::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, offsets: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scale_rows.register_fake
def _(x, offsets, factor):
    return torch.empty_like(x)


def test_an_operator_of_our_own_runs_by_its_registered_kernel():
    floats = frozenset({torch.float16, torch.float32})
    prototypes.register(Prototype(
        "ScaleRows", (Port("x", dtypes=floats), Port("offsets")), (Port("y", dtypes=floats),),
        (Attribute("factor", "Float"),),
    ))  # fmt: skip
    compiled = Simulated(lambda x, o: scale_rows(x, o, 3.0) + 1, dynamic=True)
    x, offsets = torch.randn(4, 2), torch.tensor([0, 1, 4])
    with pytest.raises(Exception, match=r"no kernel for:\s+%ScaleRows \(ScaleRows, FX node %scale_rows\)"):
        compiled(x, offsets)
    calls = []

    def kernel(node, x, offsets):
        calls.append(offsets.tolist())
        return x * node.attribute("factor")

    interpreter.register_kernel("ScaleRows", kernel)
    torch.testing.assert_close(compiled(x, offsets), x * 3 + 1)
    assert calls == [[0, 1, 4]]
    with pytest.raises(Exception, match="x is f64, and ScaleRows takes f16, f32"):
        compiled(x.double(), offsets)


def test_kernels_of_ge_stay():
    with pytest.raises(ValueError, match="one of GE's"):
        interpreter.register_kernel("Add", lambda node, a, b: a)


def heads(x):
    """A gate as HSTU has it: one of several parts of a head-split tensor, back to rows."""
    part, _ = x.permute(0, 2, 1, 3).split(2, dim=1)
    return part.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1) * 2


def test_view_fault_of_torchair():
    """Its view optimisation loses a transpose. When the first assertion fails, torchair has been repaired."""
    x = torch.randn(3, 5, 4, 2)
    faulty, right = Simulated(heads, view_optimize=True), Simulated(heads, view_optimize=False)
    with torch.no_grad():
        assert not torch.equal(faulty(x), heads(x))
        assert torch.equal(right(x), heads(x))
    count = [sum(n.type == "Transpose" for n in s.graphs[0].nodes) for s in (faulty, right)]
    assert count[0] < count[1]


def test_view_fault_reaches_the_gradients_of_hstu():
    model = HSTU()
    twin, batch = copy.deepcopy(model), HSTU.batch(3, 7)
    with pytest.raises(AssertionError, match="not close"):
        compare_step(model, Simulated(model, view_optimize=True), twin, batch)


def test_gradient_of_a_selected_row_reads_memory_that_nobody_wrote():
    """torchair scatters the row into Empty; here such memory holds NaN."""
    x = torch.randn(3, 4, requires_grad=True)
    Simulated(lambda x: x[1].square().sum(), take_apart=torchair.decompositions())(x).backward()
    assert x.grad[0].isnan().all() and not x.grad[1].isnan().any()


def test_bags_that_sum_become_bags_that_average():
    """torchair's converter has another default than the op it converts."""
    rows, ids, offsets = torch.randn(10, 6), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2])
    compiled = Simulated(lambda r: F.embedding_bag(ids, r, offsets, mode="sum"))
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows), F.embedding_bag(ids, rows, offsets, mode="mean"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.baddbmm(x, x, x), "one dtype is wanted, and there are x1 of f32, x2 of i64"),
        (lambda x: x[0] + torch.linspace(0, 1, 3), "start is i64, and LinSpace takes f32, f64"),
        (lambda x: x[0].std(-1), r"%Expand \(Expand, FX node %std\) failed"),
    ],
    ids=["baddbmm", "linspace", "std"],
)
def test_graphs_of_torchair_that_ge_would_refuse(function, message):
    with torch.no_grad(), pytest.raises(Exception, match=message):
        Simulated(function)(torch.randn(2, 3, 3) if "Expand" not in message else torch.randn(2, 3, 5))
