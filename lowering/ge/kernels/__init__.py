"""GE operators in torch, one file for each kind; importing the package makes them known."""

from . import collectives, elementwise, foreach, indexing, matrices, normal, random, reductions, shapes
from .beliefs import BELIEFS
from .registry import KERNELS, Kernel

__all__ = ["BELIEFS", "KERNELS", "Kernel"]

FAMILIES = (collectives, elementwise, foreach, indexing, matrices, normal, random, reductions, shapes)
