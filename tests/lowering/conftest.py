"""torchair warns about much that is not tested here."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
