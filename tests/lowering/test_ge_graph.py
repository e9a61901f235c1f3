"""GE graphs to read: prototypes, the checker, the text, and the search for the first node that differs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from turbogr_compile.lowering.ge import bisect, dtypes, graph, prototypes
from turbogr_compile.lowering.ge.check import certain, check, matched
from turbogr_compile.lowering.ge.graph import GraphError
from turbogr_compile.lowering.ge.interpreter import Interpreter
from turbogr_compile.lowering.ge.kernels import KERNELS
from turbogr_compile.lowering.ge.prototypes import Attribute, Port, Prototype
from turbogr_compile.lowering.ge.text import graph_text
from turbogr_compile.lowering.torchair import load as torchair

from .models import HSTU, SASRec
from .operators import build
from .simulator import Simulated, needs_torchair

pytestmark = needs_torchair
X, Y = torch.randn(4, 6), torch.randn(4, 6)


@pytest.fixture(autouse=True)
def loaded():
    torchair.simulated()


def test_both_enums_of_dtypes():
    from torchair._ge_concrete_graph.ge_ir_pb2 import DataType as InDescriptors
    from torchair.ge._ge_graph import DataType as InAttributes

    for name, dtype in dtypes.BY_NAME.items():
        assert dtypes.of_descriptor(getattr(InDescriptors, name)) is dtype
        assert dtypes.of_attribute(getattr(InAttributes, name)) is dtype
    assert dtypes.of_attribute(dtypes.UNDEFINED_ATTRIBUTE) is None


TEXT = """
    .INPUT(x, TensorType({DT_FLOAT, DT_FLOAT16,
                          DT_BF16}))\\n
    .OPTIONAL_INPUT(bias, "T")\\n
    .DYNAMIC_INPUT(rest, TensorType::IndexNumberType())\\n
    .OUTPUT(y, "T")\\n
    .DYNAMIC_OUTPUT(z, TensorType({BasicType(), DT_BOOL}))\\n
    .OUTPUT(w, SomethingNew)\\n
    .REQUIRED_ATTR(axis, ListInt)\\n
    .ATTR(mode, String, "a(b)")\\n
    .ATTR(eps, Float, 1e-5f)\\n
    .ATTR(flag, Bool, false)\\n
    .ATTR(count, int, -1)\\n
    .DATATYPE(T, TensorType({DT_INT8}))\\n
"""


def test_prototypes_are_parsed():
    found = prototypes.parse("Made", TEXT)
    floats = frozenset({torch.float32, torch.float16, torch.bfloat16})
    int8, indices = frozenset({torch.int8}), frozenset({torch.int32, torch.int64})
    assert found.inputs == (Port("x", "required", floats), Port("bias", "optional", int8, "T"),
                            Port("rest", "dynamic", indices))  # fmt: skip
    assert [(p.name, p.kind, p.variable) for p in found.outputs] == [
        ("y", "required", "T"), ("z", "dynamic", ""), ("w", "required", "")]  # fmt: skip
    assert torch.bool in found.outputs[1].dtypes and found.outputs[2].dtypes is None
    assert found.attributes == (
        Attribute("axis", "ListInt"), Attribute("mode", "String", False, '"a(b)"'),
        Attribute("eps", "Float", False, "1e-5f"), Attribute("flag", "Bool", False, "false"),
        Attribute("count", "Int", False, "-1"),
    )  # fmt: skip
    by_name = {a.name: a for a in found.attributes}
    for name, value in (("mode", "a(b)"), ("eps", 1e-5), ("flag", False), ("count", -1)):
        assert by_name[name].is_default(value)
    for name, value in (("axis", [0]), ("mode", "c"), ("eps", 1e-3), ("flag", True), ("count", 1)):
        assert not by_name[name].is_default(value)


def test_every_prototype_of_torchair_is_understood():
    types = prototypes.known_types()
    assert len(types) > 1700
    ports = [p for t in types for p in (*prototypes.find(t).inputs, *prototypes.find(t).outputs)]
    unknown = [p for p in ports if p.dtypes is None and not p.variable]
    assert len(unknown) < 0.05 * len(ports), "types that torch has no twin of, and slips of the pen"
    assert {a.type for t in types for a in prototypes.find(t).attributes} <= {*prototypes.TAGS, "Tensor"}
    assert all(prototypes.find(op) for op in KERNELS if op != "ScaleRows")


def test_own_prototypes():
    mine = Prototype("OwnOperator", (Port("x"),), (Port("y"),), (Attribute("n", "Int"),))
    prototypes.register(mine)
    prototypes.register(mine)
    assert prototypes.find("OwnOperator") == mine
    with pytest.raises(ValueError, match="another prototype"):
        prototypes.register(Prototype("OwnOperator", (), ()))
    with pytest.raises(ValueError, match="another prototype"):
        prototypes.register(Prototype("MatMul", (), ()))
    with pytest.raises(ValueError, match="no type 'Integer'"):
        prototypes.register(Prototype("OwnOther", (), (), (Attribute("n", "Integer"),)))


def test_names_of_dynamic_inputs_belong_to_their_port():
    ports = (Port("x", "dynamic"), Port("x1", "dynamic"), Port("axis"))
    names = ["x0", "x1", "x10", "x11", "axis", "other"]
    assert [p and p.name for p, _ in matched(ports, names)] == ["x", "x", "x1", "x1", "axis", None]


# One operator, with one thing wrong each.
def doctored(op, inputs, expected, change, **attributes):
    made = build(op, inputs, expected, attributes)
    (node,) = [o for o in made.op if o.type == op]
    change(node, made)
    return graph.from_proto(made)


def unfeed(place):
    def change(node, made):
        node.input[place] = ""

    return change


def rename(old, new):
    def change(node, made):
        node.attr[new].CopyFrom(node.attr[old])
        del node.attr[old]

    return change


def retype(node, made):
    node.type = "MatMull"


def retag(node, made):
    node.attr["transpose_x1"].s = b"yes"


PROBLEMS = [
    ("MatMul", [X, Y.t().clone(), None], X @ Y.t(), unfeed(1), {}, "input x2 is missing"),
    ("MatMul", [X, Y.t().clone(), None], X @ Y.t(), retype, {},
     r"GE knows no operator MatMull \(did you mean 'MatMul'"),
    ("MatMul", [X, Y.t().clone(), None], X @ Y.t(), retag, {}, "transpose_x1 is 'yes', and MatMul takes Bool"),
    ("MatMul", [X, Y.t().clone(), None], X @ Y.t(), rename("transpose_x1", "transpose_x3"), {},
     r"MatMul has no attribute transpose_x3 \(did you mean 'transpose_x"),
    ("EmbeddingDenseGrad", [X, torch.arange(4)], X, rename("num_weights", "padding_idx"), {"num_weights": 4},
     "attribute num_weights is missing"),
    ("MatMul", [X.double(), Y.double().t().clone(), None], (X @ Y.t()).double(), lambda n, m: None, {},
     "x1 is f64, and MatMul takes bf16, f16, f32, i32"),
    ("MatMul", [X, Y.half().t().clone(), None], X @ Y.t(), lambda n, m: None, {}, "x1 of f32, x2 of f16"),
    ("MatMul", [X[None], Y.t().clone(), None], (X @ Y.t())[None], lambda n, m: None, {}, "x1 has rank 3"),
    ("BatchMatMul", [X[0], Y.t().clone()], X[0] @ Y.t(), lambda n, m: None, {}, "x1 has rank 1.*takes rank 2 to 8"),
    ("Add", [X, Y.long()], X, lambda n, m: None, {}, "one dtype is wanted, and there are x1 of f32, x2 of i64"),
    ("GeluV2", [X], X.half(), lambda n, m: None, {}, "one dtype is wanted, and there are x of f32, y of f16"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "expected", "change", "attributes", "says"), PROBLEMS)
def test_checker_finds_what_is_wrong(op, inputs, expected, change, attributes, says):
    found = doctored(op, inputs, [expected], change, **attributes)
    problems = certain(check(found))
    with pytest.raises(GraphError, match=says):
        Interpreter(found)
    assert any(problem.node.type.startswith(op) for problem in problems)


def test_dtypes_that_newer_prototypes_may_list_are_doubts():
    made = build("TopKV2", [X, torch.tensor(2)], [X[:, :2], X[:, :2].to(torch.int32)], {})
    (doubt,) = check(graph.from_proto(made))
    assert not doubt.certain and str(doubt) == "%TopKV2 (TopKV2): k is i64, and TopKV2 takes i32"
    assert [str(d) for d in Interpreter(graph.from_proto(made)).doubts] == [str(doubt)]


def test_rules_are_checked_again_while_running():
    """torchair says nothing of helper nodes; their dtypes are known when they have run."""
    compiled = Simulated(lambda x: torch.baddbmm(x, x, x))
    with torch.no_grad(), pytest.raises(GraphError, match=r"%Mul_1 \(Mul, FX node %baddbmm\): one dtype is wanted"):
        compiled(torch.randn(2, 3, 3))


def test_missing_kernels_are_named_before_anything_runs():
    made = build("Cholesky", [torch.eye(3)], [torch.eye(3)], {})
    with pytest.raises(GraphError, match=r"no kernel for:\n  %Cholesky \(Cholesky\)\n  try: register_kernel"):
        Interpreter(graph.from_proto(made))


def test_order_and_circles():
    made = build("Add", [X, Y], [X + Y], {})
    backwards = type(made)(name=made.name, op=list(reversed(made.op)))
    assert [n.type for n in graph.from_proto(backwards).nodes][-1] == "NetOutput"
    assert torch.equal(Interpreter(graph.from_proto(backwards)).run([X, Y])[0], X + Y)
    for op in made.op:
        if op.type == "Add":
            op.input.append(f"{op.name}:-1")
    with pytest.raises(GraphError, match="runs in a circle through %Add"):
        graph.from_proto(made)
    for op in made.op:
        if op.type == "Add":
            op.input[-1] = "gone:-1"
    with pytest.raises(GraphError, match="reads %gone, which is not there"):
        graph.from_proto(made)


def test_inputs_are_held_against_the_graph():
    run = Interpreter(graph.from_proto(build("Add", [X, Y], [X + Y], {}))).run
    with pytest.raises(GraphError, match=r"input 1, %in1 \(Data\), is f32\[2, 6\], and the graph declares \[4, 6\]"):
        run([X, Y[:2]])
    with pytest.raises(GraphError, match=r"is f64\[4, 6\], and the graph declares f32"):
        run([X, Y.double()])
    with pytest.raises(GraphError, match="got 1 inputs, and reads number 1"):
        run([X])


def test_values_are_freed_after_their_last_use():
    compiled = Simulated(lambda x: ((x + 1).relu().exp() * 2).sum())
    alive = []
    real = Interpreter._run_step

    def step(self, step, values):
        real(self, step, values)
        alive.append(sum(source.node.partition("_")[0] not in ("Const", "arg0") for source in values))

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Interpreter, "_run_step", step)
        compiled(X)
    assert max(alive) == 1


def tower(x, weight, lengths):
    hidden = F.relu(x @ weight.t())
    top = hidden[:, :3] * 0.5
    return F.layer_norm(top, (3,)).half(), lengths.cumsum(0), hidden.chunk(2, 1)[1]


def test_text():
    compiled = Simulated(tower)
    with torch.no_grad():
        compiled(torch.randn(4, 6), torch.randn(8, 6), torch.tensor([1, 2]))
    # fmt: off
    assert_expected_inline(graph_text(compiled.graphs[0]), """\
graph(%arg0_1: f32[8, 6], %arg1_1: f32[4, 6], %arg2_1: i64[2]):
  %Transpose : f32[6, 8] = Transpose(%arg0_1, [1, 0])   # t
  %MatMul : f32[4, 8] = MatMul(%arg1_1, %Transpose, None)   # mm
  %Relu : f32[4, 8] = Relu(%MatMul)   # relu
  %StridedSliceV2 : f32[4, 3] = StridedSliceV2(%Relu, 0, 3, 1, 1)   # slice_1
  %Mul = Mul(%StridedSliceV2, 0.5)   # for mul
  %Cast : f32[4, 3] = Cast(%Mul) {dst_type=f32}   # mul
  %Fill = Fill([3]:i32, 1.0)   # for native_layer_norm
  %Fill_1 = Fill([3]:i32, 0.0)   # for native_layer_norm
  %LayerNormV4 : (f32[4, 3], f32[4, 1], f32[4, 1]) = LayerNormV4(%Cast, [3], %Fill, %Fill_1)   # native_layer_norm
  %Cast_1 : f16[4, 3] = Cast(%LayerNormV4:0) {dst_type=f16}   # _to_copy
  %Cumsum : i64[2] = Cumsum(%arg2_1, 0)   # cumsum
  %Pack = Pack(4, -1) {N=2}   # for split
  %Cast_2 = Cast(%Pack) {dst_type=i64}   # for split
  %SplitV : (f32[4, 4], f32[4, 4]) = SplitV(%Relu, %Cast_2, 1:i32) {num_split=2}   # split
  return (%Cast_1, %Cumsum, %SplitV:1)
""")
    # fmt: on


def test_text_under_the_lines_of_the_program():
    compiled = Simulated(tower)
    with torch.no_grad():
        compiled(torch.randn(4, 6), torch.randn(8, 6), torch.tensor([1, 2]))
    text = graph_text(compiled.graphs[0], compiled.compiled[0].runner.fx_graph.graph)
    assert "hidden = F.relu(x @ weight.t())\n  %Transpose" in text
    assert "  %Transpose" not in text.partition("top = hidden")[2]


def test_text_of_a_dynamic_graph_is_the_same_in_every_run():
    texts = []
    for _ in range(2):
        compiled = Simulated(lambda x, n: (x.reshape(n, -1) * n).sum(0), dynamic=True)
        with torch.no_grad():
            compiled(torch.randn(6, 4), 3)
        texts.append(graph_text(compiled.graphs[0]))
    assert texts[0] == texts[1]
    # fmt: off
    assert_expected_inline(texts[0], """\
graph(%arg2_1: f32[s77, s27], %arg3_1: i64[]):
  %Pack : i64[2] = Pack(%arg3_1, -1) {N=2}   # for view
  %Reshape : f32[s86, s27*((s77//s86))] = Reshape(%arg2_1, %Pack)   # view
  %Cast = Cast(%arg3_1) {dst_type=f32}   # for mul_5
  %Mul = Mul(%Reshape, %Cast)   # for mul_5
  %Cast_1 : f32[s86, s27*((s77//s86))] = Cast(%Mul) {dst_type=f32}   # mul_5
  %ReduceSum : f32[s27*((s77//s86))] = ReduceSum(%Cast_1, [0])   # sum_1
  return (%ReduceSum)
""")
    # fmt: on


def test_text_of_streams_and_control_edges():
    compiled = Simulated(lambda x, w: x)  # loads torchair
    scope = compiled.torchair.scope

    def two_streams(x, w):
        with scope.npu_stream_switch("emb", 3):
            a = torch.relu(x @ w)
        b = x.exp()
        with scope.npu_stream_switch("late"):
            c = scope.npu_wait_tensor(b, a) * x
        return c, a

    compiled = Simulated(two_streams)
    with torch.no_grad():
        late, early = compiled(X, Y.t().clone() @ Y)
    torch.testing.assert_close(late, X.exp() * X)
    torch.testing.assert_close(early, torch.relu(X @ (Y.t() @ Y)))
    # fmt: off
    assert_expected_inline(graph_text(compiled.graphs[0]), """\
graph(%arg0_1: f32[4, 6], %arg1_1: f32[6, 6]):
  %MatMul : f32[4, 6] = MatMul(%arg0_1, %arg1_1, None) [inner_parallel=True, stream=emb, priority=3]   # mm
  %Relu : f32[4, 6] = Relu(%MatMul) [inner_parallel=True, stream=emb, priority=3]   # relu
  %Exp : f32[4, 6] = Exp(%arg0_1)   # exp
  %Identity : f32[4, 6] = Identity(%Exp) after %Relu [inner_parallel=True, stream=late, priority=0]   # wait_tensor
  %Mul = Mul(%Identity, %arg0_1) [inner_parallel=True, stream=late, priority=0]   # for mul
  %Cast : f32[4, 6] = Cast(%Mul) {dst_type=f32} [inner_parallel=True, stream=late, priority=0]   # mul
  return (%Cast, %Relu)
""")
    # fmt: on


def test_helpers_know_for_whom_they_were_made():
    compiled = Simulated(lambda x: (x * 2 + 1).sum())
    with torch.no_grad():
        compiled(X)
    (found,) = compiled.graphs
    helpers = [n for n in found.nodes if not n.fx and n.type not in ("Data", "NetOutput")]
    assert helpers and all(n.origin in ("mul", "add", "sum_1") for n in helpers)


def test_of_wants_what_torchair_made():
    with pytest.raises(GraphError, match="function holds no GE graph"):
        graph.of(lambda: None)


def arguments_of(compiled):
    """For a graph that was compiled for sizes 5 and 6, or with static ones."""
    values = [p.meta["val"] for p in compiled.runner.fx_graph.graph.find_nodes(op="placeholder")]
    named = [str(v) for v in values if isinstance(v, torch.SymInt)]
    symbols = dict(zip(named, (5, 6), strict=False))

    def argument(value):
        if isinstance(value, torch.SymInt):
            return symbols[str(value)]
        if value.dtype == torch.uint8:
            return torch.randint(0, 256, (16,), dtype=torch.uint8)  # the packed mask of thirty elements
        shape = [d if isinstance(d, int) else symbols[str(d)] for d in value.shape]
        return torch.randn(shape) if value.is_floating_point() else torch.randint(0, 9, shape).to(value.dtype)

    return [argument(value) for value in values]


def test_bisect_agrees_where_nothing_is_wrong():
    torch.manual_seed(0)
    compiled = Simulated(HSTU())
    compiled(*HSTU.batch(3, 7)).backward()
    for kept in compiled.compiled:
        assert bisect.first_difference(kept, arguments_of(kept)) is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_bisect_goes_through_dropout(dynamic):
    """FX takes GE's random numbers, and GE's gradient through its packed mask."""
    torch.manual_seed(0)
    compiled = Simulated(lambda x: (F.dropout(x * 2, 0.5, True) * x).sum(), dynamic=dynamic)
    x = torch.randn(5, 6, requires_grad=True)
    compiled(x).backward()
    for kept in compiled.compiled:
        assert bisect.first_difference(kept, arguments_of(kept)) is None


def test_bisect_names_a_doctored_kernel(monkeypatch):
    torch.manual_seed(0)
    compiled = Simulated(SASRec())
    compiled(*SASRec.batch(3, 7))
    monkeypatch.setitem(KERNELS, "SoftmaxV2", lambda node, x: x.softmax(-1) * 1.01)
    forward = compiled.compiled[0]
    del forward.runner.graph._executor.interpreter
    forward.runner.graph._executor.compile()
    found = bisect.first_difference(forward, arguments_of(forward))
    assert found.ge.type == "SoftmaxV2" and found.suspects[0].target is torch.ops.aten._softmax.default
    assert [s.name for s in found.suspects] == ["_softmax", "expand_2"], "expand converts to nothing"
    assert "weights = scores.masked_fill" in str(found) and "differ: by up to" in str(found)


def test_bisect_finds_the_view_fault():
    compiled = Simulated(
        lambda x: x.permute(0, 2, 1, 3).split(2, dim=1)[0].transpose(1, 2).reshape(3, 5, -1) * 2, view_optimize=True
    )
    x = torch.randn(3, 5, 4, 2)
    with torch.no_grad():
        compiled(x)
    found = bisect.first_difference(compiled.compiled[0], [x])
    names = [str(s.target) for s in found.suspects]
    assert names == ["aten.transpose.int", "aten.reshape.default", "aten.mul.Tensor"], "the views, and who reads them"
