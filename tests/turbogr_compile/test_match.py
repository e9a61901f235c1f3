"""Matching and explaining: what agrees, what does not, and what is said about it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from turbogr_compile.graph.phases import Phase, Role, Vocabulary
from turbogr_compile.graph.shapes import symbolic_inputs
from turbogr_compile.pipeline.context import Context
from turbogr_compile.rules.rule import rule
from turbogr_compile.rules.search import Search
from turbogr_compile.testing import assert_near_miss, assert_rewrites, assert_unchanged, run_passes, trace_graph

PRE = Phase.PRE_GRAD
aten = torch.ops.aten
functional = torch.nn.functional


@rule("test-match-rms-norm", phase=PRE, inputs="float[..., d], float[d]")
def rms_norm(x, w):
    """RMS norm with one fixed epsilon."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


@rms_norm.replace
def _(x, w):
    return functional.rms_norm(x, w.shape, w, 1e-6)


NORM = "f32[b, n, d] f32[d]"


def make(name, fn, replacement=None, **settings):
    made = rule(name, phase=settings.pop("phase", PRE), **settings)(fn)
    made.replace(replacement or fn)
    return made


def explained(fn, made, inputs):
    (context,) = run_passes(trace_graph(fn, inputs), [made.pass_class()])
    return context


def attempt(graph, made):
    """What the rule does to a graph made by hand."""
    context = Context(made.pass_class(), Role.CAPTURED, "cpu", None, graph, Vocabulary(Phase.PRE_GRAD), explaining=True)
    made.pass_class().run(graph, context)
    return context


# --- the RMS norm of the documentation -----------------------------------------------------------


def test_operands_in_any_order_match():
    def before(x, w):
        return w * (torch.rsqrt(1e-6 + x.pow(2).mean(-1, keepdim=True)) * x)

    assert_rewrites(before, rms_norm.replacement, rule=rms_norm, inputs=NORM)


def test_literal():
    def fn(x, w):
        var = x.pow(2).mean(-1, keepdim=True)
        r = torch.rsqrt(var + 1e-5)
        return x * r * w

    miss = assert_near_miss(
        fn, rms_norm, "literal", NORM, text="wants 1e-06, found 1e-05", line="torch.rsqrt(var + 1e-5)"
    )
    assert (miss.matched, miss.total, len(miss.obstacles)) == (6, 6, 1)
    assert "keyword-only" in miss.obstacles[0].hint
    assert "test_match.py" in miss.site and "test_match.py" in miss.line.file


def test_escape():
    def fn(x, w):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = x * r * w
        return h, r

    miss = assert_near_miss(fn, rms_norm, "escape", NORM, text="is also returned", line="r = torch.rsqrt")
    assert (miss.matched, miss.total, len(miss.obstacles)) == (6, 6, 1)


def test_escape_names_the_other_user():
    def fn(x, w):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = x * r * w
        return h + r.relu()

    assert_near_miss(fn, rms_norm, "escape", NORM, text="also used by %relu at tests/turbogr_compile/test_match.py:")


def test_op():
    def fn(x, w):
        square = x * x
        return x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6) * w

    miss = assert_near_miss(
        fn, rms_norm, "op", NORM, text="wants aten.pow.Tensor_Scalar, found aten.mul.Tensor", line="square = x * x"
    )
    assert (miss.matched, miss.total) == (5, 6)
    assert "variant" in miss.obstacles[0].hint


def test_obstacles_are_collected():
    def fn(x, w):
        r = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return x * r * w

    miss = assert_near_miss(fn, rms_norm, "op", NORM)
    assert sorted(o.kind for o in miss.obstacles) == ["literal", "op"]


def test_a_pattern_that_ends_early():
    def fn(x, w):
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).relu()

    miss = assert_near_miss(fn, rms_norm, "op", NORM, text="wants aten.mul.Tensor on the result, found aten.relu")
    assert (miss.matched, miss.total) == (5, 6)


def test_dims_are_compared_at_the_rank_of_the_graph():
    def fn(x, w):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w

    assert_near_miss(fn, rms_norm, "literal", NORM, text="wants [2], found [1]")
    assert_rewrites(fn, rms_norm.replacement, rule=rms_norm, inputs="f32[b, d] f32[d]")


def test_dtype():
    def fn(x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    made = make(
        "test-match-half", fn, lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6), inputs="bf16[b, d], float[d]"
    )
    assert_near_miss(fn, made, "dtype", "f32[b, d] f32[d]", text="`x` must be bf16, %", line="test_match.py")


def test_an_int_in_place_of_a_float_is_told_by_its_dtype():
    made = make("test-match-float-factor", lambda x: (x * 2.0).neg(), inputs="any[a]", replacement=lambda x: x * -2.0)
    assert_near_miss(lambda x: (x * 2).neg(), made, "dtype", "i64[a]", text="gives i64, the rule f32")


@pytest.mark.parametrize(
    "declared, inputs, said",
    [
        ("float[n, d], float[d]", "f32[b, n, d] f32[d]", "`x` must be float[n, d], %"),
        ("float[n, d], float[d]", "f32[n, d] f32[1]", "x.shape[1] == w.shape[0] is not provable: "),
        ("float[n, 64], float[64]", "f32[n, d] f32[d]", "dim 1 of `x` must be 64, %"),
        ("float[n, n], float[n]", "f32[a, b] f32[b]", "x.shape[0] == x.shape[1] is not provable: "),
    ],
)
def test_shape(declared, inputs, said):
    made = make("test-match-shape", lambda x, w: (x + w).relu(), lambda x, w: (w + x).clamp(min=0), inputs=declared)
    assert_near_miss(lambda x, w: (x + w).relu(), made, "shape", inputs, text=said)


def test_the_other_order_of_operands_is_tried_before_giving_up():
    made = make(
        "test-match-order",
        lambda x, w: (x + w).relu(),
        lambda x, w: (x + w).clamp(min=0),
        inputs="float[n, d], float[d]",
    )
    assert_rewrites(
        lambda x, w: (w + x).relu(), lambda x, w: (x + w).clamp(min=0), rule=made, inputs="f32[n, d] f32[d]"
    )


def test_explaining_survives_a_when_that_relies_on_what_is_declared():
    made = make("test-match-relies", lambda x: x.exp().neg(), lambda x: x.neg(), inputs="float[a, b, c]")
    made.when(lambda m: m.require(m.x.shape[2] == 4, "four channels"))
    miss = assert_near_miss(lambda x: x.exp().neg(), made, "shape", "f32[a, b]", text="`x` must be float[a, b, c]")
    assert len(miss.obstacles) == 1


def test_a_pattern_that_vanishes_on_some_shapes():
    made = make(
        "test-match-vanishes", lambda x: x.exp() if x.dim() == 2 else x, lambda x: x.exp2(), inputs="float[...]"
    )
    assert_unchanged(lambda x: x.exp(), rule=made, inputs="f32[a, b, c]")
    assert_rewrites(lambda x: x.exp(), lambda x: x.exp2(), rule=made, inputs="f32[a, b]")


# --- values --------------------------------------------------------------------------------------


def test_a_value_used_twice_is_one_value():
    made = make("test-match-shared", lambda x: torch.sigmoid(x) * x, lambda x: functional.silu(x))
    assert_rewrites(
        lambda x, y: torch.sigmoid(y) * y, lambda x, y: functional.silu(y), rule=made, inputs="f32[a] f32[a]"
    )
    assert_near_miss(lambda x, y: torch.sigmoid(x) * y, made, "op", "f32[a] f32[a]", text="again for")


def test_an_inner_value_used_twice_is_one_node():
    def fn(x, y):
        e = x.exp()
        return e / (e + y)

    made = make("test-match-shared-op", fn, lambda x, y: 1 / (1 + y * (-x).exp()))
    assert_rewrites(fn, made.replacement, rule=made, inputs="f32[a] f32[a]")
    assert_unchanged(lambda x, y: x.exp() / (y.exp() + y), rule=made, inputs="f32[a] f32[a]")


def test_subtraction_has_an_order():
    made = make("test-match-sub", lambda x, y: (x - y.relu()).neg(), lambda x, y: y.relu() - x)
    assert_rewrites(lambda x, y: (x - y.relu()).neg(), lambda x, y: y.relu() - x, rule=made, inputs="f32[a] f32[a]")
    assert_unchanged(lambda x, y: (y.relu() - x).neg(), rule=made, inputs="f32[a] f32[a]")


def test_scaled_addition_has_an_order():
    made = make("test-match-alpha", lambda x, y: torch.add(x.relu(), y, alpha=2), lambda x, y: x.relu() + y + y)
    assert_rewrites(
        lambda x, y: torch.add(x.relu(), y, alpha=2), lambda x, y: x.relu() + y + y, rule=made, inputs="f32[a] f32[a]"
    )
    assert_unchanged(lambda x, y: torch.add(y, x.relu(), alpha=2), rule=made, inputs="f32[a] f32[a]")


def test_lists_of_tensors():
    made = make(
        "test-match-cat", lambda x, y: torch.cat([x, y], 1).relu(), lambda x, y: torch.cat([x.relu(), y.relu()], 1)
    )
    assert_rewrites(
        lambda x, y: torch.cat([x, y], -1).relu(), lambda x, y: torch.cat([x.relu(), y.relu()], 1), rule=made,
        inputs="f32[a, b] f32[a, c]",
    )  # fmt: skip
    assert_near_miss(
        lambda x, y: torch.cat([x, y, x], 1).relu(), made, "op", "f32[a, b] f32[a, c]", text="wants 2 values, found 3"
    )


def test_an_absent_argument_is_not_a_tensor():
    made = make(
        "test-match-bias", lambda x, w, b: functional.linear(x, w, b).relu(),
        lambda x, w, b: functional.linear(x, w, b).clamp(min=0), inputs="float[..., d], float[k, d], float[k]",
    )  # fmt: skip
    miss = assert_near_miss(
        lambda x, w: functional.linear(x, w).relu(),
        made,
        "op",
        "f32[n, d] f32[k, d]",
        text="wants a tensor, found None",
    )
    assert miss.matched == miss.total == 2
    bare = make(
        "test-match-no-bias", lambda x, w: functional.linear(x, w).relu(),
        lambda x, w: functional.linear(x, w).clamp(min=0), inputs="float[..., d], float[k, d]",
    )  # fmt: skip
    assert_near_miss(
        lambda x, w, b: functional.linear(x, w, b).relu(),
        bare,
        "op",
        "f32[n, d] f32[k, d] f32[k]",
        text="wants None, found input %",
    )


def test_which_result_of_an_op_is_taken_matters():
    made = make(
        "test-match-item", lambda x: x.topk(2, 1)[0].relu(), lambda x: x.relu().topk(2, 1)[0], inputs="float[a, b]"
    )
    assert_rewrites(lambda x: x.topk(2)[0].relu(), lambda x: x.relu().topk(2)[0], rule=made, inputs="f32[a, b]")
    assert_unchanged(lambda x: x.topk(2)[1].relu(), rule=made, inputs="f32[a, b]")


# --- symbolic sizes ------------------------------------------------------------------------------


def flat_and_back(x):
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2]).relu().reshape(x.shape[0], x.shape[1], x.shape[2])


def test_sizes_are_equal_by_proof():
    made = make("test-match-flat", flat_and_back, lambda x: x.relu(), inputs="float[a, b, c]")
    for inputs in ("f32[a, b, c]", "f32[a, 4, 8]", "f32[2, 3, 4]"):
        assert_rewrites(flat_and_back, lambda x: x.relu(), rule=made, inputs=inputs)
        assert_rewrites(
            lambda x: x.reshape(-1, x.shape[2]).relu().reshape(x.shape), lambda x: x.relu(), rule=made, inputs=inputs
        )
    assert_near_miss(
        lambda x: x.reshape(x.shape[0] * x.shape[1], x.shape[2]).relu().reshape(x.shape[1], x.shape[0], x.shape[2]),
        made, "shape", "f32[a, b, c]", text="wants f32[",
    )  # fmt: skip


def test_matching_adds_no_guard():
    made = make(
        "test-match-halves",
        lambda x: x.relu().reshape(2, -1).neg(),
        lambda x: x.relu().neg().reshape(2, -1),
        inputs="float[a]",
    )
    inputs = symbolic_inputs("f32[a]")
    module = trace_graph(lambda x: x.relu().reshape(-1, 1).neg(), inputs)
    env = inputs[0].fake_mode.shape_env
    before = [str(g.expr) for g in env.guards]
    (context,) = run_passes(module, [made.pass_class()])
    assert [str(g.expr) for g in env.guards] == before
    (miss,) = context.near_misses
    assert miss.obstacles[0].kind == "shape" and "which is not provable" in miss.obstacles[0].text


# --- barriers and insertion ----------------------------------------------------------------------


def by_hand(steps):
    """A graph of f32[4] values from (target, arguments) pairs; arguments are positions."""
    graph = fx.Graph()
    (value,) = symbolic_inputs("f32[4]")
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    for target, *args in steps:
        given = tuple(nodes[a] if type(a) is int else a for a in args)
        nodes.append(graph.create_node("call_function", target, given, name=target.__name__.split(".")[0]))
    graph.output(nodes[-1])
    for node in nodes:
        node.meta["val"] = value
        node.meta["stack_trace"] = f'File "train.py", line {nodes.index(node) + 10}, in step'
    return graph


@pytest.mark.parametrize(
    "between, said",
    [
        ((torch._C._set_grad_enabled, False), "set_grad_enabled at train.py:13 lies between %exp and %neg"),
        ((torch.amp.autocast_mode._enter_autocast, "cpu"), "_enter_autocast at train.py:13 lies between"),
        ((aten.copy_.default, 0, 1), "aten.copy_ at train.py:13 lies between %exp and %neg"),
        ((aten.add_.Tensor, 2, 1), "aten.add_.Tensor at train.py:13 lies between %exp and %neg"),
    ],
)
def test_barrier(between, said):
    made = make("test-match-barrier", lambda x: x.exp().neg(), lambda x: x.neg())
    graph = by_hand([(aten.exp.default, 0), between, (aten.neg.default, 2)])
    context = attempt(graph, made)
    assert not context.rewrites
    (miss,) = context.near_misses
    obstacle = next(o for o in miss.obstacles if o.kind == "barrier")
    assert said in obstacle.text and obstacle.node == between[0].__name__.split(".")[0]


def test_writing_to_a_view_of_what_is_read_is_a_barrier():
    made = make("test-match-view-barrier", lambda x, y: x.exp() + y, lambda x, y: y + x.exp2())
    steps = [(aten.exp.default, 0), (aten.alias.default, 1), (aten.zero_.default, 3), (aten.add.Tensor, 2, 1)]
    assert [o.kind for o in attempt(by_hand(steps), made).near_misses[0].obstacles] == ["barrier"]


@pytest.mark.parametrize(
    "steps",
    [
        [(aten.exp.default, 0), (aten.copy_.default, 1, 0), (aten.neg.default, 2)],  # nobody here reads y
        [(aten.copy_.default, 0, 1), (aten.exp.default, 0), (aten.neg.default, 3)],  # before all of it
        [(torch._C._set_grad_enabled, False), (aten.exp.default, 0), (aten.neg.default, 3)],
    ],
)
def test_no_barrier(steps):
    made = make("test-match-no-barrier", lambda x: x.exp().neg(), lambda x: x.neg())
    assert len(attempt(by_hand(steps), made).rewrites) == 1


def test_insert():
    made = make("test-match-insert", lambda x, y: (x.exp(), y.neg()), lambda x, y: (x.exp(), y.abs()))

    def fn(x):
        a = x.exp()
        b = a.relu().neg()
        return a + b

    miss = assert_near_miss(
        fn, made, "insert", "f32[a, b]", text="is computed after %relu already reads a result", line="b = a.relu()"
    )
    assert miss.matched == 2
    assert_rewrites(
        lambda x: x.relu().neg() + x.exp(), lambda x: x.relu().abs() + x.exp(), rule=made, inputs="f32[a, b]"
    )


def test_a_missing_further_output():
    made = make("test-match-outputs", lambda x, y: ((x @ y).relu().exp(), x.neg()), lambda x, y: (x @ y, x.neg()))
    assert_near_miss(
        lambda x: (x @ x).relu().exp(), made, "op", "f32[a, a]", text="wants aten.neg as a further result, found none"
    )


def test_a_result_that_is_also_an_input_is_refused():
    made = make("test-match-cycle", lambda x, y: (x.exp(), x.exp() * y), lambda x, y: (x.exp2(), x.exp2() * y))
    fn = lambda x: (x.exp(), x.exp() * x)  # noqa: E731
    assert_rewrites(fn, lambda x: (x.exp2(), x.exp2() * x), rule=made, inputs="f32[a]")

    def cyclic(x):
        e = x.exp()
        return e, x.exp() * e

    context = explained(cyclic, made, "f32[a]")
    assert not context.rewrites


# --- ranking -------------------------------------------------------------------------------------


def test_best_three_one_per_line_best_first():
    def norm(x, w, eps):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w

    def fn(x, w):
        a = norm(x, w, 1e-5)
        b = norm(a, w, 1e-4)
        c = b * torch.rsqrt((b * b).mean(-1, keepdim=True) + 1e-5) * w
        d = c * torch.rsqrt(c.pow(2).mean(1, keepdim=True) + 1e-5) * w
        e = d * torch.rsqrt((d * d).mean(1, keepdim=True) + 1e-5) * w
        return e

    misses = explained(fn, rms_norm, NORM).near_misses
    assert [(m.matched, len(m.obstacles)) for m in misses] == [(6, 1), (6, 2), (5, 2)]
    assert [m.line.code.split(" = ")[0].split()[0] for m in misses] == ["return", "d", "c"]


def test_less_than_half_is_not_told():
    assert explained(lambda x, w: x.pow(2).mean(-1, keepdim=True) + 1e-6, rms_norm, NORM).near_misses
    assert not explained(lambda x, w: x.pow(2).mean(-1, keepdim=True).relu(), rms_norm, NORM).near_misses
    assert not explained(lambda x, w: x * w, rms_norm, NORM).near_misses


def test_one_op_of_two_is_not_told():
    made = make("test-match-pair", lambda x: x.exp().neg(), lambda x: x.neg())
    assert not explained(lambda x: x.exp().relu(), made, "f32[a]").near_misses


def test_a_place_where_the_rule_applied_is_not_told():
    def fn(x, w):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w

    context = explained(fn, rms_norm, NORM)
    assert len(context.rewrites) == 1
    (miss,) = context.near_misses
    assert miss.line.code.startswith("return h")


def test_a_replacement_that_resembles_its_pattern_is_not_told():
    made = make("test-match-resembles", lambda x: x.exp().relu().neg() * 2.0, lambda x: x.exp().relu().neg() * -3.0)
    context = explained(lambda x: x.exp().relu().neg() * 2.0, made, "f32[a]")
    assert len(context.rewrites) == 1 and not context.near_misses


def test_nothing_is_explained_unless_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(Search, "near_misses", lambda *_: asked.append(1) or [])
    graph = trace_graph(lambda x, w: x * w, NORM).graph
    context = Context(rms_norm.pass_class(), Role.CAPTURED, "cpu", None, graph, Vocabulary(Phase.PRE_GRAD))
    rms_norm.pass_class().run(graph, context)
    assert not asked


def test_a_variant_that_applies_silences_the_others():
    made = make("test-match-variants", lambda x: x.pow(2).exp().neg(), lambda x: x.neg())
    made.variant(lambda x: (x * x).exp().neg())
    context = explained(lambda x: (x * x).exp().neg().relu(), made, "f32[a]")
    assert len(context.rewrites) == 1 and not context.near_misses
