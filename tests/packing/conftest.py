"""Eager itself warns about masks of mixed types and the like; that is not what is tested here."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
