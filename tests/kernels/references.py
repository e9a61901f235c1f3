"""References behind the contracts of their ops: what an op is where it has no kernel."""

from __future__ import annotations

from types import SimpleNamespace

from turbogr_compile import kernels  # noqa: F401  (declares the ops)
from turbogr_compile.kernels.declare import REFERENCES

references = SimpleNamespace(**REFERENCES)
