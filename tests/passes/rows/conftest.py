"""What tests of single calls on rows share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def table(fresh):
    """Of nine items; `test_row_ops.FEATURES` wide."""
    return torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
