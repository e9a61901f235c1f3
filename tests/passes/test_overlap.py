"""overlap and bucket-collectives: what moves, what must not, and what is said about it."""

from __future__ import annotations

import itertools
import json
import operator
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx

from turbogr_compile import _torch
from turbogr_compile.capture.trace import trace_with_lines
from turbogr_compile.check.verify import Verifier
from turbogr_compile.errors import PassError
from turbogr_compile.graph.nodes import is_collective, is_view, is_wait
from turbogr_compile.graph.phases import Phase, Role, Vocabulary
from turbogr_compile.graph.streams import COMMUNICATION, HOST, put_on, stream_of
from turbogr_compile.graph.text import graph_text
from turbogr_compile.passes.rows.program import Examples
from turbogr_compile.passes.schedule.costs import RATES, Costs
from turbogr_compile.passes.schedule.play import peak
from turbogr_compile.pipeline.instrument import GraphRun
from turbogr_compile.pipeline.manager import Manager
from turbogr_compile.pipeline.options import Options
from turbogr_compile.show.timeline import timeline_svg, timeline_text

X, W = torch.randn(4, 3), torch.randn(3, 3)
BIG, SQUARE = torch.randn(256, 256), torch.randn(256, 256)
CLEANUP = "remove-noops, fold-views, eliminate-common, eliminate-dead-code"


@pytest.fixture(autouse=True, scope="module")
def groups(tmp_path_factory):
    """One process is a group too."""
    meeting_point = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def add_up(x: Tensor, op: str = "sum", group=None) -> Tensor:
    return functional.all_reduce(x, op, group or dist.group.WORLD)


def run(fn, *inputs: Tensor, pipeline="overlap", phase=Phase.POST_GRAD, prepare=None, rows="fixed") -> GraphRun:
    options = Options.read({"pipeline": pipeline, "on_error": "raise", "verify": "strict", "target": "eager"})
    fake = _torch.fake_inputs(inputs) if rows == "fixed" else with_open_rows(inputs)
    module = trace_with_lines(fn, fake, phase, {})
    if prepare is not None:
        prepare(module.graph)
    words = Vocabulary(phase)
    role = Role.CAPTURED if phase is Phase.PRE_GRAD else Role.FORWARD
    made = GraphRun("test", role, phase, "eager", options.plan(), options, module, words, inputs)
    Manager(made, [Verifier("strict")]).run_all()
    for wanted, found in zip(flat(fn(*inputs)), flat(module(*inputs)), strict=True):
        torch.testing.assert_close(found, wanted)
    return made


def with_open_rows(inputs) -> list[Tensor]:
    mode = _torch.new_fake_mode()
    rows = _torch.named_symbol(mode.shape_env, "rows", len(inputs[0]))
    with mode:
        return [torch.empty(rows, *x.shape[1:]) for x in inputs]


def flat(value) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def names(made: GraphRun) -> list[str]:
    return [
        n.target.overloadpacket.__name__ if isinstance(n.target, torch._ops.OpOverload) else n.target.__name__
        for n in made.graph.nodes
        if n.op == "call_function"
    ]


def remarks(made: GraphRun) -> dict[str, str]:
    return {r.id: r.text for r in made.remarks}


# --- before and after ----------------------------------------------------------------------------------


def test_a_collective_gets_a_label_and_is_waited_for_where_it_is_read():
    made = run(lambda x, w: add_up(x) + (x @ w).relu(), X, W)
    assert names(made) == ["all_reduce", "mm", "relu", "wait_tensor", "add"]
    assert [n.name for n in made.graph.nodes if stream_of(n) == COMMUNICATION] == ["all_reduce"]
    assert made.steps[0].status == "changed"


def test_a_collective_starts_before_compute_that_it_does_not_need():
    def fn(x, w):
        y = (x @ w).relu()
        return y @ w + add_up(x * 2)

    made = run(fn, X, W)
    assert names(made) == ["mul", "all_reduce", "mm", "relu", "mm", "wait_tensor", "add"]


def test_the_gradient_that_travels_is_computed_before_the_one_that_does_not():
    def backward(g, x, w):
        return x.T @ g, add_up(g @ w)

    assert names(run(backward, X, X, W)) == ["mm", "all_reduce", "permute", "mm", "wait_tensor"]


def test_compute_between_a_wait_and_the_next_start_does_not_wait_for_the_rest():
    def fn(x, w):
        second = add_up(add_up(x) * 2)
        free = x
        for _ in range(6):
            free = (free @ w).relu()
        return second + free

    made = run(fn, BIG, SQUARE)
    order = names(made)
    first, second = (i for i, name in enumerate(order) if name == "all_reduce")
    assert "mm" in order[first:second] and "mm" in order[second:], order


def test_several_waits_end_in_the_order_of_their_starts():
    def fn(x, w):
        first, second = add_up(x), add_up(x @ w)
        return second + 1, first * 2

    made = run(fn, X, W)
    assert names(made) == ["all_reduce", "mm", "all_reduce", "wait_tensor", "mul", "wait_tensor", "add"]


def test_waits_for_one_reader_stand_together():
    assert names(run(lambda x: add_up(x) + add_up(x * 2), X))[-3:] == ["wait_tensor", "wait_tensor", "add"]


def test_what_nobody_reads_is_still_waited_for():
    def fn(x):
        add_up(x)
        return x + 1

    assert names(run(fn, X)) == ["all_reduce", "add", "wait_tensor"]


def test_no_collective_no_change():
    made = run(lambda x: x + 1, X, pipeline="bucket-collectives, overlap")
    assert [step.status for step in made.steps] == ["unchanged", "unchanged"] and not made.remarks


def test_twice_is_once():
    made = run(lambda x, w: add_up(x @ w) + x @ w, X, W, pipeline="repeat(overlap)")
    assert [step.status for step in made.steps] == ["changed", "unchanged"]


def test_the_label_is_in_the_dump():
    lines = graph_text(run(lambda x: add_up(x) + 1, X).graph).splitlines()
    assert any(line.endswith("[stream=communication]") and "all_reduce" in line for line in lines), lines


def test_work_of_the_host_starts_early_and_is_read_late():
    def host(graph: fx.Graph) -> None:
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cumsum.default)
        put_on(node, HOST)

    made = run(lambda x, w: (x @ w).relu() @ w + x.cumsum(0) * 2, X, W, prepare=host)
    assert names(made) == ["cumsum", "mm", "relu", "mm", "mul", "add"]


def test_a_stream_has_a_known_name():
    node = torch.fx.Graph().placeholder("x")
    with pytest.raises(ValueError, match="no stream is named 'comms'; there are: communication, host"):
        put_on(node, "comms")


# --- what must hold for every graph --------------------------------------------------------------------


def some_program(seed: int):
    """Ops in a random order over a pool of values; collectives of two kinds, random numbers, a few results."""
    draw = random.Random(seed)
    steps = [(draw.choice(["mm", "relu", "add", "sum", "max", "view", "rand"]), draw.random(), draw.random())
             for _ in range(40)]  # fmt: skip

    def fn(x, w):
        pool = [x, w]
        for kind, a, b in steps:
            first, second = pool[int(a * len(pool))], pool[int(b * len(pool))]
            pool.append({
                "mm": lambda f=first, s=second: f @ s * 0.1, "relu": lambda f=first: f.relu(),
                "add": lambda f=first, s=second: f + s, "sum": lambda f=first: add_up(f),
                "max": lambda f=first: add_up(f, "max"), "view": lambda f=first: f.t(),
                "rand": lambda f=first: f + 0 * torch.rand_like(f),
            }[kind]())  # fmt: skip
        return pool[-1], pool[-4], pool[11]

    return fn


def traced(seed: int) -> fx.GraphModule:
    return trace_with_lines(some_program(seed), _torch.fake_inputs((BIG, SQUARE)), Phase.POST_GRAD, {})


def read_by(graph: fx.Graph) -> list[tuple[str, tuple[str, ...]]]:
    return sorted((n.name, tuple(a.name for a in n.all_input_nodes)) for n in graph.nodes)


@pytest.mark.parametrize("seed", range(5))
def test_of_any_graph(seed):
    given = traced(seed)
    made = run(some_program(seed), BIG, SQUARE)
    assert read_by(made.graph) == read_by(given.graph), "same nodes, same arguments"
    place = {n: i for i, n in enumerate(made.graph.nodes)}
    assert all(place[a] < place[n] for n in made.graph.nodes for a in n.all_input_nodes), "dependences"
    for ordered in (is_collective, _torch.is_random):
        kept = [n.name for n in given.graph.nodes if n.op == "call_function" and ordered(n)]
        assert [n.name for n in made.graph.nodes if n.op == "call_function" and ordered(n)] == kept
    for wait in (n for n in made.graph.nodes if is_wait(n) and n.users):
        following = itertools.dropwhile(is_wait, itertools.islice(made.graph.nodes, place[wait], None))
        assert next(following) in wait.users, "directly before its first reader"
    tight = run(some_program(seed), BIG, SQUARE, pipeline="overlap{budget_mib=1}")
    assert highest(tight.graph) <= highest(given.graph) + 2**20


def highest(graph: fx.Graph) -> float:
    """Peak of memory, counted in another way than the pass does: from the last reader of each value backwards."""
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    base = {n: n for n in nodes}
    for n in nodes:
        if n.op == "call_function" and (
            is_wait(n) or n.target is operator.getitem or (is_view(n) and not is_collective(n))
        ):
            base[n] = base[n.all_input_nodes[0]]
    last = {n: place[n] for n in nodes}
    for n in nodes:
        for a in n.all_input_nodes:
            last[base[a]] = max(last[base[a]], place[n])
            if is_wait(n):  # what is sent is read until the wait
                for sent in a.all_input_nodes:
                    last[base[sent]] = max(last[base[sent]], place[n])
    made = [n for n in nodes if base[n] is n and n.op == "call_function"]
    size = {n: n.meta["val"].numel() * n.meta["val"].element_size() for n in made}
    return max(sum(size[n] for n in made if place[n] <= i < max(last[n], place[n] + 1)) for i in range(len(nodes)))


def test_the_same_order_every_time():
    texts = {graph_text(run(some_program(3), BIG, SQUARE).graph) for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("speed", [1e-3, 1.0, 1e3], ids=["slow link", "as assumed", "fast link"])
def test_estimates_do_not_change_the_order_of_collectives(speed, tmp_path):
    """Ranks may estimate differently: their data differ."""
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"wire": RATES["cpu"].wire * speed, "latency": RATES["cpu"].latency / speed}))
    made = run(some_program(5), BIG, SQUARE, pipeline=f"overlap{{costs={str(file)!r}}}")
    wanted = [n.name for n in traced(5).graph.nodes if n.op == "call_function" and is_collective(n)]
    assert [n.name for n in made.graph.nodes if n.op == "call_function" and is_collective(n)] == wanted


def test_a_write_stays_between_those_who_read():
    def write(graph: fx.Graph) -> None:
        (x, _), (wait,) = graph.find_nodes(op="placeholder"), [n for n in graph.nodes if is_wait(n)]
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.ops.aten.copy_.default, (x, wait)).meta["val"] = x.meta["val"]

    def fn(x, w):
        y = add_up(x.t() @ w)
        return y, x[1:] * 3

    order = [n.name for n in run(fn, BIG.clone(), SQUARE, prepare=write).graph.nodes]
    assert order.index("mm") < order.index("all_reduce") < order.index("mul") < order.index("copy__default")


def test_memory_is_a_limit():
    def program(x, w):  # as a user would write it: each part is used up before the next
        total, first = 0, 0
        for i in range(8):
            part = (x + i) @ w
            first = first + part[0]
            total = total + (part * part).sum(0)
        return add_up(first) + total

    given = trace_with_lines(program, _torch.fake_inputs((BIG, SQUARE)), Phase.POST_GRAD, {})
    tight, loose = (run(program, BIG, SQUARE, pipeline=f"overlap{{budget_mib={mib}}}") for mib in (0, 64))
    costs = Costs(given.graph, RATES["cpu"], {})
    assert peak(list(given.graph.nodes), costs) == highest(given.graph)
    assert highest(tight.graph) <= highest(given.graph) < highest(loose.graph)
    assert "overlap-budget" in remarks(tight) and "overlap-budget" not in remarks(loose)


# --- buckets -------------------------------------------------------------------------------------------

BUCKETS = "bucket-collectives, overlap"


def gather(x: Tensor) -> Tensor:
    return functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 1, dist.group.WORLD.group_name))


def scatter(x: Tensor) -> Tensor:
    name = dist.group.WORLD.group_name
    return functional.wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 1, name))


@pytest.mark.parametrize("send", [add_up, gather, scatter], ids=["all_reduce", "all_gather", "reduce_scatter"])
def test_small_ones_are_sent_as_one(send):
    def fn(x, w):
        a, b, c = send(x * 2), send(w.relu()), send(x[0] * 3)
        return a + 1, b + 1, c + 1

    made = run(fn, X, W, pipeline=BUCKETS)
    assert sum(is_collective(n) for n in made.graph.nodes) == sum(is_wait(n) for n in made.graph.nodes) == 1
    assert remarks(made)["bucketed"].startswith("3 collectives of 96 bytes")


NEAR = {
    "another op": lambda x, w: (add_up(x), add_up(w, "max")),
    "another dtype": lambda x, w: (add_up(x), add_up(w.double())),
    "another kind": lambda x, w: (add_up(x), gather(w)),
    "too large": lambda x, w: (add_up(x), add_up(x.repeat(100, 900))),
}


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_others_stay_apart(fn):
    assert sum(is_collective(n) for n in run(fn, X, W, pipeline=BUCKETS).graph.nodes) == 2


def test_one_that_the_next_depends_on_stays_apart_and_that_is_said():
    made = run(lambda x: add_up(add_up(x) * 2), X, pipeline=BUCKETS)
    assert sum(is_collective(n) for n in made.graph.nodes) == 2
    assert "stay apart: mul reads the first in between" in remarks(made)["not-bucketed"]


def test_a_bucket_has_a_size():
    def fn(x):
        return [y + 1 for y in [add_up(x * i) for i in range(6)]]

    made = run(fn, torch.randn(64), pipeline="bucket-collectives{kib=1}, overlap")
    assert sum(is_collective(n) for n in made.graph.nodes) == 2  # of 4 and 2


def test_sizes_that_may_differ_between_ranks_stay_apart():
    made = run(lambda x: (add_up(x), add_up(x * 2)), X, pipeline=BUCKETS, rows="any")
    assert sum(is_collective(n) for n in made.graph.nodes) == 2


# --- what is said --------------------------------------------------------------------------------------


def test_what_is_gained_and_what_stays_exposed_is_said():
    said = remarks(run(lambda x, w: add_up(x) + (x @ w).relu(), X, W))
    assert said["overlapped"].startswith("estimated: compute waits")
    assert "for %all_reduce; nothing that does not need it is left to do" in said["exposed"]


def test_costs_may_be_measured_ones(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"latency": 0.02, "wire": 1e9, "ops": {"aten.mm": 0.03}}))
    made = run(lambda x, w: add_up(x) + x @ w, X, W, pipeline=f"overlap{{costs={str(file)!r}}}")
    assert "compute waits 0 instead of 20 ms" in remarks(made)["overlapped"], remarks(made)
    assert "exposed" not in remarks(made)


@pytest.mark.parametrize("text", ["{", '{"speed": 3}', '{"wire": "fast"}', "[]", f'{{"wire": 1{400 * "0"}}}'])
def test_a_bad_file_of_costs(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(PassError, match=r"overlap: cannot read costs from .*\n.*it takes flops, bytes, overhead"):
        run(lambda x: add_up(x) + 1, X, pipeline=f"overlap{{costs={str(file)!r}}}")


def test_a_timeline_has_both_orders_and_marks_what_is_exposed():
    made = run(lambda x, w: add_up(x) + (x @ w).relu(), X, W)
    timeline = made.steps[0].context.timeline
    assert json.loads(json.dumps(timeline)) == timeline
    before, after = timeline["arms"]
    assert after["exposed"] < before["exposed"] and after["seconds"] < before["seconds"]
    assert {b["stream"] for b in after["blocks"]} == {"compute", "communication"}
    assert "waits for all_reduce" in timeline_text(timeline) and timeline_text(timeline).startswith("Estimated")
    picture = timeline_svg(timeline)
    assert picture.count('class="removed bar"') >= 4 and "estimated, not measured" in picture


# --- the passes before ---------------------------------------------------------------------------------


def test_equal_collectives_are_not_merged():
    made = run(lambda x: add_up(x * 1) + add_up(x * 1), X, pipeline=CLEANUP, phase=Phase.PRE_GRAD)
    assert sum(is_collective(n) for n in made.graph.nodes) == sum(is_wait(n) for n in made.graph.nodes) == 2


def test_a_collective_whose_result_is_not_read_stays():
    def fn(x):
        add_up(x)
        return x + 1

    made = run(fn, X, pipeline=CLEANUP, phase=Phase.PRE_GRAD)
    assert [is_collective(n) or is_wait(n) for n in made.graph.nodes if n.op == "call_function"] == [True, True, False]


def test_no_collective_is_started_to_see_what_it_gives():
    """While a rank compiles, the others may be anywhere."""
    graph = trace_with_lines(lambda x: add_up(x) * 2, _torch.fake_inputs((X,)), Phase.PRE_GRAD, {}).graph
    seen = Examples(graph, [X])
    assert seen(next(n for n in graph.nodes if n.op == "placeholder")) is X
    assert seen(next(n for n in reversed(graph.nodes) if n.op == "call_function")) is None
