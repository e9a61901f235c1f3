"""Code that does not ask a waiting tensor for its value: its gradients arrive, at the place the tensor had."""

from __future__ import annotations

import pytest
import torch

from turbogr_compile import _torch

from .programs import IDS, Twice, assert_same, cross_entropy


def below(function, x):
    """As C++ would call it."""
    with _torch.below_torch_function():
        return function(x)


def ops_below(model, called):
    loss = below(lambda x: (x * x).sum(), called(IDS))
    loss.backward()
    return loss


def ops_below_of_recorded(model, called):
    logits = called(IDS)
    loss = below(torch.Tensor.sum, logits.softmax(-1).square()) + cross_entropy(logits)
    loss.backward()
    return loss


def below_twice(model, called):
    logits = called(IDS)
    first, second = below(torch.Tensor.sum, logits), below(torch.Tensor.exp, logits).sum()
    (first * second).backward()
    return first, second


def function_before_a_write(model, called):
    logits = called(IDS)
    twice = Twice.apply(logits)
    logits[:, 0] = 0.5
    (twice.square().sum() + logits.sum()).backward()
    return twice, logits


def function_after_a_write(model, called):
    logits = called(IDS)
    logits[:, 0] = 0.5
    Twice.apply(logits).square().sum().backward()
    return logits


def function_after_a_write_through_a_view(model, called):
    logits = called(IDS)
    logits.retain_grad()
    logits.view(-1)[:7].mul_(3)
    Twice.apply(logits).square().sum().backward()
    return logits


def below_before_a_write(model, called):
    logits = called(IDS)
    total = below(torch.Tensor.sum, logits)
    logits[:, 0] = 0.5
    total.backward(retain_graph=True)
    logits.square().sum().backward()
    return total, logits


def root_after_a_write(model, called):
    logits = called(IDS)
    logits.mul_(2)
    torch.autograd.backward([logits], [torch.ones_like(logits)])
    return logits


CODE = [ops_below, ops_below_of_recorded, below_twice, function_before_a_write, function_after_a_write,
        function_after_a_write_through_a_view, below_before_a_write, root_after_a_write]  # fmt: skip


@pytest.mark.parametrize("code", CODE, ids=lambda f: f.__name__)
def test_same_as_eager(code):
    assert_same(code)


def below_after_a_write(model, called):
    logits = called(IDS)
    logits.mul_(2)
    return below(torch.Tensor.sum, logits)


def below_with_other_gradients(model, called):
    return below(torch.Tensor.sum, called(IDS) * model.head.weight.sum())


@pytest.mark.parametrize("code", [below_after_a_write, below_with_other_gradients], ids=lambda f: f.__name__)
def test_raises_where_gradients_would_be_lost(code):
    with pytest.raises(RuntimeError, match="deferral"):
        assert_same(code)
