"""A sharded SASRec on two ranks through `ascend-sim`, and streams and control edges of the GE graphs it becomes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile.lowering.ge.bisect import comparing
from turbogr_compile.lowering.ge.graph import Graph, Node
from turbogr_compile.lowering.ge.text import graph_text
from turbogr_compile.lowering.torchair import load as torchair
from turbogr_compile.lowering.torchair import native

from .simulator import needs_torchair

pytestmark = needs_torchair
PROGRAM = Path(__file__).with_name("sharded.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TURBOGR_TORCHAIR": str(torchair.find()),
              "PYTHONPATH": str(PROGRAM.parents[2])}  # fmt: skip
    programs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder / "store"), str(folder / "found")],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [program.communicate(timeout=600)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    for program, text in zip(programs, said, strict=True):
        assert program.returncode == 0, text[-3000:]
    return [json.loads((folder / f"found{rank}").read_text()) for rank in range(2)]


def test_two_ranks_train_as_one_process_does(ranks):
    """Loss and every parameter, after each step."""
    assert all(rank["worst"] < 1e-6 for rank in ranks), [rank["worst"] for rank in ranks]
    assert ranks[0]["losses"] == ranks[1]["losses"] and len(set(ranks[0]["losses"])) == len(ranks[0]["losses"])


def test_rows_are_exchanged_inside_of_the_forward_and_the_backward_graph(ranks):
    for rank in ranks:
        forward, backward, gradients = rank["graphs"]
        for graph in (forward, backward):
            assert types(graph).count("HcomAllToAllV") == 2
            assert "JaggedAttention" in types(graph) or "JaggedAttentionBackward" in types(graph)
        assert types(gradients).count("HcomAllReduce") == 1, "small gradients travel together"


def test_one_graph_takes_every_batch(ranks):
    """The number of rows that travel is another one in each step."""
    for rank in ranks:
        assert [graph["runs"] for graph in rank["graphs"]] == [3, 3, 3]


def test_collectives_are_on_their_stream_and_in_order_in_every_graph(ranks):
    for rank in ranks:
        for graph in rank["graphs"]:
            found = {node["name"]: node for node in graph["nodes"]}
            collectives = [node for node in graph["nodes"] if node["type"].startswith("Hcom")]
            assert all(node["stream"] == "communication" for node in collectives)
            for earlier, later in itertools.pairwise(collectives):
                assert earlier["name"] in needed(found, later["name"]), (earlier, later)


def types(graph) -> list[str]:
    return [node["type"] for node in graph["nodes"]]


def needed(found, name: str) -> set[str]:
    """Nodes that must have run before this one."""
    seen, todo = set(), [name]
    while todo:
        for source in (*found[name := todo.pop()]["inputs"], *found[name]["after"]):
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return seen


# --- one process is a group too ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    meeting_point = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def graphs_of(fn, *inputs, backward: bool = False, **options) -> list[Graph]:
    """GE graphs of a compiled function whose results equal eager's."""
    torch._dynamo.reset()
    given = {"target": "ascend-sim", "on_error": "raise", **options}
    compiled = torch.compile(fn, backend="turbogr", options=given)
    with native.watching() as seen:
        results = [f(*inputs) for f in (compiled, fn)]
        if backward:
            results = [torch.autograd.grad(r, [x for x in inputs if x.requires_grad]) for r in results]
    torch.testing.assert_close(*results)
    return [loaded.graph for loaded in seen]


def of_type(graph: Graph, type_: str) -> list[Node]:
    return [node for node in graph.nodes if node.type == type_]


def test_a_wait_is_held_back_to_where_its_value_is_read(group):
    """The product does not need the sum, so it stands before the wait, and the wait runs after it."""

    def fn(x, w):
        total = functional.all_reduce(x, "sum", group)
        return total + (x @ w).relu()

    (graph,) = graphs_of(fn, torch.randn(4, 3), torch.randn(3, 3))
    (started,), (relu,) = of_type(graph, "HcomAllReduce"), of_type(graph, "Relu")
    assert started.labels["_user_stream_label"] == "communication" and not relu.labels
    (held,) = [n for n in of_type(graph, "Identity") if n.controls]
    assert held.controls == (relu.name,) and held.inputs[0].node == started.name and not held.labels
    assert f"after %{relu.name}" in graph_text(graph)


def test_independent_collectives_are_chained(group):
    def fn(x, y):
        return functional.all_reduce(x, "sum", group) * functional.all_reduce(y, "max", group)

    (graph,) = graphs_of(fn, torch.randn(4), torch.randn(4))
    first, second = of_type(graph, "HcomAllReduce")
    assert (first.attribute("reduction"), second.attribute("reduction")) == ("sum", "max")
    link = graph.by_name[second.inputs[0].node]
    assert link.type == "Identity" and link.controls == (first.name,)
    assert link.labels["_user_stream_label"] == "communication"


def test_the_backward_has_labels_of_its_own(group):
    def fn(x, w):
        rows = functional.all_to_all_single_autograd(x @ w, [4], [4], group)
        return rows.square().sum()

    forward, backward = graphs_of(fn, torch.randn(4, 3), torch.randn(3, 3, requires_grad=True), backward=True)
    for graph in (forward, backward):
        (exchange,) = of_type(graph, "HcomAllToAllV")
        assert exchange.labels["_user_stream_label"] == "communication"


def test_without_collectives_there_are_no_labels_and_no_control_edges():
    for graph in graphs_of(lambda x: (x @ x).sum(), torch.randn(3, 3, requires_grad=True), backward=True):
        assert not any(node.labels or node.controls for node in graph.nodes)


def test_a_graph_with_collectives_is_compared_with_its_fx_graph(group):
    def fn(x, w):
        rows = functional.all_to_all_single(x, [4], [4], group)
        return functional.all_reduce(rows, "sum", group) + (x @ w).relu()

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="turbogr", options={"target": "ascend-sim"})
    with comparing() as differences:
        compiled(torch.randn(4, 3), torch.randn(3, 3))
    assert differences == []


# --- forms that GE or torchair do not have ---------------------------------------------------------------


def test_coalesced_collectives_are_taken_apart(group):
    def fn(x, y):
        a, b = functional.all_reduce_coalesced([x * 1, y * 2], "sum", group)
        return a.sum() + b.sum()

    for without, collectives in ((["bucket-collectives"], 2), ([], 1)):
        (graph,) = graphs_of(fn, torch.randn(4), torch.randn(3), without=without)
        assert len(of_type(graph, "HcomAllReduce")) == collectives


def test_an_average_is_a_sum(group):
    (graph,) = graphs_of(lambda x: functional.all_reduce(x, "avg", group) + 1, torch.randn(4))
    assert [node.attribute("reduction") for node in of_type(graph, "HcomAllReduce")] == ["sum"]


def test_what_depends_on_data_may_be_inside_and_runs_op_by_op(group):
    """Rows are counted in the step itself: GE gets what is left."""

    def fn(ids, table):
        unique, place = torch.unique(ids, return_inverse=True)
        count = (unique >= 0).sum().item()
        torch._check(count == unique.shape[0])
        rows = functional.all_to_all_single_autograd(F.embedding(unique, table), [count], [count], group)
        return F.embedding(place, rows).tanh().sum()

    torch._dynamo.reset()
    compiled = turbogr_compile.compile(fn, fullgraph=True, target="ascend-sim", on_error="raise")
    ids, table = torch.tensor([[3, 1, 3], [0, 1, 5]]), torch.randn(6, 4, requires_grad=True)
    results = [f(ids, table) for f in (compiled, fn)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(r, table) for r in results))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_few_rows_travel_too(group, count: int):
    """With 0 or 1 of something the graph runs op by op; it must have ops for that."""
    torch._dynamo.reset()

    def fn(x, place, counts):
        return functional.all_to_all_single(x * 2, counts, counts, group)[place]

    compiled = torch.compile(fn, backend="turbogr", options={"target": "ascend-sim"}, dynamic=True)
    x, place = torch.randn(5, 3), torch.tensor([0, 2, 1])
    torch._dynamo.decorators.mark_unbacked(x, 0)
    compiled(x, place, [5])
    x, place = torch.randn(count, 3), torch.zeros(min(count, 2), dtype=torch.int64)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    torch.testing.assert_close(compiled(x, place, [count]), fn(x, place, [count]))
