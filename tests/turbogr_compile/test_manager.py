"""The manager observes changes, keeps metadata true, verifies, and survives failing passes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from turbogr_compile.check.verify import Verifier
from turbogr_compile.errors import PassError, VerifyError
from turbogr_compile.graph.phases import Phase, Role, Vocabulary
from turbogr_compile.graph.provenance import Origin
from turbogr_compile.pipeline.instrument import GraphRun
from turbogr_compile.pipeline.manager import Manager
from turbogr_compile.pipeline.options import Options
from turbogr_compile.pipeline.pass_base import Pass
from turbogr_compile.pipeline.pipeline import Pipeline, Repeat
from turbogr_compile.show.recording import Recording
from turbogr_compile.testing import trace_graph

aten = torch.ops.aten


def model(x, y):
    h = torch.relu(x)
    z = h + y
    return z * 2.0, z.sum(1)


def captured(fn=model) -> fx.GraphModule:
    return trace_graph(fn, "f32[4, 6] f32[4, 6]")


def symbolic(fn=model) -> fx.GraphModule:
    return trace_graph(fn, "f32[a, b] f32[a, b]")


def run(module: fx.GraphModule, *passes, verify="fast", on_error="raise", watch=(), **more) -> GraphRun:
    options = Options(pipeline=Pipeline(passes), verify=verify, on_error=on_error, **more)
    words = Vocabulary(Phase.PRE_GRAD)
    this = GraphRun("test-captured", Role.CAPTURED, Phase.PRE_GRAD, "cpu", options.plan(), options, module, words)
    verifier = [] if verify == "off" else [Verifier(verify)]
    Manager(this, [*verifier, *watch]).run_all()
    return this


def find(graph: fx.Graph, target) -> fx.Node:
    return graph.find_nodes(op="call_function", target=target)[0]


@dataclass(frozen=True)
class Edit(Pass):
    """Base of the little passes below."""

    phase = Phase.PRE_GRAD


@dataclass(frozen=True)
class ReluToSilu(Edit):
    name = "relu-to-silu"

    def run(self, graph, ctx):
        for node in graph.find_nodes(op="call_function", target=aten.relu.default):
            with ctx.rewrite("activation", node):
                with graph.inserting_before(node):
                    new = graph.call_function(aten.silu.default, node.args)
                node.replace_all_uses_with(new)
                graph.erase_node(node)


@dataclass(frozen=True)
class SiluToRelu(Edit):
    name = "silu-to-relu"

    def run(self, graph, ctx):
        for node in graph.find_nodes(op="call_function", target=aten.silu.default):
            with ctx.rewrite("activation", node):
                node.target = aten.relu.default


@dataclass(frozen=True)
class Nothing(Edit):
    name = "nothing"

    def run(self, graph, ctx):
        pass


def test_change_is_observed_not_reported():
    done = run(captured(), Nothing(), ReluToSilu())
    assert [(s.pass_.name, s.status) for s in done.steps] == [("nothing", "unchanged"), ("relu-to-silu", "changed")]


def test_new_nodes_get_metadata_origin_and_user_line():
    module = captured()
    line = find(module.graph, aten.relu.default).meta["stack_trace"]
    run(module, ReluToSilu(), verify="strict")
    silu = find(module.graph, aten.silu.default)
    assert silu.meta["val"].shape == (4, 6)
    assert silu.meta["turbogr"] == Origin("relu-to-silu", "activation", ("relu",))
    assert silu.meta["stack_trace"] == line and "test_manager.py" in line
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(module(x, y)[0], (torch.nn.functional.silu(x) + y) * 2)


def test_metadata_is_refreshed_only_as_far_as_it_changed():
    from turbogr_compile.graph import metadata

    module = captured()
    graph = module.graph
    before = metadata.signatures(graph)
    relu = find(graph, aten.relu.default)
    relu.args = (graph.find_nodes(op="placeholder")[1],)
    assert [n.target for n in metadata.refresh(module, before)] == [aten.relu.default]


def test_roles_and_failed_needs_skip_with_a_reason():
    @dataclass(frozen=True)
    class OnlyBackward(Nothing):
        name = "only-backward"
        roles = frozenset({Role.BACKWARD})

    done = run(captured(), OnlyBackward())
    assert (done.steps[0].status, done.steps[0].reason) == ("skipped", "not for captured graphs")


@dataclass(frozen=True)
class Raises(Edit):
    name = "raises"

    def run(self, graph, ctx):
        node = find(graph, aten.add.Tensor)
        with ctx.rewrite("oops", node):
            graph.erase_node(find(graph, aten.mul.Tensor).users and next(iter(graph.nodes)))


def test_failing_pass_is_dropped_and_the_graph_starts_over():
    module = captured()
    text = module.code
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = run(module, ReluToSilu(), Raises(), on_error="fallback")
    assert [(s.pass_.name, s.status) for s in done.steps] == [("raises", "failed"), ("relu-to-silu", "changed")]
    assert "silu" in module.code and module.code != text
    (remark,) = done.remarks
    assert remark.id == "pass-failed" and remark.pass_name == "raises"
    message = str(caught[0].message)
    for part in ("001 raises raised", "node %add", "test_manager.py", "z = h + y", "'without': ['raises']"):
        assert part in message, message


def test_failing_pass_raises_when_asked():
    with pytest.raises(PassError, match=r"raises raised RuntimeError") as error:
        run(captured(), Raises(), on_error="raise")
    assert error.value.pass_name == "raises" and error.value.node == "add"


def test_pass_needing_a_failed_one_is_skipped():
    @dataclass(frozen=True)
    class Dependent(Nothing):
        name = "zz-dependent"
        needs = ("raises",)

    with pytest.warns(UserWarning, match="goes on without this pass"):
        done = run(captured(), Raises(), Dependent(), on_error="fallback")
    assert [s.reason for s in done.steps][1] == "needs raises, which failed"


def test_repeat_stops_when_nothing_changes():
    done = run(captured(), Repeat((ReluToSilu(),)))
    assert [s.status for s in done.steps] == ["changed", "unchanged"]


def test_repeat_names_passes_that_undo_each_other():
    with pytest.raises(PassError, match="relu-to-silu and silu-to-relu undo each other"):
        run(captured(), Repeat((ReluToSilu(), SiluToRelu())))
    with pytest.warns(UserWarning, match="undo each other"):
        done = run(captured(), Repeat((ReluToSilu(), SiluToRelu())), on_error="fallback")
    assert [s.status for s in done.steps if s.pass_.name == "silu-to-relu"] == ["failed", "failed"]


def test_repeat_that_does_not_settle_says_so():
    def grow(graph, ctx):
        node = find(graph, aten.mul.Tensor)
        with ctx.rewrite("grow", node), graph.inserting_after(node):
            new = graph.call_function(aten.relu.default, (node,))
            node.replace_all_uses_with(new, lambda user: user is not new)

    done = run(captured(), Repeat((broken("grow", grow),), limit=3))
    assert [r.id for r in done.remarks] == ["repeat-limit"] and len(done.steps) == 3


def test_stop_after_counts_rewrites():
    def two(x, y):
        return torch.relu(x) + torch.relu(y), x.sum(1)

    module = captured(two)
    done = run(module, ReluToSilu(), SiluToRelu(), stop_after="relu-to-silu:1")
    assert [n.target for n in module.graph.nodes if n.target in (aten.relu.default, aten.silu.default)] == [
        aten.silu.default, aten.relu.default,
    ]  # fmt: skip
    assert done.steps[1].reason == "stop_after=relu-to-silu:1"


# --- the verifier: a broken pass for each check ------------------------------------------------------


def broken(name, edit, **attributes):
    def body(self, graph, ctx):
        edit(graph, ctx)

    return dataclass(frozen=True)(type(name, (Edit,), {"name": name, "run": body, **attributes}))()


def change_output(graph, ctx):
    node = find(graph, aten.mul.Tensor)
    with ctx.rewrite("shape", node), graph.inserting_after(node):
        new = graph.call_function(aten.sum.dim_IntList, (node, [0]))
        node.replace_all_uses_with(new, lambda user: user is not new)


def impossible_arguments(graph, ctx):
    node = find(graph, aten.add.Tensor)
    with ctx.rewrite("shape", node), graph.inserting_before(node):
        other = graph.call_function(aten.reshape.default, (node.args[0], [3, 8]))
        node.args = (other, node.args[1])


def mutate(graph, ctx):
    node = find(graph, aten.relu.default)
    with ctx.rewrite("in place", node):
        node.target = aten.relu_.default
        with graph.inserting_before(node):
            new = graph.call_function(aten.relu_.default, node.args)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def drop_input(graph, ctx):
    y = graph.find_nodes(op="placeholder")[1]
    with ctx.rewrite("input", y):
        y.replace_all_uses_with(graph.find_nodes(op="placeholder")[0])
        graph.erase_node(y)


def out_of_order(graph, ctx):
    relu, add = find(graph, aten.relu.default), find(graph, aten.add.Tensor)
    with ctx.rewrite("order", add):
        add.append(relu)


def fewer_outputs(graph, ctx):
    (output,) = graph.find_nodes(op="output")
    with ctx.rewrite("output", *output.all_input_nodes):
        output.args = ((output.args[0][0],),)


FAULTS = [
    (change_output, "fast", r"changed output 0 from f32\[4, 6\] to f32\[6\]"),
    (impossible_arguments, "fast", r"%add cannot be computed from its arguments"),
    (mutate, "fast", r"aten\.relu_\.default, which mutates its argument"),
    (drop_input, "fast", r"removed or changed input 1, f32\[4, 6\]"),
    (out_of_order, "fast", r"left an ill-formed graph"),
    (fewer_outputs, "fast", r"number of outputs from 2 to 1"),
]


@pytest.mark.parametrize(("edit", "level", "message"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_verifier_blames_the_pass(edit, level, message):
    name = edit.__name__.replace("_", "-")
    with pytest.raises(VerifyError, match=message) as error:
        run(captured(), broken(name, edit), verify=level)
    assert error.value.pass_name == name
    assert f"001 {name}" in str(error.value)
    if edit is not drop_input:  # an input has no line of its own
        assert any(f"test_manager.py:{n}  " in str(error.value) for n in range(26, 31)), str(error.value)


def test_strict_wants_an_origin_for_every_new_node():
    def anonymous(graph, ctx):
        node = find(graph, aten.relu.default)
        with graph.inserting_before(node):
            new = graph.call_function(aten.relu.default, node.args)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        new.kwargs = {}

    def visible(graph, ctx):
        anonymous(graph, ctx)
        find(graph, aten.relu.default).target = aten.silu.default

    run(captured(), broken("anonymous", visible), verify="fast")
    with pytest.raises(VerifyError, match=r"outside of `with ctx.rewrite"):
        run(captured(), broken("anonymous", visible), verify="strict")


def test_strict_catches_outputs_that_begin_to_share_memory():
    def twice(x, y):
        return x + y, x + y

    def merge(graph, ctx):
        first, second = graph.find_nodes(op="call_function", target=aten.add.Tensor)
        with ctx.rewrite("merge", first, second):
            second.replace_all_uses_with(first)
            graph.erase_node(second)

    with pytest.raises(VerifyError, match="which outputs are the same tensor"):
        run(captured(twice), broken("merge", merge), verify="strict")


def test_strict_catches_metadata_that_lies():
    def lie(graph, ctx):
        node = find(graph, aten.relu.default)
        with ctx.rewrite("lie", node):
            node.target = aten.silu.default
        mul = find(graph, aten.mul.Tensor)
        mul.meta["val"] = mul.meta["val"].to(torch.float64)
        find(graph, aten.add.Tensor)

    with pytest.raises(VerifyError, match=r"changed output 0 from f32.* to f64|says f64.* but computes f32"):
        run(captured(), broken("lie", lie), verify="strict")


def test_numeric_catches_wrong_numbers():
    with pytest.raises(VerifyError, match=r"changed the numbers: result 0: relative error"):
        run(captured(), ReluToSilu(), verify="numeric")
    run(captured(), Nothing(), verify="numeric")


def test_looking_at_a_symbolic_size_is_caught_even_when_nothing_changes():
    def peek(graph, ctx):
        size = graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
        if size % 16 == 0:
            pass

    with pytest.raises(VerifyError, match=r"specialised a symbolic size .*known\(\.\.\.\)"):
        run(symbolic(), broken("peek", peek))
    run(symbolic(), broken("peek", peek, adds_guards=True))


def test_known_never_adds_a_guard():
    from turbogr_compile.graph.shapes import known

    def ask(graph, ctx):
        size = graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
        assert not known(size % 16 == 0) and known(size >= 0)

    run(symbolic(), broken("ask", ask))


# --- recording ---------------------------------------------------------------------------------------


def test_record_keeps_every_rewrite_and_its_cost():
    recording = Recording()
    run(symbolic(lambda x, y: (torch.relu(x) @ torch.relu(y).T,)), ReluToSilu(), Nothing(), watch=[recording])
    (record,) = recording.records
    silu = next(s for s in record["steps"] if s["name"] == "relu-to-silu")
    assert [r["rule"] for r in silu["rewrites"]] == ["activation", "activation"]
    added = [record["nodes"][i]["text"] for r in silu["rewrites"] for i in r["added"]]
    assert any("aten.silu(%" in t and "f32[" in t for t in added)
    assert record["steps"][0]["stats"]["flops"][0].count("**2") == 1  # 2 * a * a * b
    assert silu["stats"]["ops"] == {"aten.relu": -2, "aten.silu": 2}
    assert len(record["snapshots"]) >= 3 and record["steps"][0]["snapshot"] == 0
    assert next(s for s in record["steps"] if s["name"] == "nothing")["status"] == "unchanged"
