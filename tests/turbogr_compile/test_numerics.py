"""The numeric oracle: catches damage, forgives reassociation, is not fooled by low precision."""

from __future__ import annotations

import torch

from turbogr_compile.check.numerics import compare, compare_graphs
from turbogr_compile.testing import trace_graph


def verdict(before, after, *inputs):
    first = trace_graph(before, list(inputs))
    second = trace_graph(after, list(inputs))
    return compare_graphs(first, first.graph, second.graph, inputs)


X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def test_reassociation_is_forgiven():
    assert not verdict(lambda x: (x + x.T) + 1.0, lambda x: x + (x.T + 1.0), X).wrong
    assert not verdict(lambda x: x @ x, lambda x: (x.double() @ x.double()).float(), X).wrong


def test_small_damage_is_caught():
    assert verdict(lambda x: x.exp(), lambda x: x.exp() * 1.0005, X).wrong
    assert verdict(lambda x: x @ x, lambda x: (x.bfloat16() @ x.bfloat16()).float(), X).wrong


def test_low_precision_baseline_does_not_hide_damage():
    x = X.bfloat16()
    assert verdict(lambda x: x.float().softmax(-1).bfloat16(), lambda x: x.softmax(-1) * 1.2, x).wrong


def test_gradients_are_compared_too():
    x = X.clone().requires_grad_()
    result = verdict(lambda x: x.exp().sum(), lambda x: x.detach().exp().sum() + (x - x.detach()).sum(), x)
    assert result.wrong and "result 2" in result.text  # after the output and the input


def test_integers_are_exact_and_nan_must_stay_where_it_is():
    assert compare([torch.tensor([1, 2])], [torch.tensor([1, 3])]).wrong
    nan = torch.tensor([float("nan"), 1.0])
    assert not compare([nan], [nan.clone()]).wrong
    assert compare([nan], [nan.flip(0)]).wrong


def test_random_ops_get_the_same_seed():
    assert not verdict(lambda x: x + torch.rand_like(x), lambda x: torch.rand_like(x) + x, X).wrong
