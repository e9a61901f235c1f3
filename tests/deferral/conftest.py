"""Gradients are compared in float64; eager's own warnings are not what is tested here."""

from __future__ import annotations

import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_and_quiet():
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(torch.float32)
