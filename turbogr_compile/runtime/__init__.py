"""What runs around a compiled step: balancing, sharding, prefetching, exchanging."""

from .host_table import HostTable

__all__ = ["HostTable"]
