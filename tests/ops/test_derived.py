"""The table of derived declarations: true, fresh, and never wider than what was tried."""

from __future__ import annotations

import pytest
import torch

from turbogr_compile.passes.rows import declaration
from turbogr_compile.passes.rows.ops.derived import Line, read

from . import coverage, derive
from .derive import Call
from .samples import entries

LIBRARY = torch.library.Library("rows_test", "DEF")
LIBRARY.define("maybe_centred(Tensor x, bool over_all) -> Tensor")
LIBRARY.define("summed(Tensor x, int reduction) -> Tensor")
LIBRARY.define("pooled(Tensor x, int[] kernel) -> Tensor")
X = torch.rand(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@torch.library.impl(LIBRARY, "maybe_centred", "CompositeImplicitAutograd")
def maybe_centred(x, over_all):
    return x - (x.mean() if over_all else x.mean(-1, keepdim=True))


@torch.library.impl(LIBRARY, "summed", "CompositeImplicitAutograd")
def summed(x, reduction):
    return x.square() if reduction == 0 else x.square().sum()


@torch.library.impl(LIBRARY, "pooled", "CompositeImplicitAutograd")
def pooled(x, kernel):
    return torch.nn.functional.avg_pool2d(x, kernel, 1)


def line_of(name, *given):
    target = getattr(torch.ops.rows_test, name).default
    names = [a.name for a in target._schema.arguments]
    return derive._tried(name, [Call(target, dict(zip(names, args, strict=True))) for args in given])


def test_a_flag_is_known_by_the_values_that_keep_rows_apart():
    line = line_of("maybe_centred", (X, False), (X, True), (X.transpose(0, 1), False))
    assert (line.rule, line.takes) == ("before 1", (("over_all", ("False",)),))


def test_a_reduction_is_not_taken_for_its_parts():
    line = line_of("summed", (X, 0), (X, 1), (X, 2))
    assert (line.rule, line.takes) == ("pointwise", (("reduction", ("0",)),))


def test_a_dim_that_was_never_tried_is_not_claimed():
    """Kernels of one column, on tensors of one column: they say nothing about columns."""
    narrow = [(X[:, :, None], [1, k]) for k in (1, 2, 3)]
    line = line_of("pooled", *narrow)
    assert line is None or line.rule == "before 2"
    wide = [(X[:, None], [2, 2]), (X[:, None], [1, 2])]
    assert line_of("pooled", *narrow, *wide).rule == "before 2"


def test_values_that_were_not_tried_make_an_op_unknown():
    line = Line("made.up", "before 1", ("self",), (("mode", ("mean", "sum")),), (2, 3), "probe")
    assert Line.parse(str(line)) == line
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    known = graph.call_function(torch.ops.aten.index_reduce.default, (x, 0, x, x, "mean"))
    assert declaration.Declaration(declaration.EVERY, values={"reduce": ("mean",)}).unread(known) is None
    assert declaration.Declaration(declaration.EVERY, values={"reduce": ("amax",)}).unread(known) == "reduce=mean"


@pytest.mark.parametrize("line", read(), ids=lambda line: line.name)
def test_lines_are_about_ops_that_nobody_declares(line):
    name, _, overload = line.name.rpartition(".")
    target = getattr(getattr(torch.ops.aten, name), overload)
    names = {a.name for a in target._schema.arguments}
    assert {*line.rows, *dict(line.takes)} <= names and derive._is_asked(target)


def test_the_table_is_fresh():
    """Of ops that one entry of the database calls, found anew."""
    kept = dict(declaration._DERIVED)
    declaration._DERIVED.clear()
    try:
        found = derive.table(derive.collected(FRESH))
    finally:
        declaration._DERIVED.update(kept)
    known = {line.name: line for line in read()}
    assert found and all(known.get(line.name) == line for line in found), [str(line) for line in found]


FRESH = [name for name in ("addr", "aminmax", "polar", "linalg.qr") if name in entries()]


def test_the_page_is_fresh():
    assert coverage.PAGE.read_text() == coverage.page(), "python -m tests.ops coverage"


def test_every_op_of_the_core_set_is_accounted_for():
    rows = [(target, *coverage.told(target)) for target in coverage.overloads()]
    assert len(rows) > 150
    assert not [coverage._name(target) for target, kind, word in rows if kind == coverage.REFUSED and not word]
