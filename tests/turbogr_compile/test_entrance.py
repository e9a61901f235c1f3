"""What is asked where a graph is entered: which ops need no checks of their own, and that nothing slips through."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import turbogr_compile
from turbogr_compile.kernels.cpu.build import library
from turbogr_compile.kernels.declare import CONTRACTS
from turbogr_compile.passes.rows.program import Rows
from turbogr_compile.runtime.entrance import run_behind_entrance
from turbogr_compile.runtime.entrance.proof import Proof
from turbogr_compile.runtime.entrance.sizes import MOST, Size, Undecided
from turbogr_compile.training import build
from turbogr_compile.training.config import Config

ops = torch.ops.turbogr


@pytest.fixture(autouse=True)
def kernels():
    torch._dynamo.reset()
    if library(torch.float32) is None:
        pytest.skip("no kernels")


@pytest.fixture
def checks(monkeypatch):
    """Ops that checked their arguments."""
    seen: list[str] = []
    for name, contract in CONTRACTS.items():

        def watched(*arguments, name=name, check=contract.before_kernel):
            seen.append(name)
            check(*arguments)

        monkeypatch.setattr(contract, "before_kernel", watched)
    return seen


def compiled(function, **options):
    return turbogr_compile.compile(function, **options)


def gathered(x, rows):
    return ops.gather_rows(x * 2, rows) + 1


def numbers(*size):
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def attention_inputs(**changes):
    given = {name: numbers(4, 2, 8) for name in ("query", "key", "value")}
    given |= {name: torch.tensor([0, 4]) for name in ("query_offsets", "key_offsets")}
    given |= {name: torch.arange(4) for name in ("query_columns", "key_columns")}
    optional = "key_valid pair_mask bias position_bias time_bias time_bounds query_times key_times dropout_seed"
    given |= dict.fromkeys(optional.split())
    return [*(given | changes).values(), "softmax", 1.0, 1.0, 0, 9, 0.0]


def model_and_batch():
    torch.manual_seed(0)
    config = Config.read({"dim": 16, "heads": 2, "layers": 2, "max_len": 12, "negatives": 4})
    valid = torch.arange(12) < torch.tensor([3, 9, 5, 2])[:, None]
    return build.recommender(config, 20), (torch.randint(1, 21, (4, 12)) * valid, torch.arange(12) * 60 * valid)


# --- sizes -------------------------------------------------------------------------------------------

S, T = sympy.symbols("s t", integer=True)
BOUNDS = {S: (1, MOST), T: (0, MOST)}


def size(expr):
    return Size(expr, BOUNDS)


def test_sizes_are_compared_for_all_batches():
    s, t = size(S), size(T)
    assert s == size(S) and s + 1 != s and s >= 1 and t >= 0 and s <= 1 << 62 and (s + t) * 2 - s - t == s + t
    assert not t < 0 and t > -1 and 0 <= s <= MOST and size(64 * S) // 64 == s and size(64 * S * T) % 32 == 0
    assert (s - s) == 0 and type(s - s) is int and (s, 3) == (size(S), 3) and sum([s, s]) == 2 * s
    for undecided in (
        lambda: s == t,
        lambda: s == 1,
        lambda: t < 1,
        lambda: s % 2,
        lambda: s // 2,
        lambda: s < t,
        lambda: bool(s),
        lambda: (s, 3) == (t, 3),
    ):
        with pytest.raises(Undecided):
            undecided()


# --- what is settled ---------------------------------------------------------------------------------


def test_ops_whose_rows_come_in_do_not_check(checks):
    call, x, rows = compiled(gathered), numbers(5, 4), torch.tensor([4, 0, 0])
    for _ in range(3):  # the first ones are watched
        wanted = gathered(x, rows)
        checks.clear()
        torch.testing.assert_close(call(x, rows), wanted)
    assert checks == []


def test_rows_that_are_computed_are_checked_by_the_op(checks):
    call, x, rows = compiled(lambda x, rows: ops.gather_rows(x, rows + 1)), numbers(5, 4), torch.tensor([3, 0])
    for _ in range(3):
        checks.clear()
        call(x, rows)
    assert checks == ["gather_rows"]
    with pytest.raises(IndexError, match="row 5, entry 0 of rows"):
        call(x, torch.tensor([4, 0]))


@pytest.mark.parametrize("write", ["torch", "data", "numpy"])
def test_rows_that_were_written_to_are_refused(write):
    """However they were written: they are looked at in every call."""
    call, x, rows = compiled(gathered), numbers(5, 4), torch.tensor([4, 0, 0])
    for _ in range(3):
        call(x, rows)
    {"torch": rows, "data": rows.data, "numpy": rows.numpy()}[write][1] = 5
    with pytest.raises(IndexError, match="gather_rows: row 5, entry 1 of rows, is out of range: there are 5 rows"):
        call(x, rows)
    with pytest.raises(IndexError, match="gather_rows: row 5"):
        ops.gather_rows(x, rows)
    rows[1] = 0
    torch.testing.assert_close(call(x, rows), gathered(x, rows))


@pytest.mark.parametrize("dynamic", [False, True])
def test_offsets_are_refused(dynamic):
    def attend(q, k, v, q_offsets, k_offsets, *rest):
        return ops.jagged_attention(q * 1.0, k, v, q_offsets, k_offsets, *rest)[0]

    call = torch.compile(attend, backend="turbogr", dynamic=dynamic)
    for _ in range(3):
        torch.testing.assert_close(call(*attention_inputs()), attend(*attention_inputs()))
    for bad in ([0, 5], [-1, 4], [3, 1], [1 << 62, -(1 << 62)]):
        with pytest.raises(ValueError, match="query_offsets"):
            call(*attention_inputs(query_offsets=torch.tensor(bad)))
    with pytest.raises(ValueError, match="key_columns"):
        call(*attention_inputs(key_columns=torch.tensor([0, 1, -2, 3])))


def test_the_prologue_is_not_believed(monkeypatch):
    """A packed model, with offsets that lead out of its rows."""
    model, batch = model_and_batch()
    call = compiled(model.loss)
    for _ in range(3):
        call(*batch).backward()
    made = Rows.offsets
    monkeypatch.setattr(Rows, "offsets", lambda self, chosen: made(self, chosen) + 1000)
    with pytest.raises(ValueError, match="_offsets end at row"):
        call(*batch)


def test_a_packed_step_checks_little(checks):
    model, batch = model_and_batch()
    call = compiled(model.loss)
    for _ in range(4):
        checks.clear()
        call(*batch).backward()
    assert not {"jagged_attention", "jagged_attention_backward", "gather_rows", "scatter_rows"} & set(checks)


def test_saved_tensors_are_asked_where_the_backward_begins():
    """Hooks may hand over something else than what was saved."""
    x, rows = numbers(5, 4).requires_grad_(), torch.tensor([4, 0, 0])
    call = compiled(lambda x, rows: ops.gather_rows(x, rows).square().sum())
    for _ in range(3):
        call(x, rows).backward()

    def other(saved):
        return saved + 7 if saved.dtype == torch.int64 else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, other):
        loss = call(x, rows)
    with pytest.raises(IndexError, match="scatter_rows: row 11"):
        loss.backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved[:1]):
        loss = call(x, rows)
    with pytest.raises((ValueError, RuntimeError)):
        loss.backward()


# --- what is not foreseen ----------------------------------------------------------------------------


def traced(function, *inputs):
    """As the target gets it, and without Dynamo's guards."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="symbolic")(*inputs)


def test_sizes_are_asked_for_where_there_are_no_guards():
    """A slice is shorter where its tensor is: what compiling assumed of sizes is asked again."""
    graph = traced(lambda x: ops.silu_split(x[:, :8], [4, 4]), numbers(3, 9))
    assert Proof(graph.graph).settled
    run = run_behind_entrance(graph)
    for sizes in ((3, 9), (3, 12), (7, 8)):
        torch.testing.assert_close(run([numbers(*sizes)]), ops.silu_split(numbers(*sizes)[:, :8], [4, 4]))
    with pytest.raises(ValueError, match="sum of sizes must be 5, not 8"):
        run([numbers(3, 5)])


def test_sizes_that_were_compared_are_compared_again():
    def split(x, y):
        count = y.shape[0]
        return ops.silu_split(x[:, :count], [count])

    graph = traced(split, numbers(3, 9), numbers(6))
    assert Proof(graph.graph).settled
    run = run_behind_entrance(graph)
    for columns, count in ((9, 6), (12, 5), (8, 8)):
        found = run([numbers(3, columns), numbers(count)])
        torch.testing.assert_close(found, split(numbers(3, columns), numbers(count)))
    with pytest.raises(ValueError, match="sum of sizes must be 5, not 6"):
        run([numbers(3, 5), numbers(6)])


def test_two_sizes_that_need_not_agree_are_not_settled():
    graph = traced(lambda x, rows: ops.scatter_rows(x, rows[1:], 4), numbers(7, 4), torch.arange(8) % 4)
    wrong = traced(lambda x, rows: ops.scatter_rows(x * 1, rows, 4), numbers(8, 4), torch.arange(8) % 4)
    assert not Proof(graph.graph).settled and Proof(wrong.graph).settled
    with pytest.raises(ValueError, match=r"rows.shape\[0\]|x.shape\[0\]"):
        run_behind_entrance(wrong)([numbers(6, 4), torch.arange(8) % 4])


def test_sizes_that_follow_from_entries_are_not_foreseen():
    def picked(x, rows):
        return ops.gather_rows(x, rows), ops.gather_rows(x, rows.nonzero().squeeze(1)), ops.gather_rows(x, rows)

    graph = traced(picked, numbers(5, 4), torch.tensor([1, 0, 3]))
    assert len(Proof(graph.graph).settled) == 1


def test_behind_an_op_of_somebody_else_every_op_checks(checks):
    with torch.library._scoped_library("entrance_test", "FRAGMENT") as lib:
        lib.define("shorter(Tensor x) -> Tensor")
        lib.impl("shorter", lambda x: x[:1].clone(), "CPU")
        lib.impl("shorter", lambda x: torch.empty_like(x), "Meta")  # it lies
        call = compiled(lambda x, rows: ops.gather_rows(torch.ops.entrance_test.shorter(x), rows) * 1)
        x, rows = numbers(5, 4), torch.tensor([0, 0, 0])
        for _ in range(3):
            checks.clear()
            call(x, rows)
        assert checks == ["gather_rows"]
        with pytest.raises(IndexError, match="there are 1 rows"):
            call(x, torch.tensor([4, 0, 0]))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_watches_ops_sees_them():
    graph = traced(gathered, numbers(5, 4), torch.tensor([4, 0, 0]))
    run = run_behind_entrance(graph)
    for _ in range(2):
        run([numbers(5, 4), torch.tensor([4, 0, 0])])
    with Seen() as seen:
        run([numbers(5, 4), torch.tensor([4, 0, 0])])
    assert "turbogr.gather_rows.default" in seen.ops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run([numbers(5, 4), torch.tensor([4, 0, 0])])
    assert "turbogr::gather_rows" in {event.name for event in profile.events()}


def test_tensors_that_are_not_what_they_seem():
    """Numbers kept with the other sign, a parameter, numbers of inference mode, some that are not in one piece."""
    run = run_behind_entrance(traced(lambda x, rows: ops.gather_rows(x, rows), numbers(5, 4), torch.tensor([4, 0, 0])))
    negative = torch.complex(numbers(5, 4), numbers(5, 4)).conj().imag
    assert negative.is_neg()
    with torch.inference_mode():
        inference = numbers(5, 4)
    for x in (numbers(5, 4), negative, torch.nn.Parameter(numbers(5, 4)), inference, numbers(5, 4).T.contiguous().T):
        for rows in (torch.tensor([4, 0, 0]), torch.tensor([[4, 1], [0, 1], [0, 1]])[:, 0]):
            found = run([x, rows])
            torch.testing.assert_close(found, x.detach().clone()[rows])
    with pytest.raises(IndexError, match="row 5"):
        run([numbers(5, 4), torch.tensor([[4, 1], [5, 1], [0, 1]])[:, 0]])


def test_types_that_torch_promises_and_does_not_keep():
    """Of a loss of mixed types, torch says that it is of the wider one; its kernel would be read beyond its end."""
    given = numbers(64, 64), numbers(64, 64).bfloat16(), numbers(64, 64) * 2

    def step(x, narrow, wide):
        loss = torch.nn.functional.huber_loss(narrow, wide, reduction="none")
        return ops.norm_gate(x, loss, None, None, 1e-5)[0]

    run = run_behind_entrance(traced(step, *given))
    for _ in range(3):
        with pytest.raises(ValueError, match="gate must be"):
            run(list(given))


def test_autocast_around_the_backward_casts_nothing():
    """Kernels that check nothing would read numbers of another size, and beyond them."""
    x, weight, rows = numbers(5, 64).requires_grad_(), numbers(64, 64).requires_grad_(), torch.tensor([4, 0, 0])
    step = lambda x, weight, rows: (ops.gather_rows(x, rows) @ weight).square().sum()  # noqa: E731
    call, expected = compiled(step), torch.autograd.grad(step(x, weight, rows), (x, weight))
    for _ in range(3):
        loss = call(x, weight, rows)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(loss, (x, weight))
        torch.testing.assert_close(found, expected)


def test_numbers_of_another_device_are_refused():
    run = run_behind_entrance(traced(gathered, numbers(5, 4), torch.tensor([4, 0, 0])))
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        run([numbers(5, 4).to("meta"), torch.tensor([4, 0, 0])])
