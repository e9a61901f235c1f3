"""Contracts of ops: what is refused, by kernel, reference and fake alike, and what is right at the edges."""

from __future__ import annotations

import math

import pytest
import torch

from turbogr_compile.kernels.contract import INT64, Array, Ascending, Contract, Flags, Number, Range, Rule, Whole, Word
from turbogr_compile.kernels.cpu.build import library
from turbogr_compile.kernels.declare import CONTRACTS

from .references import references

ops = torch.ops.turbogr
BOTH = pytest.mark.parametrize("of", [ops, references], ids=["op", "reference"])
NAN, INF = math.nan, math.inf


def numbers(*size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


# --- the language ------------------------------------------------------------------------------------


def bound(schema, *rules, **arguments):
    contract = Contract(*rules, **arguments)
    contract.bind(schema)
    return contract


def test_sizes_are_shared_found_and_compared():
    contract = bound(
        "f(Tensor x, Tensor y, Tensor? z) -> Tensor", nonzero="G", x=Array("T G"), y=Array("G*M 2*K-1"), z=Array("M|1")
    )
    contract.check(numbers(3, 2), numbers(6, 5), numbers(3))
    contract.check(numbers(0, 2), numbers(6, 5), numbers(1))
    contract.check(numbers(3, 2), numbers(6, 5), None)
    for arguments, message in (
        ((numbers(3, 0), numbers(6, 5), None), r"x.shape\[1\] must be of the form G, and it is 0"),
        ((numbers(3, 2), numbers(5, 5), None), r"y.shape\[0\] must be of the form G\*M, and it is 5"),
        ((numbers(3, 2), numbers(6, 4), None), r"y.shape\[1\] must be of the form 2\*K-1"),
        ((numbers(3, 2), numbers(6, 5), numbers(2)), r"z.shape\[0\] must be 3 \(M\|1\), not 2"),
        ((numbers(3, 2), numbers(6), None), "y must have 2 dims, not 1"),
        ((numbers(3, 2), None, None), "y must be a tensor, not None"),
        ((numbers(3, 2), numbers(6, 5).long(), None), "y must be torch.float32 or .*, not torch.int64"),
        ((numbers(3, 2), numbers(6, 5).to_sparse(), None), "y must be strided"),
        ((numbers(3, 2), numbers(6, 5).to("meta"), None), "y is on meta, another tensor on cpu"),
    ):
        with pytest.raises(ValueError, match=f"^f: {message}"):
            contract.check(*arguments)


def test_entries():
    contract = bound(
        "f(Tensor x, Tensor ids, Tensor offsets, int skip) -> Tensor",
        x=Array("T D"),
        ids=Array("N", INT64, Range("T", but="skip")),
        offsets=Array("S+1", INT64, Ascending("N")),
    )
    x = numbers(4, 1)
    contract.check(x, torch.tensor([0, 3, -7]), torch.tensor([1, 3]), -7)
    with pytest.raises(IndexError, match="f: row 4, entry 1 of ids, is out of range: there are 4 rows"):
        contract.check(x, torch.tensor([0, 4, -7]), torch.tensor([0, 3]), -7)
    for bad, message in (([0, 2, 1], "must ascend"), ([-1, 2], "none below zero"), ([0, 4], "end at row 4")):
        with pytest.raises(ValueError, match=message):
            contract.check(x, torch.tensor([0, 1, 2]), torch.tensor(bad), 0)


def test_numbers_and_words():
    contract = bound(
        "f(float eps, int count, str kind, bool[] wanted, Tensor? a, Tensor? b) -> Tensor",
        Rule("a is None or b is None", "a or b", first=True),
        eps=Number(0.0),
        count=Whole(1, 9),
        kind=Word(("x", "y")),
        wanted=Flags(("a", "b")),
    )
    right = {"eps": 0.5, "count": 3, "kind": "x", "wanted": [True, False], "a": None, "b": None}
    contract.check(**right)
    for wrong in (
        *({"eps": bad} for bad in (NAN, INF, -0.1)),
        *({"count": bad} for bad in (0, 10, 2**62, -(2**63))),
        {"kind": "z"},
        {"wanted": [True]},
        {"a": numbers(1), "b": numbers(1)},
    ):
        with pytest.raises(ValueError, match=r"^f: "):
            contract.check(**(right | wrong))


def before_a_kernel(contract, *arguments):
    kernels = library(torch.float32)
    if kernels is None:
        pytest.skip("no kernels")
    contract.before_kernel(kernels.turbogr_check, *arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_entries_before_a_kernel(dtype):
    """Of each length, for a vector and what is left over; at both ends of the dtype."""
    contract = bound(
        "f(Tensor x, Tensor ids, int skip) -> Tensor",
        x=Array("T D"),
        ids=Array("N", (torch.int64, torch.int32), Range("T", but="skip")),
    )
    plain = bound("f(Tensor x, Tensor ids) -> Tensor", x=Array("T D"), ids=Array("N", (dtype,), Range("T")))
    x, least, most = numbers(4, 1), torch.iinfo(dtype).min, torch.iinfo(dtype).max
    for length in (0, 1, 7, 40):
        right = torch.arange(length, dtype=dtype) % 4
        before_a_kernel(plain, x, right)
        before_a_kernel(contract, x, right, -7)
        for place in range(length):
            for bad in (4, -1, least, most, least + 4, most - 4):
                wrong = right.clone()
                wrong[place] = bad
                with pytest.raises(IndexError, match="out of range"):
                    before_a_kernel(plain, x, wrong)
                before_a_kernel(contract, x, wrong, bad)
                with pytest.raises(IndexError, match="out of range"):
                    before_a_kernel(contract, x, wrong, bad + (1 << 32) if bad < 1 << 32 else 0)
    with pytest.raises(IndexError, match="there are 0 rows"):
        before_a_kernel(plain, numbers(0, 1), torch.zeros(1, dtype=dtype))


def test_what_a_check_meets_before_a_kernel_is_told():
    contract = bound("f(Tensor x, int count) -> Tensor", x=Array("T D"), count=Whole(0, 9))

    class Full:
        dtype = torch.float32

        @property
        def shape(self):
            raise MemoryError("no room")

    with pytest.raises(ValueError, match="x must be a tensor, not None"):
        before_a_kernel(contract, None, 3)
    with pytest.raises((MemoryError, AttributeError)):
        before_a_kernel(contract, Full(), 3)
    contract._check = lambda *arguments: None
    with pytest.raises(AssertionError, match="is in order"):
        before_a_kernel(contract, numbers(2, 2), 10)


def test_names_that_a_check_needs_are_no_arguments():
    for name in ("size", "part", "checks", "native", "int64"):
        with pytest.raises(ValueError, match="cannot be called"):
            bound(f"f(Tensor {name}) -> Tensor", **{name: Array("T")})


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_every_tensor_is_asked_for_before_a_kernel(name):
    contract = CONTRACTS[name]
    for argument, what in contract.arguments.items():
        if isinstance(what, Array) and argument not in contract.optional:
            asked = f"{argument}.dtype" if what.dtype else f"{argument} is None"
            assert asked in contract.source["native"], argument


def test_symbols_are_not_guarded_on():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows, more = env.create_unbacked_symint(), env.create_unbacked_symint()
        x, y = torch.empty(rows, 4), torch.empty(more, 4)
        contract = bound("f(Tensor x, Tensor y) -> Tensor", x=Array("T D"), y=Array("T D"))
        contract.check_sizes(x, y)  # a guard on either would raise
        assert ops.scatter_rows(x, torch.empty(more, dtype=torch.int64), more).shape[1] == 4
        with pytest.raises(ValueError, match=r"y.shape\[1\]"):
            contract.check_sizes(x, torch.empty(more, 5))
    assert not env.guards


def test_every_op_has_a_contract_for_every_tensor():
    names = {name for name in dir(ops) if hasattr(getattr(ops, name), "default")}
    by_body = {"picked"}  # whose ops are torch's own, and check what they are given
    assert names - {"name"} - by_body <= set(CONTRACTS) and len(CONTRACTS) >= 29
    for name, contract in CONTRACTS.items():
        tensors = {a.name for a in getattr(ops, name).default._schema.arguments if "Tensor" in str(a.type)}
        forgotten = tensors - set(contract.arguments)
        assert not forgotten or name == "stale_rows", (name, forgotten)  # that one looks at none of the others


# --- memory that was read or written wrongly ---------------------------------------------------------


@BOTH
@pytest.mark.parametrize("eps", [NAN, INF, -INF])
def test_eps_is_finite(of, eps):
    query, table, ids = numbers(4, 8), numbers(9, 8), torch.zeros(4, 3).long()
    with pytest.raises(ValueError, match="eps must be finite"):
        of.lookup_table_gradient(numbers(12, 1), None, query, table, ids, None, 1, eps)
    with pytest.raises(ValueError, match="eps must be finite"):
        of.lookup_dot_backward(numbers(4, 3), query, table, ids, eps, [True, True])


@BOTH
def test_offsets_have_one_number_at_least(of):
    x, none = numbers(4, 2), torch.zeros(0).long()
    with pytest.raises(ValueError, match="offsets"):
        of.segment_softmax(x, none)
    with pytest.raises(ValueError, match="offsets"):
        of.quantize_rows(x, torch.zeros(2).long(), none)
    with pytest.raises(ValueError, match="query_offsets"):
        attention(of, query_offsets=none, key_offsets=none)


class Named(torch.Tensor):
    """One of a subclass that leaves computing to torch."""


@BOTH
def test_entries_of_a_subclass_are_looked_at(of):
    with pytest.raises(ValueError, match="offsets end at row 9"):
        of.sequence_mm(numbers(4, 1, 2), numbers(1, 1, 2, 2), torch.tensor([0, 9]).as_subclass(Named))
    with pytest.raises(IndexError, match="row 9"):
        of.gather_rows(numbers(4, 2), torch.tensor([9]).as_subclass(Named))


@BOTH
def test_dtypes_are_tied(of):
    x, offsets = numbers(4, 2), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"grad must be torch.float32, not torch.float16"):
        of.segment_softmax_backward(x.half(), x, offsets)
    with pytest.raises(ValueError, match=r"log_sum must be torch.float32, not torch.float64"):
        attention_backward(of, log_sum=numbers(4, 2, dtype=torch.float64))


@BOTH
@pytest.mark.parametrize("group", [0, -1, 2**62, 2**63 - 1])
def test_groups_are_bounded(of, group):
    query, table, ids = numbers(4, 8), numbers(9, 8), torch.zeros(4, 0).long()
    with pytest.raises(ValueError, match="group must be from 1 to"):
        of.lookup_table_gradient(numbers(0, 1), None, query, table, ids, None, group, -1.0)
    own = torch.zeros(4).long()
    with pytest.raises(ValueError, match="group must be from 1 to"):
        of.sampled_loss_ahead(query, table, own, ids, None, 1.0, -1.0, NAN, group, "softmax", [True, True])


def test_a_large_group_of_few_positions_is_one_group():
    query, table, ids = numbers(4, 8), numbers(9, 8), torch.arange(12).view(4, 3) % 9
    slopes = numbers(12, 1000)
    found = ops.lookup_table_gradient(slopes, None, query, table, ids, None, 1000, -1.0)
    wanted = references.lookup_table_gradient(slopes, None, query, table, ids, None, 1000, -1.0)
    torch.testing.assert_close(found, wanted)


@BOTH
@pytest.mark.parametrize("name", sorted(set(CONTRACTS) - {"sharded_lookup", "sharded_push", "stale_rows"}))
def test_none_is_no_tensor(of, name):
    """Of an op whose tensors are all None, the first one is missed: torch hands them on as None."""
    if not hasattr(of, name):
        pytest.skip("made of other ops")
    schema = getattr(ops, name).default._schema
    values = {"Tensor": None, "str": "softmax", "float": 0.0, "int": 1, "SymInt": 1, "bool": False}
    given = [[] if "List" in str(a.type) else values.get(str(a.type)) for a in schema.arguments]
    with pytest.raises((ValueError, RuntimeError), match=f"{name}: |expected"):
        getattr(of, name)(*given)


@pytest.mark.parametrize("which", [0, 1])
def test_real_and_meta_tensors_do_not_mix(which):
    given = [numbers(4, 2), torch.tensor([0, 3])]
    given[which] = given[which].to("meta")
    with pytest.raises(ValueError, match="another tensor on"):
        ops.gather_rows(*given)
    given = [numbers(4, 8), numbers(9, 8), torch.zeros(4, 3).long()]
    given[which] = given[which].to("meta")
    with pytest.raises(ValueError, match="another tensor on"):
        ops.lookup_dot(*given, -1.0)


# --- right at the edges ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softmax", "bce"])
@pytest.mark.parametrize("group", [1, 3])
def test_no_negatives(kind, group):
    """With K = 0 the loss is that of the positive alone, and so are the gradients."""
    query, table = numbers(5, 8).requires_grad_(), numbers(9, 8).requires_grad_()
    own, ids = torch.tensor([0, 3, 3, 8, 1]), torch.zeros(5, 0).long()
    total = ops.sampled_loss_total(query, table, own, ids, None, 2.0, -1.0, NAN, group, kind)
    found = torch.autograd.grad(total, (query, table))
    logits = (query * table[own]).sum(1) * 2.0
    losses = torch.zeros(5) if kind == "softmax" else torch.nn.functional.softplus(-logits)
    torch.testing.assert_close(total.detach(), losses.sum().detach())
    wanted = torch.autograd.grad(losses.sum() + 0 * logits.sum(), (query, table), retain_graph=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    _, _, _, slopes, own_slopes = ops.sampled_loss_ahead(
        query, table, own, ids, None, 2.0, -1.0, NAN, group, kind, [False, True]
    )
    assert slopes.shape == (0, group)
    of_logit = torch.autograd.grad(losses.sum() + 0 * logits.sum(), logits, allow_unused=True)[0]
    torch.testing.assert_close(own_slopes, 2.0 * of_logit)


def attention_inputs(**changes):
    four = torch.arange(4)
    given = {
        "query": numbers(4, 2, 8),
        "key": numbers(4, 2, 8),
        "value": numbers(4, 2, 8),
        "query_offsets": torch.tensor([0, 4]),
        "key_offsets": torch.tensor([0, 4]),
        "query_columns": four,
        "key_columns": four,
    }
    optional = (
        "key_valid",
        "pair_mask",
        "bias",
        "position_bias",
        "time_bias",
        "time_bounds",
        "query_times",
        "key_times",
    )
    given |= dict.fromkeys((*optional, "dropout_seed"))
    given |= {"activation": "softmax", "scale": 1.0, "post_scale": 1.0, "min_distance": 0, "max_distance": 9}
    given |= {"dropout": 0.0, "sink": None, "score_cap": 0.0}
    return list((given | changes).values())


def attention(of, **changes):
    return of.jagged_attention(*attention_inputs(**changes))


def attention_backward(of, log_sum=None, wanted=(True,) * 7, **changes):
    given = attention_inputs(**changes)
    rows = given[0].shape[0]
    grad, log_sum = numbers(rows, 2, 8), numbers(rows, 2) if log_sum is None else log_sum
    return of.jagged_attention_backward(grad, grad, log_sum, *given, list(wanted))


@BOTH
@pytest.mark.parametrize("sizes", [(1, 1, 0, 4), (1, 1, 4, 0), (0, 1, 4, 4), (1, 0, 4, 4)])
def test_masks_without_entries_are_refused(of, sizes):
    with pytest.raises((IndexError, ValueError), match="pair_mask"):
        attention(of, pair_mask=torch.ones(sizes, dtype=torch.bool))
    with pytest.raises((IndexError, ValueError), match="bias"):
        attention(of, bias=torch.ones(sizes))


@BOTH
def test_gradients_of_biases_have_their_dtype_without_rows(of):
    rows = {name: numbers(0, 2, 8, dtype=torch.float16) for name in ("query", "key", "value")}
    rows |= {name: torch.zeros(1).long() for name in ("query_offsets", "key_offsets")}
    rows |= {name: torch.zeros(0).long() for name in ("query_columns", "key_columns")}
    bias = torch.zeros(1, 1, 0, 0, dtype=torch.float16)
    log_sum = numbers(0, 2)
    rows |= {"bias": bias}
    found = of.jagged_attention_backward(
        *[rows["query"]] * 2, log_sum, *attention_inputs(**rows), [False, False, False, True, False, False, False]
    )
    assert found[3].dtype == torch.float16 and found[3].shape == bias.shape


@BOTH
def test_no_classes_are_refused(of):
    x, weight, target = numbers(3, 4), numbers(0, 4), torch.full((3,), -100)
    with pytest.raises(ValueError, match=r"weight.shape\[0\]"):
        of.linear_cross_entropy(x, weight, None, target, 1.0, -100, 0.0)
    with pytest.raises(ValueError, match=r"weight.shape\[0\]"):
        of.linear_cross_entropy_ahead(x, weight, None, target, None, 1.0, -100, 0.0, False, [True, True, False])


@BOTH
@pytest.mark.parametrize("other", [torch.float64, torch.float16])
def test_the_gradient_of_losses_may_be_of_another_dtype(of, other):
    """The kernel was chosen by the first tensor, and read rows of float as if they were of double."""
    x, weight, bias = numbers(65, 16), numbers(24, 16), numbers(24)
    target = torch.arange(65) % 24
    _, log_sum = of.linear_cross_entropy(x, weight, bias, target, 0.5, 3, 0.6)
    wanted = of.linear_cross_entropy_backward(numbers(65), x, weight, bias, target, log_sum, 0.5, 3, 0.6, [True] * 3)
    grad = numbers(65).to(other)
    found = of.linear_cross_entropy_backward(grad, x, weight, bias, target, log_sum, 0.5, 3, 0.6, [True] * 3)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@BOTH
def test_log_sums_are_in_the_precision_of_sums(of):
    """A product of two dtypes was torch's error, not the contract's."""
    query, offsets = numbers(4, 3), torch.tensor([0, 4])
    _, log_sum = of.sampled_softmax(query, query, query, offsets, offsets, None, None, None, 1.0)
    for wrong in ({"grad": numbers(4).double()}, {"log_sum": log_sum.double()}):
        given = {"grad": numbers(4), "log_sum": log_sum} | wrong
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be torch.float32, not torch.float64"):
            of.sampled_softmax_backward(*given.values(), query, query, query, offsets, offsets, None, None, None, 1.0,
                                        [True] * 3)  # fmt: skip


@BOTH
def test_ids_of_32_bits_may_name_rows_of_a_larger_table(of):
    ids = torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    found = of.embedding_backward(torch.zeros(2, 0), ids, 2**31, 0)
    assert found.shape == (2**31, 0)
    with pytest.raises(IndexError, match="row -1, entry 0 of ids"):
        of.embedding_backward(torch.zeros(1, 0), torch.tensor([-1], dtype=torch.int32), 2**31, 0)


def test_gaps_of_time_wrap_as_in_torch():
    """Also where the keys of a stretch share a bucket when its ends do."""
    ends = torch.tensor([-(2**63), -(2**62), -6, 0, 6, 2**62, 2**63 - 1])
    times = torch.cat([ends, torch.arange(-9, 9) * 2**59, torch.arange(20)]).sort().values
    rows, table = len(times), numbers(1, 4)
    given = {name: numbers(rows, 1, 8) for name in ("query", "key", "value")}
    given |= {name: torch.tensor([0, rows]) for name in ("query_offsets", "key_offsets")}
    given |= {name: torch.arange(rows) for name in ("query_columns", "key_columns")}
    given |= {
        "query_times": times.flip(0).contiguous(),
        "key_times": times,
        "max_distance": rows,
        "min_distance": -rows,
    }
    given |= {"time_bias": table * 3, "time_bounds": torch.tensor([5, 2**60, 2**63 - 100])}
    found, wanted = attention(ops, **given), attention(references, **given)
    torch.testing.assert_close(found, wanted)


@BOTH
def test_scales_may_be_negative(of):
    query, table, ids = numbers(4, 8), numbers(6, 8), torch.arange(8).view(4, 2) % 6
    half, scales = (table / -0.5).half(), torch.full((1,), -0.5)
    found = of.lookup_dot(query, table, ids, 0.0, half, None, scales)
    torch.testing.assert_close(found, of.lookup_dot(query, table, ids, 0.0), rtol=2e-3, atol=2e-3)
