"""Working one batch ahead: the same numbers as without, in every shape of loop; errors and endings are clean."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import turbogr_compile
from turbogr_compile import Pass, Phase, ahead
from turbogr_compile.errors import TurbogrError
from turbogr_compile.runtime import draws
from turbogr_compile.runtime.batches import pairs
from turbogr_compile.runtime.prologue import Call, Unprovable, add_input, keep_original, reading

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    assert not workers(), "a worker outlived its loop"


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("turbogr-ahead")]


@pytest.fixture
def statistics():
    """Of the one graph that this test compiles."""
    gc.collect()
    older = set(turbogr_compile.statistics())

    def found():
        (only,) = [s for s in turbogr_compile.statistics() if s not in older]
        return only

    return found


class Sampled(nn.Module):
    """A lookup scored against negatives that are drawn by popularity, positives among them masked."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 4)
        self.register_buffer("popularity", torch.arange(1.0, 41.0))

    def forward(self, ids, negatives=6):
        drawn = torch.multinomial(self.popularity, negatives)
        unique, back = torch.unique(drawn, return_inverse=True)
        hits = ids[..., None] == drawn
        x = self.table(ids)
        scores = (x @ self.table(unique)[back].T).masked_fill(hits, -1e9)
        return (scores.logsumexp(-1) - x.sum(-1)).mean()


def compiled(model, **options):
    road = {"target": "eager", "pipeline": "offload-sampling", "on_error": "raise"}
    return turbogr_compile.compile(model, **(road | options))


def batches(count=6, columns=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (3, columns), generator=generator) for _ in range(count)]


def train(model, step, loop, unpack=lambda batch: batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in loop:
        optimizer.zero_grad()
        loss = step(unpack(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(loop, unpack=lambda batch: batch, prepare=compiled):
    """Losses of a fresh model, compiled anew."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = Sampled()
    return train(model, prepare(model), loop, unpack)


# --- same numbers ------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "ids other")


@dataclass
class Record:
    ids: torch.Tensor
    other: int = 0


@dataclass(frozen=True)
class Slots:
    __slots__ = ("ids",)
    ids: torch.Tensor


class Interaction:
    def __init__(self, ids):
        self.fields = {"ids": ids}


SHAPES = {
    "tensor": (lambda x: x, lambda b: b),
    "dict": (lambda x: {"name": "a", "ids": x}, lambda b: b["ids"]),
    "tuple": (lambda x: (1, x), lambda b: b[1]),
    "namedtuple": (lambda x: Pair(x, None), lambda b: b.ids),
    "dataclass": (Record, lambda b: b.ids),
    "slots": (Slots, lambda b: b.ids),
    "object": (Interaction, lambda b: b.fields["ids"]),
    "nested": (lambda x: {"a": [Record(x)]}, lambda b: b["a"][0].ids),
}


@pytest.fixture(scope="module")
def expected():
    """Losses of a run without a look ahead."""
    return run(batches())


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_are_found_in_batches_of_all_kinds(shape):
    make, unpack = SHAPES[shape]
    now, then = make(torch.zeros(2)), make(torch.ones(2))
    (found,) = pairs(now, then)
    assert found[0] is unpack(now) and found[1] is unpack(then)


@pytest.mark.parametrize("shape", ["tensor", "dict", "dataclass"])
def test_losses_are_those_of_a_run_without(shape, expected, statistics):
    make, unpack = SHAPES[shape]
    assert run(ahead([make(x) for x in batches()]), unpack) == expected
    stats = statistics()
    assert stats.ahead == 5 and stats.at_once == {"the first batch of a loop": 1}
    assert "5 computed ahead, waited" in repr(stats)


def test_losses_with_the_whole_pipeline(statistics):
    default = lambda model: turbogr_compile.compile(model, passes=["offload-sampling"])  # noqa: E731
    assert run(ahead(batches()), prepare=default) == run(batches(), prepare=default)
    assert statistics().calls == 6, "of the later run"


def test_sizes_that_change_from_batch_to_batch(statistics):
    mixed = [x for pair in zip(batches(4, 5), batches(4, 7), strict=True) for x in pair]
    dynamic = lambda model: compiled(model, dynamic=True)  # noqa: E731
    expected = run(mixed, prepare=dynamic)
    assert run(ahead(mixed), prepare=dynamic) == expected
    assert statistics().ahead == 7


def test_a_graph_for_each_size():
    mixed = [*batches(3, 5), *batches(3, 7), *batches(2, 5)]
    static = lambda model: compiled(model, dynamic=False)  # noqa: E731
    assert run(ahead(mixed), prepare=static) == run(mixed, prepare=static)


def test_loader_with_workers():
    loader = torch.utils.data.DataLoader(torch.stack(batches(8)), batch_size=2, num_workers=2, collate_fn=torch.cat)
    assert run(ahead(loader)) == run(loader)
    assert len(ahead(loader)) == 4


def test_packing_runs_ahead_too(statistics):
    table, weight = torch.randn(20, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def loss(ids):
        x = torch.nn.functional.embedding(ids, table)
        keep = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & (ids != 0)[:, None, :]
        hidden = (x @ x.mT).masked_fill(~keep, -1e9).softmax(-1) @ (x @ weight)
        return torch.nn.functional.cross_entropy((hidden @ table.T).flatten(0, 1), ids.flatten(), ignore_index=0)

    ids = [torch.tensor([[3, 4, 0, 0], [5, 6, 7, 0]]), torch.tensor([[3, 0, 0, 0], [5, 1, 0, 0]])] * 3
    step = turbogr_compile.compile(loss, expect={"pack-rows": ">=1"})
    seen = [step(x) for x in ahead(ids)]
    torch.testing.assert_close(seen, [loss(x) for x in ids])
    assert statistics().ahead == 5


# --- what keeps a call from using them ---------------------------------------------------------------


def test_inputs_made_in_the_loop_are_computed_at_once(expected, statistics):
    assert run(ahead(batches()), unpack=lambda x: x + 0) == expected
    stats = statistics()
    assert stats.ahead == 0
    assert stats.at_once["input ids is neither a tensor of the batch nor the same in every call"] == 4


def test_another_tensor_of_the_batch_than_the_one_announced():
    def turned(loop):
        return (batch["ids" if i % 2 else "others"] for i, batch in enumerate(loop))

    both = [{"ids": x, "others": x.flip(0)} for x in batches()]
    assert run(turned(ahead(both))) == run(turned(both))


def test_skipped_batches(statistics):
    kept = {0, 1, 3, 4, 5}
    expected = run([x for i, x in enumerate(batches()) if i in kept])
    loop = (x for i, x in enumerate(ahead(batches())) if i in kept)
    assert run(loop) == expected
    assert statistics().ahead == 3


def test_a_batch_that_is_changed_in_place(statistics):
    def spoiled(loop):
        for i, x in enumerate(loop):
            if i == 2:
                x.copy_(x.flip(0))
            yield x

    expected = run(spoiled(batches()))
    assert run(spoiled(ahead(batches()))) == expected
    assert statistics().at_once["input ids was written to after it was announced"] == 1


def test_a_buffer_that_changes_between_steps(statistics):
    def run_with(loop):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Sampled()
        step, losses = compiled(model), []
        for i, x in enumerate(loop):
            if i == 3:
                model.popularity[:20] = 0
            losses.append(step(x).item())
        return losses

    expected = run_with(batches())
    gc.collect()
    assert run_with(ahead(batches())) == expected
    assert any("popularity was written to after it was announced" in why for why in statistics().at_once)


def test_a_new_seed_in_between(statistics):
    def reseeded(loop):
        for i, x in enumerate(loop):
            if i == 3:
                torch.manual_seed(5)
            yield x

    expected = run(reseeded(batches()))
    assert run(reseeded(ahead(batches()))) == expected
    assert statistics().ahead == 4


def test_evaluation_between_steps():
    """The same graph on batches of another loop, some of them ahead, some not."""

    def run_with(outer, inner):
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        model = Sampled()
        step, losses = compiled(model), []
        for x in outer(batches(4)):
            losses += [step(x).item()]
            with torch.no_grad():
                losses += [step(y).item() for y in inner(batches(3, 6))]
        return losses

    expected = run_with(list, list)
    assert expected == run_with(ahead, ahead) == run_with(ahead, list) == run_with(list, ahead)


def test_two_graphs_in_one_step(statistics):
    def run_with(loop):
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        models = [Sampled(), Sampled()]
        steps = [compiled(m) for m in models]
        return [[s(x).item() for s in steps] for x in loop]

    expected = run_with(batches())
    assert run_with(ahead(batches())) == expected


def test_next_batch_of_another_kind():
    mixed: list[Any] = [{"ids": x} for x in batches(3)] + [{"other": x} for x in batches(2)]
    unpack = lambda b: b.get("ids", b.get("other"))  # noqa: E731
    assert run(ahead(mixed), unpack) == run(mixed, unpack)


def test_pairs_of_batches():
    a, b = torch.zeros(1), torch.ones(1)
    assert list(pairs({"x": [a, 3]}, {"x": [b, 4]})) == [(a, b)]
    assert list(pairs((a,), [b])) == [(a, None)] and list(pairs({"x": a}, {})) == [(a, None)]
    loop: dict[str, Any] = {"x": a}
    loop["self"] = loop
    assert next(pairs(loop, loop)) == (a, a) and list(pairs(3, 4)) == []


# --- loops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_no_batch_is_lost(count):
    assert list(ahead(range(count))) == list(range(count))
    twice = ahead(range(count))
    assert [list(twice), list(twice)] == [list(range(count))] * 2


def test_a_loader_that_fails_delivers_what_it_had():
    def loader():
        yield from (1, 2)
        raise ValueError("disk")

    seen = []
    with pytest.raises(ValueError, match="disk"):
        for x in ahead(loader()):
            seen.append(x)
    assert seen == [1, 2]


@pytest.mark.parametrize("end", ["break", "error", "interrupt"])
def test_leaving_the_loop_ends_the_worker(end):
    model = Sampled()
    step = compiled(model)
    errors = {"error": ValueError, "interrupt": KeyboardInterrupt}

    def loop():
        for i, x in enumerate(ahead(batches())):
            step(x)
            if i == 2:
                assert workers()
                if end == "break":
                    break
                raise errors[end]

    if end == "break":
        loop()
    else:
        with pytest.raises(errors[end]):
            loop()
    assert not workers()
    step(batches()[0])


PROGRAM = """
import torch, turbogr_compile
weights = torch.ones(1000)
def f(x):
    return x + torch.multinomial(weights, 5).sum()
step = turbogr_compile.compile(f, passes=["offload-sampling"], target="eager")
loop = iter(turbogr_compile.ahead([torch.ones(2)] * 9))
for _ in range(3):
    step(next(loop))
"""


def test_the_interpreter_ends_with_a_loop_under_way():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and not done.stderr, done.stderr


# --- failures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provided(Pass):
    """Add what `provide` makes to each product."""

    name = "provided"
    phase = Phase.PRE_GRAD

    def run(self, graph, ctx):
        keep_original(graph)
        for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            fake = node.meta["val"].fake_mode.from_tensor(torch.ones(()), static_shapes=True)
            with ctx.rewrite("provide", node):
                added = add_input(graph, "added", fake, reading(provide, [0]))
                with graph.inserting_after(node):
                    total = graph.call_function(aten.add.Tensor, (node, added))
                node.replace_all_uses_with(total, delete_user_cb=lambda user, new=total: user is not new)


def provide(call: Call) -> torch.Tensor:
    """What negative numbers in the batch ask for."""
    first = call.inputs[0][0].item()
    if first == -1:
        raise ZeroDivisionError(f"in {threading.current_thread().name}")
    if first == -2:
        raise Unprovable("minus two")
    return torch.tensor(1.0)


def test_a_failure_surfaces_in_the_step_that_waits(statistics):
    step = turbogr_compile.compile(lambda x: x * 2, passes=[Provided()])
    seen = []
    loop = iter(ahead([torch.full((2,), float(v)) for v in (1, 2, -1, 3, 4)]))
    for batch in loop:
        try:
            seen.append(step(batch)[0].item())
        except TurbogrError as error:
            seen.append(str(error))
            assert isinstance(error.__cause__, ZeroDivisionError) and "turbogr-ahead" in str(error.__cause__)
            assert error.__cause__.__traceback__ is not None
    assert seen[:2] == [3, 5] and seen[3:] == [7, 9]
    assert "computing ahead for this call of graph" in seen[2] and "ZeroDivisionError: in turbogr-ahead" in seen[2]
    assert statistics().ahead == 3, "the call after the failure had nothing announced"


def test_a_failure_that_nobody_waits_for_is_none():
    step = turbogr_compile.compile(lambda x: x * 2, passes=[Provided()])
    loop = ahead([torch.full((2,), float(v)) for v in (1, -1, 2)])
    assert [step(x)[0].item() for x in loop if x[0] > 0] == [3, 5]


@pytest.mark.filterwarnings("ignore:turbogr")
def test_a_refusal_made_ahead_is_one_of_the_call(statistics):
    step = turbogr_compile.compile(lambda x: x * 2, passes=[Provided()])
    loop = ahead([torch.full((2,), float(v)) for v in (1, -2, 2, 3)])
    assert [step(x)[0].item() for x in loop] == [3, -4, 5, 7]
    assert statistics().fallbacks == {"minus two": 1} and statistics().ahead == 3


# --- seeds -------------------------------------------------------------------------------------------


def test_draws_follow_the_seed_and_the_call():
    def drawn(seed):
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        step = compiled(Sampled())
        torch.manual_seed(seed)
        return [step(batches(1)[0]).item() for _ in range(3)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 3


def test_the_seed_is_the_documented_function():
    import hashlib

    expected = int.from_bytes(hashlib.blake2b(b"7/graph/3", digest_size=8).digest(), "little") & (2**63 * 2 - 1)
    assert draws.seed_of(7, "graph", 3) == expected >> 1


def test_draws_do_not_depend_on_what_else_draws(expected):
    noisy = (torch.rand(3) is not None and x for x in batches())
    assert run(noisy) == expected


@pytest.mark.parametrize("when", ["before compiling", "after"])
def test_resuming_draws_what_the_undisturbed_run_draws(when):
    model = Sampled()
    step = compiled(model)
    torch.manual_seed(3)
    [step(x) for x in batches(2)]
    state = draws.state_dict()
    rest = [step(x).item() for x in ahead(batches(3))]
    assert state["seed"] == 3 and list(state["calls"].values()) == [2]

    del step
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(3)
    step = compiled(model)
    if when == "after":
        step(batches(1)[0])
    draws.load_state_dict(state)
    assert draws.state_dict() == state
    assert [step(x).item() for x in ahead(batches(3))] == rest


def test_loading_a_state_checks_it():
    with pytest.raises(TurbogrError, match="not a state of draws"):
        draws.load_state_dict({"steps": 3})
    with pytest.warns(UserWarning, match=r"torch.manual_seed\(99\) restores it"):
        draws.load_state_dict({"seed": 99, "calls": {}})
