"""What runs around a compiled step: balancing, sharding, prefetching, exchanging."""

from .host_table import HostTable

__all__ = ["HostTable"]

from importlib import import_module
from typing import Any

_PUBLIC = ("ahead", "balance", "host_table", "latency", "sharding")


def __getattr__(name: str) -> Any:
    """Its public parts, when they are asked for."""
    if name in _PUBLIC:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
