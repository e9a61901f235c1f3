"""Defining rules: holes, literals, variants, sets, errors, and the passes they become."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from turbogr_compile.capture import trace
from turbogr_compile.errors import PassError, RuleError
from turbogr_compile.graph.phases import Phase, Role, Vocabulary
from turbogr_compile.graph.provenance import declaration_site
from turbogr_compile.graph.shapes import known
from turbogr_compile.pipeline import catalogue
from turbogr_compile.pipeline.context import Context
from turbogr_compile.pipeline.pipeline import Pipeline
from turbogr_compile.rules.rule import RuleSet, rule
from turbogr_compile.testing import assert_near_miss, assert_rewrites, assert_unchanged, run_passes, trace_graph

PRE, POST = Phase.PRE_GRAD, Phase.POST_GRAD


@rule("test-fold-double-transpose", phase=POST)
def twice(x, *, a: int, b: int):
    """Drop a transpose that undoes another."""
    return x.transpose(a, b).transpose(a, b)


@twice.replace
def _(x, *, a, b):
    return x


@rule("test-fuse-rms-norm", phase=PRE, inputs="float[..., d], float[d]", after=("test-fold-double-transpose",))
def rms_norm(x, w, *, eps: float):
    """Compute RMS norms with one op."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


@rms_norm.variant
def _(x, w, *, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


@rms_norm.replace
def _(x, w, *, eps):
    return torch.nn.functional.rms_norm(x, w.shape, w, eps)


def make(name, fn, replacement, **settings):
    made = rule(name, phase=PRE, **settings)(fn)
    made.replace(replacement)
    return made


def first_use(made):
    return [spelling.patterns(Vocabulary(made.phase)) for spelling in made.spellings]


# --- literals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("a, b", [(0, 1), (1, 2), (-1, 0)])
def test_int_literals_that_are_dims(a, b):
    assert_rewrites(
        lambda x: x.transpose(a, b).transpose(a, b).relu(), lambda x: x.relu(), rule=twice, inputs="f32[n, m, k]"
    )


def test_one_int_literal_at_two_places_must_agree():
    def fn(x):
        return x.transpose(0, 1).transpose(0, 2)

    assert_unchanged(fn, rule=twice, inputs="f32[a, b, c]")


def test_int_literal_that_is_a_count():
    def fn(x, *, n: int):
        return x.repeat(n, 1).relu()

    made = make("test-relu-before-repeat", fn, lambda x, *, n: x.relu().repeat(n, 1), inputs="float[a, b]")
    assert_rewrites(lambda x: x.repeat(3, 1).relu(), lambda x: x.relu().repeat(3, 1), rule=made, inputs="f32[a, b]")
    assert_unchanged(lambda x: x.repeat(3, 2).relu(), rule=made, inputs="f32[a, b]")


def test_int_literal_that_must_divide_a_size():
    def fn(x, *, heads: int):
        return x.reshape(x.shape[0], heads, x.shape[1] // heads).transpose(0, 1).transpose(0, 1)

    made = make("test-split-heads", fn, lambda x, *, heads: x.reshape(x.shape[0], heads, x.shape[1] // heads))
    assert_rewrites(
        lambda x: x.reshape(x.shape[0], 4, 16).transpose(0, 1).transpose(0, 1),
        lambda x: x.reshape(x.shape[0], 4, 16),
        rule=made, inputs="f32[b, 64]",
    )  # fmt: skip


def test_int_literal_beside_a_float_is_found_though_the_normal_form_writes_a_float():
    def fn(x, *, n: int):
        return (x * n).relu()

    made = make("test-int-factor", fn, lambda x, *, n: x.relu() * n)
    assert_rewrites(lambda x: (x * 3).relu(), lambda x: x.relu() * 3, rule=made, inputs="f32[a, b]")
    assert_unchanged(lambda x: (x * 2.5).relu(), rule=made, inputs="f32[a, b]")


def test_float_literals_take_any_number():
    def fn(x, *, s: float):
        return x.relu() * s

    made = make("test-scale-first", fn, lambda x, *, s: (x * s).relu())
    made.when(lambda m: m.require(m.s > 0, "a negative factor turns the order around"))
    for s in (0.5, 3):
        assert_rewrites(lambda x, s=s: x.relu() * s, lambda x, s=s: (x * s).relu(), rule=made, inputs="f32[a, b]")
    assert_near_miss(lambda x: x.relu() * -1.0, made, "when", "f32[a, b]", text="turns the order around")


def test_bool_literals():
    def fn(x, *, keep: bool, largest: bool):
        return x.relu().sum(1, keepdim=keep).sort(0, largest)[0]

    made = make("test-bools", fn, lambda x, *, keep, largest: x.clamp(min=0).sum(1, keepdim=keep).sort(0, largest)[0])
    for keep, largest in ((True, True), (True, False), (False, True), (False, False)):
        assert_rewrites(
            lambda x, k=keep, g=largest: x.relu().sum(1, keepdim=k).sort(0, g)[0],
            lambda x, k=keep, g=largest: x.clamp(min=0).sum(1, keepdim=k).sort(0, g)[0],
            rule=made, inputs="f32[a, b]",
        )  # fmt: skip


def test_dtype_literals():
    def fn(x, *, to: torch.dtype):
        return x.relu().to(to)

    made = make("test-cast-first", fn, lambda x, *, to: x.to(to).relu())
    assert_rewrites(
        lambda x: x.relu().to(torch.bfloat16), lambda x: x.to(torch.bfloat16).relu(), rule=made, inputs="f32[a, b]"
    )


def test_undeclared_literals_are_strict():
    made = make("test-strict", lambda x: x.clamp(min=0.5) * 2.0, lambda x: x)
    assert_near_miss(lambda x: x.clamp(min=0.25) * 2.0, made, "literal", "f32[a, b]", text="wants 0.5, found 0.25")


def test_sizes_and_arithmetic_in_a_pattern_are_exact():
    def fn(q, k):
        return (q @ k.transpose(0, 1)) * q.shape[-1] ** -0.5

    made = make(
        "test-scaled", fn, lambda q, k: (q * q.shape[-1] ** -0.5) @ k.transpose(0, 1), inputs="float[n, d], float[m, d]"
    )
    inputs = "f32[n, 48] f32[m, 48]"
    expected = made.replacement
    assert_rewrites(lambda q, k: (q @ k.transpose(0, 1)) * (1 / 48**0.5), expected, rule=made, inputs=inputs)
    assert_near_miss(lambda q, k: (q @ k.transpose(0, 1)) * 0.125, made, "literal", inputs, text="found 0.125")


def test_a_hidden_literal_is_an_error_with_its_line():
    def fn(x, *, n: int):
        return x * (n + 1)

    made = make("test-hidden", fn, lambda x, *, n: x)
    with pytest.raises(RuleError, match=r"test-hidden.*test_rule\.py:\d+.*hides literal 'n'"):
        first_use(made)


def test_a_literal_that_changes_the_ops_is_an_error():
    def fn(x, *, flag: bool):
        return x.relu() if flag else x.sigmoid()

    made = make("test-two-faced", fn, lambda x, *, flag: x)
    with pytest.raises(RuleError, match="changes its ops with the value of a literal"):
        first_use(made)


# --- definition errors ---------------------------------------------------------------------------


def test_variant_and_replacement_take_the_same_holes():
    made = rule("test-holes", phase=PRE)(lambda x, y: x + y)
    with pytest.raises(RuleError, match=r"the variant at .*test_rule\.py:\d+ must take the same holes: \(x, y\)"):
        made.variant(lambda y, x: x + y)
    with pytest.raises(RuleError, match="the replacement"):
        made.replace(lambda x: x)


def test_one_replacement():
    made = make("test-one-replacement", lambda x: x.relu(), lambda x: x)
    with pytest.raises(RuleError, match="a second replacement"):
        made.replace(lambda x: x)


def test_without_replacement():
    made = rule("test-no-replacement", phase=PRE)(lambda x: x.relu())
    with pytest.raises(RuleError, match="has no replacement"):
        first_use(made)


@pytest.mark.parametrize(
    "fn, settings, said",
    [
        (lambda: 0, {}, "no tensor hole"),
        (lambda *xs: xs[0], {}, "name each tensor"),
        (lambda x, *, eps: x + eps, {}, "annotate literal 'eps'"),
        (lambda require: require, {}, "cannot be named 'require'"),
        (lambda x: x, {"inputs": "f32[a] f32[b]"}, "describes 2 tensors, the pattern takes 1"),
        (lambda x: x, {"inputs": "f31[a]"}, r"'f31' .* is not a dtype \(did you mean"),
    ],
)
def test_ill_formed_rules_fail_where_they_are_defined(fn, settings, said):
    with pytest.raises(RuleError, match=said):
        rule("test-ill-formed", phase=PRE, **settings)(fn)


@pytest.mark.parametrize(
    "fn, said",
    [
        (lambda x, y: x.relu(), "does not use 'y'"),
        (lambda x, y: (x + y, y), "must return tensors it computes"),
        (lambda x, y: x + y + torch.tensor([1.0, 2.0])[0], "constant tensor"),
        (lambda x, y: x.no_such_method(y), r"cannot be traced on .*; say what it takes with inputs="),
    ],
)
def test_ill_formed_patterns_fail_at_first_use(fn, said):
    made = make("test-ill-formed-pattern", fn, lambda x, y: x)
    with pytest.raises(RuleError, match=said):
        first_use(made)


def test_names_are_kebab_case():
    with pytest.raises(RuleError, match="kebab-case"):
        rule("Test_Name", phase=PRE)(lambda x: x)


# --- rules as passes -----------------------------------------------------------------------------


def test_a_rule_is_a_registered_pass():
    found = catalogue.find("test-fuse-rms-norm")
    assert found is rms_norm.pass_class
    assert found().spec == "test-fuse-rms-norm"
    assert found.summary() == "Compute RMS norms with one op."
    assert found.phase is PRE and found.after == ("test-fold-double-transpose",)
    assert Pipeline.parse("test-fuse-rms-norm").spec == "test-fuse-rms-norm"


def test_a_rule_and_its_declarations_point_to_the_users_file():
    line = next(
        i for i, t in enumerate(Path(__file__).read_text().splitlines(), 1) if '@rule("test-fuse-rms-norm"' in t
    )
    for site in (rms_norm.pass_class.site(), declaration_site(rms_norm.pass_class, "after"), rms_norm.site):
        assert (Path(site.path).name, site.line) == ("test_rule.py", line)


def test_rules_of_a_set_run_as_one_pass_until_none_applies():
    folds = RuleSet("test-folds", phase=PRE, doc="Fold.\n\nMore.", before=("test-later",))
    here = folds.site.line

    @folds.rule()
    def double_negation(x):
        return x.neg().neg()

    @double_negation.replace
    def _(x):
        return x

    @folds.rule(inputs="float[...]")
    def double_relu(x):
        return x.relu().relu()

    @double_relu.replace
    def _(x):
        return x.relu()

    def before(x):
        return x.relu().neg().neg().relu().neg()

    module = assert_rewrites(before, lambda x: x.relu().neg(), rule=folds, inputs="f32[a, b]")
    assert module.graph is not None
    assert [r.name for r in folds.rules] == ["double-negation", "double-relu"]
    (context,) = run_passes(trace_graph(before, "f32[a, b]"), [folds.pass_class()])
    assert [r.rule for r in context.rewrites] == ["double-negation", "double-relu"]
    assert folds.pass_class.summary() == "Fold."
    assert Path(folds.site.path).name == "test_rule.py" and folds.pass_class.site().line == here
    assert declaration_site(folds.pass_class, "before").line == here


def test_importing_rules_traces_nothing():
    program = (
        "from turbogr_compile.capture import trace\n"
        "def no(*a, **k): raise SystemExit('traced')\n"
        "trace.trace = no\n"
        "import torch\n"
        "from turbogr_compile import Phase, rule\n"
        "r = rule('test-lazy', phase=Phase.PRE_GRAD)(lambda x: x.relu())\n"
        "r.replace(lambda x: x)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_patterns_are_traced_once(monkeypatch):
    made = make("test-traced-once", lambda x: x.relu().neg(), lambda x: x.neg().relu())
    traced = []
    original = trace.trace
    monkeypatch.setattr(trace, "trace", lambda *a, **k: traced.append(1) or original(*a, **k))
    words = Vocabulary(made.phase)
    assert made.spellings[0].patterns(words) is made.spellings[0].patterns(words)
    assert len(traced) == 1


def test_patterns_are_traced_in_the_middle_of_a_compilation():
    made = make("test-while-compiling", lambda x: x.relu().neg(), lambda x: x.neg())
    traced = []

    def backend(module, inputs):
        traced.append(first_use(made))
        return module

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert len(traced) == 1


def test_autocast_around_the_compilation_does_not_reach_into_rules():
    made = make("test-under-autocast", lambda x, y: (x @ y).relu(), lambda x, y: (x @ y).clamp(min=0))
    module = trace_graph(lambda x, y: (x @ y).relu(), "f32[a, b] f32[b, c]")
    context = Context(made.pass_class(), Role.CAPTURED, "cpu", None, module.graph, Vocabulary(Phase.PRE_GRAD))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made.pass_class().run(module.graph, context)
    assert len(context.rewrites) == 1


# --- spellings and shapes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs", ["f32[b, d] f32[d]", "bf16[b, n, d] bf16[d]", "f64[a, b, n, 8] f64[8]", "f32[d] f32[d]"]
)
def test_rms_norm_at_every_rank(inputs):
    def before(x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    def expected(x, w):
        return torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)

    assert_rewrites(before, expected, rule=rms_norm, inputs=inputs)


def test_other_spellings():
    def before(x, w):
        return w * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5))

    def expected(x, w):
        return torch.nn.functional.rms_norm(x, w.shape, w, 1e-5)

    assert_rewrites(before, expected, rule=rms_norm, inputs="f32[b, d] f32[d]")


def test_structure_that_depends_on_the_rank_is_found_at_every_rank():
    made = rule("test-flat-linear", phase=POST, inputs="float[..., d], float[k, d]")(
        lambda x, w: torch.nn.functional.linear(x, w).relu()
    )
    made.replace(lambda x, w: torch.nn.functional.linear(x, w).clamp(min=0))
    assert len(made.spellings[0].patterns(Vocabulary(POST))) > 1
    for inputs in ("f32[b, d] f32[k, d]", "f32[b, n, d] f32[k, d]"):
        assert_rewrites(
            lambda x, w: torch.nn.functional.linear(x, w).relu(),
            lambda x, w: torch.nn.functional.linear(x, w).clamp(min=0),
            rule=made, inputs=inputs,
        )  # fmt: skip


def test_several_outputs():
    def fn(x, w):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
        return x * r * w, r

    def swapped(x, w):
        r = x.pow(2).mean(-1, keepdim=True).rsqrt()
        return w * x * r, r

    made = make("test-with-stats", fn, swapped, inputs="float[b, d], float[d]")

    def before(x, w):
        y, r = fn(x, w)
        return y.relu(), r + 1

    def expected(x, w):
        y, r = swapped(x, w)
        return y.relu(), r + 1

    assert_rewrites(before, expected, rule=made, inputs="f32[b, d] f32[d]")


def test_outputs_beside_each_other():
    def fn(x, a, b):
        return x @ a, x @ b

    def together(x, a, b):
        both = x @ torch.cat([a, b], 1)
        return both.split([a.shape[1], b.shape[1]], 1)

    made = make("test-merge-matmuls", fn, together, inputs="float[n, d], float[d, p], float[d, q]")
    inputs = "f32[n, 8] f32[8, 4] f32[8, 6]"
    assert_rewrites(fn, together, rule=made, inputs=inputs)
    assert_unchanged(lambda x, a, b: (x @ a) @ a.t() @ b, rule=made, inputs=inputs)


def test_recompute_leaves_what_others_use():
    def fn(x):
        return x.exp().relu().neg()

    made = make("test-recompute", fn, lambda x: x.exp().neg(), recompute=True)

    def before(x):
        e = x.exp()
        return e.relu().neg(), e

    assert_rewrites(before, lambda x: (x.exp().neg(), x.exp()), rule=made, inputs="f32[a, b]")


def test_one_tensor_may_fill_two_holes():
    made = make("test-two-holes", lambda x, y: (x + y).relu(), lambda x, y: (y + x).clamp(min=0))
    assert_rewrites(lambda x: (x + x).relu(), lambda x: (x + x).clamp(min=0), rule=made, inputs="f32[a, b]")


# --- when and replacement ------------------------------------------------------------------------


def aligned(m, multiple):
    m.require(
        known(m.x.shape[-1] % multiple == 0), "last dim {} is not provably a multiple of {}", m.x.shape[-1], multiple
    )


def test_reasons_come_from_any_depth_and_are_all_collected():
    made = make("test-reasons", lambda x: x.relu().neg(), lambda x: x)

    @made.when
    def _(m):
        aligned(m, 16)
        m.require(m.x.dtype == torch.bfloat16, lambda: f"kernel takes half types only, not {m.x.dtype}")

    miss = assert_near_miss(lambda x: x.relu().neg(), made, "when", "f32[b, 24]", text="24 is not provably")
    assert [o.text for o in miss.obstacles] == [
        "last dim 24 is not provably a multiple of 16", "kernel takes half types only, not torch.float32",
    ]  # fmt: skip
    assert_near_miss(lambda x: x.relu().neg(), made, "when", "bf16[b, d]", text="not provably a multiple of 16")
    assert_rewrites(lambda x: x.relu().neg() + 1, lambda x: x + 1, rule=made, inputs="bf16[b, 32]")


def test_reasons_are_not_formatted_unless_somebody_reads_them():
    made = make("test-lazy-reasons", lambda x: x.relu().neg(), lambda x: x)
    asked = []
    made.when(lambda m: m.require(False, lambda: asked.append(1) or "no"))
    for explaining in (False, True):
        graph = trace_graph(lambda x: x.relu().neg(), "f32[a, b]").graph
        context = Context(
            made.pass_class(), Role.CAPTURED, "cpu", None, graph, Vocabulary(Phase.PRE_GRAD), explaining=explaining
        )
        made.pass_class().run(graph, context)
        assert bool(asked) == bool(context.near_misses) == explaining


def test_when_sees_tensors_literals_and_nodes():
    seen = {}

    def fn(x, *, s: float):
        return (x * s).neg()

    made = make("test-match-object", fn, lambda x, *, s: x.neg() * s)

    @made.when
    def _(m):
        seen.update(shape=tuple(m.x.shape), s=m.s, x=m.node("x").op, nodes=[n.name for n in m.nodes])
        with pytest.raises(AttributeError, match="no hole 'y'; it has x, s"):
            m.y  # noqa: B018

    assert_rewrites(lambda x: (x * 0.5).neg(), lambda x: x.neg() * 0.5, rule=made, inputs="f32[3, 4]")
    assert seen == {"shape": (3, 4), "s": 0.5, "x": "placeholder", "nodes": ["mul", "neg"]}


def test_a_broken_when_is_blamed():
    made = make("test-broken-when", lambda x: x.relu().neg(), lambda x: x)
    made.when(lambda m: 1 / 0)
    with pytest.raises(
        PassError, match=r"rule 'test-broken-when' \(.*test_rule\.py:\d+\): `when` raised ZeroDivisionError"
    ):
        assert_unchanged(lambda x: x.relu().neg(), rule=made, inputs="f32[a]")


def test_a_when_that_adds_a_guard_is_caught():
    made = make("test-guarding-when", lambda x: x.relu().neg(), lambda x: x)

    @made.when
    def _(m):
        if m.x.shape[0] % 3 == 0:
            m.require(False, "never three")

    with pytest.raises(PassError, match="guard"):
        assert_unchanged(lambda x: x.relu().neg(), rule=made, inputs="f32[a]")


@pytest.mark.parametrize(
    "replacement, said",
    [
        (lambda x: x.sum(0), r"gives f32\[.*\] for %neg: f32\["),
        (lambda x: x.double(), r"gives f64\["),
        (lambda x: (x, x), "returns 2 values, the pattern 1"),
        (lambda x: 1.0, "gives float"),
        (lambda x: x.no_such_method(), "the replacement raised AttributeError"),
    ],
)
def test_a_replacement_of_another_kind_is_an_error(replacement, said):
    made = make("test-bad-replacement", lambda x: x.relu().neg(), replacement)
    with pytest.raises(PassError, match=rf"(?s)rule 'test-bad-replacement' \(.*test_rule\.py:\d+\).*{said}"):
        assert_unchanged(lambda x: x.relu().neg(), rule=made, inputs="f32[a, b]")


def test_rules_that_never_end_are_named():
    made = make("test-endless", lambda x: x.relu().neg(), lambda x: x.relu().neg())
    with pytest.raises(PassError, match=r"'test-endless' \(\d+ times\) keep firing"):
        assert_unchanged(lambda x: x.relu().neg(), rule=made, inputs="f32[a, b]")


def test_new_nodes_are_described_named_and_traced_to_their_source():
    def before(x, w):
        y = x.relu()
        h = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        return h.neg()

    module = trace_graph(before, "f32[b, 64] f32[64]")
    kept = [n.name for n in module.graph.nodes if n.name.startswith(("relu", "neg"))]
    (context,) = run_passes(module, [rms_norm.pass_class()])
    (node,) = [n for n in module.graph.nodes if "rms_norm" in n.name]
    assert node.name == "rms_norm"
    assert [n.name for n in module.graph.nodes if n.name.startswith(("relu", "neg"))] == kept
    assert node.meta["val"].dtype == torch.float32 and node.meta["val"].shape[1] == 64
    assert node.meta["turbogr"].rule == "test-fuse-rms-norm"
    assert "h = y * torch.rsqrt" in node.meta["stack_trace"]
    (rewrite,) = context.rewrites
    assert [n.split("_")[0] for n in rewrite.removed] == ["pow", "mean", "add", "rsqrt", "mul", "mul"]
    assert rewrite.added == ("rms_norm",)
    assert "test_rule.py" in rewrite.site


def test_sizes_computed_for_the_old_nodes_go_with_them():
    def fn(x):
        return x.reshape(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1])

    made = make("test-flat-and-back", fn, lambda x: x, inputs="float[a, b]")
    module = trace_graph(lambda x: fn(x).relu(), "f32[a, b]")
    run_passes(module, [made.pass_class()])
    assert [n.name for n in module.graph.nodes if n.op == "call_function"] == ["relu"]


def test_a_result_the_caller_sees_keeps_its_own_memory():
    made = make("test-identity", lambda x: x.neg().neg(), lambda x: x)
    assert_rewrites(lambda x: x.neg().neg(), lambda x: x.clone(), rule=made, inputs="f32[a, b]")
    assert_rewrites(lambda x: x.neg().neg().exp(), lambda x: x.exp(), rule=made, inputs="f32[a, b]")


def test_a_view_the_caller_sees_stays_a_view():
    module = trace_graph(lambda x: x.transpose(0, 1).transpose(0, 1), "f32[a, b]", POST)
    run_passes(module, [twice.pass_class()], POST)
    assert [n.name for n in module.graph.nodes if n.op == "call_function"] == ["alias"]
