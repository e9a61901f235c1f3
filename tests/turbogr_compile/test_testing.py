"""The public test helpers, and the text form of tensors they share with rules and the command line."""

from __future__ import annotations

import pytest
import torch

from turbogr_compile.errors import OptionError, PassError
from turbogr_compile.graph.phases import Phase
from turbogr_compile.graph.shapes import known, parse_inputs, real_inputs, symbolic_inputs
from turbogr_compile.rules.rule import rule
from turbogr_compile.testing import (
    assert_near_miss,
    assert_rewrites,
    assert_unchanged,
    filecheck,
    plain_text,
    rule_tests,
    same_graph,
    trace_graph,
)

PRE = Phase.PRE_GRAD


def make(name, fn, replacement, **settings):
    made = rule(name, phase=PRE, **settings)(fn)
    made.replace(replacement)
    return made


@rule("test-silu", phase=PRE, inputs="float[...]")
def silu(x):
    """Spell SiLU as one op."""
    return x * torch.sigmoid(x)


@silu.variant
def _(x):
    return x / (1 + torch.exp(-x))


@silu.replace
def _(x):
    return torch.nn.functional.silu(x)


@rule("test-transpose-twice", phase=Phase.POST_GRAD)
def twice(x, *, a: int, b: int):
    return x.transpose(a, b).transpose(a, b)


@twice.replace
def _(x, *, a, b):
    return x


@rule("test-aligned", phase=PRE, inputs="float[n, d], float[d]")
def aligned(x, w):
    return (x * w).relu()


@aligned.when
def _(m):
    m.require(known(m.x.shape[-1] % 16 == 0), "last dim not provably a multiple of 16")
    m.require(m.x.dtype == torch.bfloat16, "half types only")


@aligned.replace
def _(x, w):
    return (w * x).clamp(min=0)


# --- rules get their four tests ------------------------------------------------------------------

TestSilu = rule_tests(silu)
TestTwice = rule_tests(twice)
TestAligned = rule_tests(aligned)


def run(tests, name):
    test = getattr(tests(), name)
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            for value in mark.args[1]:
                test(value)
            return
    test()


def test_generated_tests_are_four():
    assert sorted(n for n in vars(TestSilu) if n.startswith("test_")) == [
        "test_applying_twice_changes_nothing", "test_computes_the_same_numbers", "test_matches_its_own_pattern",
        "test_replacement_describes_the_same_tensors",
    ]  # fmt: skip
    assert TestSilu.__name__ == "TestTestSilu"


def test_generated_tests_find_wrong_numbers():
    wrong = make("test-wrong-numbers", lambda x: x * torch.sigmoid(x), lambda x: torch.nn.functional.gelu(x))
    with pytest.raises(AssertionError):
        run(rule_tests(wrong), "test_computes_the_same_numbers")


def test_generated_tests_find_wrong_numbers_at_one_size_only():
    def replacement(x):
        return x.relu().sum(-1) / max(x.shape[-1], 2)

    wrong = make("test-wrong-at-one", lambda x: x.relu().mean(-1), replacement, inputs="float[a, b]")
    with pytest.raises(AssertionError):
        run(rule_tests(wrong), "test_computes_the_same_numbers")


def test_generated_tests_find_wrong_metadata():
    wrong = make("test-wrong-metadata", lambda x: x.relu().neg(), lambda x: x.float())
    with pytest.raises(PassError, match="the replacement gives f32"):
        run(rule_tests(wrong, inputs="float[a, b]"), "test_replacement_describes_the_same_tensors")


def test_generated_tests_find_a_pattern_that_does_not_match_itself():
    never = make("test-never", lambda x: x.relu().neg(), lambda x: x)
    never.when(lambda m: m.require(False, "never"))
    with pytest.raises(AssertionError, match=r"(?s)does not match its own pattern \(.*test_testing.py.*when .*never"):
        run(rule_tests(never), "test_matches_its_own_pattern")


# --- before and expected -------------------------------------------------------------------------


def test_assert_rewrites_shows_a_diff_and_the_near_miss():
    def before(x):
        return x.exp() * torch.sigmoid(x.exp())

    with pytest.raises(AssertionError) as failure:
        assert_rewrites(before, lambda x: torch.nn.functional.silu(x.exp()), rule=silu, inputs="f32[a, b]")
    text = str(failure.value)
    assert "--- expected\n+++ rewritten" in text
    assert "\n-  %silu" in text and "\n+  %sigmoid" in text
    assert "test-silu: 2/2 ops" in text and "again for" in text


def test_assert_rewrites_takes_passes_by_name():
    assert_rewrites(
        lambda x: (x * torch.sigmoid(x)).neg(), lambda x: torch.nn.functional.silu(x).neg(), passes="test-silu",
        inputs="f32[a]",
    )  # fmt: skip
    with pytest.raises(TypeError, match="either rule= or passes="):
        assert_rewrites(lambda x: x, lambda x: x, inputs="f32[a]")


def test_assert_unchanged_fails_where_the_rule_applies():
    with pytest.raises(AssertionError):
        assert_unchanged(lambda x: x * torch.sigmoid(x), rule=silu, inputs="f32[a]")


def test_assert_near_miss_fails_with_what_there_is():
    with pytest.raises(AssertionError, match="applied"):
        assert_near_miss(lambda x: x * torch.sigmoid(x), silu, "op", "f32[a]")
    with pytest.raises(AssertionError, match=r"(?s)no near miss.*'literal'.*op +%"):
        assert_near_miss(lambda x, y: x * torch.sigmoid(y), silu, "literal", "f32[a] f32[a]")


@pytest.mark.parametrize(
    "one, other, same",
    [
        (lambda x, y: x + y, lambda x, y: y + x, True),
        (lambda x, y: x - y, lambda x, y: y - x, False),
        (lambda x, y: (x.exp(), y.exp()), lambda x, y: (y.exp(), x.exp()), False),
        (lambda x, y: x.exp() + x.exp(), lambda x, y: (lambda e: e + e)(x.exp()), False),
        (lambda x, y: x.sum(0), lambda x, y: x.sum(1), False),
        (lambda x, y: x * 2, lambda x, y: x * 3, False),
        (lambda x, y: x.exp(), lambda x, y: (x.exp(), y), False),
        (lambda x, y: (x.exp(), x.shape[0]), lambda x, y: (x.exp(), x.shape[1]), False),
        (lambda x, y: (x.exp(), x.shape[0]), lambda x, y: (x.exp(), y.shape[0]), True),
        (lambda x, y: x, lambda x, y: x, True),
        (lambda x, y: x, lambda x, y: y, False),
    ],
)
def test_same_graph(one, other, same):
    inputs = symbolic_inputs("f32[a, b] f32[a, b]")
    assert same_graph(trace_graph(one, inputs).graph, trace_graph(other, inputs).graph) is same


def test_plain_text_does_not_depend_on_names():
    inputs = symbolic_inputs("f32[a]")
    first = trace_graph(lambda x: x.exp().neg(), inputs).graph
    second = trace_graph(lambda x: x.exp().neg(), inputs).graph
    next(n for n in second.nodes if n.op == "call_function").name = "renamed"
    assert plain_text(first) == plain_text(second)


def test_traced_graphs_carry_the_lines_of_the_test():
    def fn(x):
        y = x.exp()
        return y.neg()

    from turbogr_compile.graph.provenance import line_of

    graph = trace_graph(fn, "f32[a]").graph
    assert [line_of(n).code for n in graph.nodes if n.op == "call_function"] == ["y = x.exp()", "return y.neg()"]


def test_filecheck():
    text = "a = exp(x)\nb = neg(a)\n"
    filecheck(text, "# CHECK: exp\n# CHECK-NEXT: neg\n# CHECK-NOT: relu\n")
    with pytest.raises(AssertionError, match=r"(?s)relu.*a = exp"):
        filecheck(text, "# CHECK: relu\n")
    with pytest.raises(AssertionError):
        filecheck(text, "# CHECK: exp\n# CHECK-NOT: neg\n")


# --- tensors as text -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, printed",
    [
        ("f32[b, n, 64]", ["f32[b, n, 64]"]),
        ("bf16[b=32,4096] f32[4096]", ["bf16[b=32, 4096]", "f32[4096]"]),
        ("float[..., d], i64[b]", ["float[..., d]", "i64[b]"]),
        ("bool[], any", ["bool[]", "any[...]"]),
        ("float[...]  int[ 3 ]", ["float[...]", "int[3]"]),
        ("", []),
    ],
)
def test_specs_are_read_and_printed(text, printed):
    specs = parse_inputs(text)
    assert [str(s) for s in specs] == printed
    assert parse_inputs(", ".join(printed)) == specs


@pytest.mark.parametrize(
    "text, said",
    [
        ("f31[a]", r"'f31' in 'f31\[a\]' is not a dtype \(did you mean 'f32'\?\)"),
        ("f32[a", "cannot read tensor spec"),
        ("f32[a-b]", "cannot read dim 'a-b'.*a number, a name or name=size"),
        ("f32[d, ...]", "`...` goes first"),
        ("f32[a] ]", "cannot read tensor spec"),
        ("[a]", "cannot read tensor spec"),
    ],
)
def test_bad_specs_are_explained(text, said):
    with pytest.raises(OptionError, match=said):
        parse_inputs(text)


def test_one_name_has_one_size():
    with pytest.raises(OptionError, match="dim 'b' is given two sizes: 2 and 3"):
        real_inputs("f32[b=2] f32[b=3]")


def test_real_inputs():
    x, i, m = real_inputs("bf16[b=3, 4] i64[b] bool[n]", sizes={"n": 5})
    assert (x.dtype, tuple(x.shape)) == (torch.bfloat16, (3, 4))
    assert (i.dtype, tuple(i.shape)) == (torch.int64, (3,)) and int(i.min()) >= 0
    assert (m.dtype, tuple(m.shape)) == (torch.bool, (5,))
    again = real_inputs("bf16[b=3, 4] i64[b] bool[n]", sizes={"n": 5})
    assert torch.equal(x, again[0]) and not torch.equal(x, real_inputs("bf16[3, 4]", seed=1)[0])


def test_symbolic_inputs_share_sizes_by_name():
    x, y = symbolic_inputs("f32[a, b, 4] f32[b, a]")
    assert known(x.shape[0] == y.shape[1]) and known(x.shape[1] == y.shape[0]) and x.shape[2] == 4
    assert not known(x.shape[0] == x.shape[1]) and not known(x.shape[0] != x.shape[1])


def test_known_adds_no_guard():
    (x,) = symbolic_inputs("f32[a=32]")
    assert not known(x.shape[0] % 16 == 0) and known(x.shape[0] * 16 % 16 == 0)
    assert known(True) and not known(False)
    assert not x.fake_mode.shape_env.guards
