"""What the targets that end in GE do around torchair: ops taken apart, results kept out, sizes with examples."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from turbogr_compile import _torch
from turbogr_compile.lowering.torchair import coverage
from turbogr_compile.lowering.torchair import decompositions as parts
from turbogr_compile.lowering.torchair.legalize import legalize
from turbogr_compile.lowering.torchair.operators import arguments_of, operators
from turbogr_compile.lowering.torchair.results import without_inputs
from turbogr_compile.lowering.torchair.sizes import Sizes

aten = torch.ops.aten


# --- ops taken apart -----------------------------------------------------------------------------------

X = torch.arange(24.0).view(4, 6)
ODD = torch.tensor([[0.0, torch.nan, 2.0], [-torch.inf, 3.0, torch.inf]])
CASES = {
    "index_put, rows": lambda f: f.index_put(X, [torch.tensor([1, -1, 0])], torch.ones(3, 6), False),
    "index_put, added": lambda f: f.index_put(X, [torch.tensor([1, 1, 3])], torch.ones(6), True),
    "index_put, places": lambda f: f.index_put(
        X, [torch.tensor([[0], [2]]), torch.tensor([1, 5])], torch.tensor([7.0, 8.0]), True
    ),
    "bucketize": lambda f: f.bucketize(X, torch.tensor([3.0, 9.0]), right=True),
    "isnan": lambda f: f.isnan(ODD),
    "all of a dim": lambda f: f.all_dim(X > 2, 1),
    "variance": lambda f: f.variance(X, [1], correction=1, keepdim=True),
    "variance of all": lambda f: f.variance(X, None, correction=0),
    "roll": lambda f: f.roll(X, [2, -1], [1, 0]),
    "roll, flat": lambda f: f.roll(X, [5]),
    "xlogy": lambda f: f.xlogy(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 3.0])),
    "nan_to_num": lambda f: f.nan_to_num(ODD, 5.0),
}


class Torch:
    """The same calls, by torch's own ops."""

    index_put = staticmethod(lambda x, i, v, accumulate: aten.index_put(x, i, v, accumulate))
    bucketize = staticmethod(lambda x, bounds, right: aten.bucketize(x, bounds, right=right))
    isnan = staticmethod(torch.isnan)
    all_dim = staticmethod(lambda x, dim: x.all(dim))
    variance = staticmethod(
        lambda x, dim, correction, keepdim=False: aten.var(x, dim, correction=correction, keepdim=keepdim)
    )
    roll = staticmethod(lambda x, shifts, dims=(): aten.roll(x, shifts, dims))
    xlogy = staticmethod(torch.xlogy)
    nan_to_num = staticmethod(torch.nan_to_num)


@pytest.mark.parametrize("name", CASES)
def test_a_decomposition_computes_what_the_op_does(name: str):
    torch.testing.assert_close(CASES[name](parts), CASES[name](Torch), equal_nan=True)


def test_index_put_of_masks_is_left_to_others():
    assert parts.index_put(X, [X > 3], torch.tensor(1.0)) is NotImplemented


def test_randint_keeps_its_range():
    drawn = parts.randint_from(5, 9, [1000])
    assert drawn.min() == 5 and drawn.max() == 8


# --- results that are no work of the graph -----------------------------------------------------------


def traced(f, *inputs: torch.Tensor) -> fx.GraphModule:
    return _torch.make_fx(f, tracing_mode="symbolic")(*inputs)


def test_inputs_sizes_and_constants_are_handed_around_the_graph():
    def f(x, y):
        return x + 1, y, x.shape[0] * 2, x.t(), x + 1

    module = traced(f, torch.ones(3, 4), torch.zeros(5))
    module, whole = without_inputs(module)
    given = (torch.arange(14.0).view(7, 2), torch.full((5,), 3.0))
    made = module(*given)
    found = whole(given, made)
    expected = f(*given)
    assert found[2] == 14 and found[1] is given[1]
    for place in (0, 3, 4):
        assert torch.equal(found[place], expected[place])
    assert len(made) == 2 and found[3].data_ptr() == given[0].data_ptr()  # a view of an input is one


def test_a_question_about_a_size_is_asked_again_at_each_call():
    module = traced(lambda x: x * 2, torch.ones(3, 4))
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    sizes = Sizes(module, [placeholder.meta["val"]])
    holds = sizes.answers_hold()  # nothing was asked, and symbols are never 0 or 1
    assert holds((torch.ones(2, 9),)) and not holds((torch.ones(1, 9),))
    assert bool(sizes.values[0].shape[0] > 4)
    holds = sizes.answers_hold()
    assert holds((torch.ones(5, 9),)) and not holds((torch.ones(4, 9),))


# --- ops and operators ---------------------------------------------------------------------------------


def test_arguments_survive_the_way_to_ge_and_back():
    prototype = operators()["norm_gate_backward"]
    inputs = {port.name: f"<{port.name}>" for port in prototype.inputs}
    found = arguments_of("norm_gate_backward", prototype, inputs, {"wanted": 0b1010})
    assert found[:2] == ["<grad>", "<x>"] and found[-1] == [False, True, False, True]


def test_rows_that_are_not_real_numbers_are_gathered_by_ge():
    graph = fx.Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    x.meta["val"], rows.meta["val"] = torch.ones(4, 2, dtype=torch.bool), torch.tensor([1, 0])
    node = graph.call_function(torch.ops.turbogr.gather_rows.default, (x, rows))
    node.meta["val"] = torch.ones(2, 2, dtype=torch.bool)
    graph.output((node,))
    legalize(graph)
    assert not graph.find_nodes(op="call_function", target=torch.ops.turbogr.gather_rows.default)
    mask = torch.tensor([[True, False], [False, False], [True, True], [False, True]])
    (found,) = fx.GraphModule(torch.nn.Module(), graph)(mask, torch.tensor([2, 1]))
    assert found.dtype == torch.bool and torch.equal(found, mask[[2, 1]])


def called(op, *arguments):
    """A node of a turbogr op, its tensors described."""
    graph = fx.Graph()
    nodes = []
    for place, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            node = graph.placeholder(f"x{place}")
            node.meta["val"] = argument
            argument = node
        nodes.append(argument)
    return graph.call_function(op, tuple(nodes))


@pytest.mark.parametrize(
    ("dtype", "width", "masked", "asked", "reason"),
    [
        (torch.float32, 32, 0, ("silu",), ""),
        (torch.float32, 32, 3, ("silu",), ""),
        (torch.float32, 32, 0, ("softmax", None, 0.0), ""),
        (torch.float64, 32, 0, ("silu",), "takes no torch.float64 for query"),
        (torch.float32, 1024, 0, ("silu",), "heads of up to 512, and query has 1024"),
        (torch.float32, 32, 1, ("silu",), "2 to 2048 key columns, and pair_mask has 1"),
        (torch.float32, 32, 0, ("sigmoid",), "has no sigmoid"),
        (torch.float32, 32, 0, ("squared_relu",), "has no squared_relu"),
        (torch.float32, 32, 0, ("softmax", torch.zeros(2)), "has no sink"),
        (torch.float32, 32, 0, ("silu", None, 30.0), "has no score_cap"),
    ],
)
def test_what_a_kernel_does_not_take_is_known_before_the_graph_is_converted(dtype, width, masked, asked, reason: str):
    x, offsets, columns = torch.ones(3, 2, width, dtype=dtype), torch.tensor([0, 3]), torch.arange(3)
    mask = torch.ones(1, 1, 3, masked, dtype=torch.bool) if masked else None
    activation, *later = asked
    rest = (None, mask, *[None] * 6, torch.tensor([7]), activation, 1.0, 1.0, 0, 10, 0.5, *later)
    node = called(torch.ops.turbogr.jagged_attention.default, x, x, x, offsets, offsets, columns, columns, *rest)
    found = coverage._by_declaration(node)
    assert found == "" if not reason else reason in found
