"""segment_softmax against softmax of each sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile import _torch, kernels

assert kernels.segment  # importing registers the ops
ops = torch.ops.turbogr
OFFSETS = torch.tensor([0, 2, 2, 5])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6), st.sampled_from([(), (3,), (2, 3)]))
def test_equals_softmax_of_each_sequence(lengths, rest):
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    x = torch.randn(sum(lengths), *rest).double().requires_grad_()
    found = ops.segment_softmax(x, offsets)
    wanted = torch.cat([part.softmax(0) for part in x.split(lengths)]) if lengths else x * 1
    torch.testing.assert_close(found, wanted)
    slope = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, slope)[0] for y in (found, wanted)))


def test_gradcheck_and_opcheck():
    x = torch.randn(5, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(ops.segment_softmax, (x, OFFSETS))
    torch.library.opcheck(ops.segment_softmax.default, (x, OFFSETS))
    out = ops.segment_softmax(x.detach(), OFFSETS)
    torch.library.opcheck(ops.segment_softmax_backward.default, (torch.randn_like(out), out, OFFSETS))


def test_rows_behind_the_last_offset_belong_to_nobody():
    x = torch.randn(7, 2).requires_grad_()
    out = ops.segment_softmax(x, OFFSETS)
    (slope,) = torch.autograd.grad(out.square().sum(), x)
    assert (out[5:] == 0).all() and (slope[5:] == 0).all() and (slope[:5] != 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_rounds_only_at_the_end(dtype):
    x = torch.randn(300, 2).to(dtype).requires_grad_()
    offsets = torch.tensor([0, 300])
    out = ops.segment_softmax(x, offsets)
    wide = x.detach().double().requires_grad_()
    torch.testing.assert_close(out.double(), wide.softmax(0), rtol=torch.finfo(dtype).eps, atol=1e-7)
    (slope,) = torch.autograd.grad(out[:, 0].sum(), x)
    assert out.dtype == slope.dtype == dtype


def test_unbacked_rows_are_not_guarded_on():
    def step(x, mask, offsets):
        x = x.detach().requires_grad_()
        out = ops.segment_softmax(ops.gather_rows(x, mask.nonzero()[:, 0]), offsets)
        return torch.autograd.grad(out.square().sum(), x)[0]

    x, mask = torch.randn(7, 2), torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    module = _torch.make_fx(step, tracing_mode="symbolic")(x, mask, OFFSETS)
    env = _torch.shape_env_of(module.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    torch.testing.assert_close(module(x, mask, OFFSETS), step(x, mask, OFFSETS))


@pytest.mark.parametrize(
    "x, offsets",
    [(torch.zeros(5).long(), OFFSETS), (torch.zeros(()), OFFSETS), (torch.zeros(5), OFFSETS.int())],
)
def test_bad_shapes_and_dtypes_raise_real_and_fake(x, offsets):
    for arguments in ((x, offsets), _torch.fake_inputs([x, offsets])):
        with pytest.raises(ValueError, match="segment_softmax: "):
            ops.segment_softmax(*arguments)


@pytest.mark.parametrize("bounds", [[0, 6], [0, 3, 2], [-1, 5], []])
def test_offsets_outside_of_rows_raise(bounds):
    with pytest.raises(ValueError, match="segment_softmax: offsets"):
        ops.segment_softmax(torch.zeros(5, 2), torch.tensor(bounds, dtype=torch.int64))
