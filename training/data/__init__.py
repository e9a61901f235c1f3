"""Histories of users: reading, generating, batching.

    histories = open_histories(generate("data/generated"))
    batches = Batches(histories, batch=32, max_len=256)

The guide is docs/data.md.
"""

from .batches import Batches
from .generator import generate
from .histories import Histories
from .problems import DataError, Problem, Problems
from .reader import open_histories

__all__ = ["Batches", "DataError", "Histories", "Problem", "Problems", "generate", "open_histories"]
