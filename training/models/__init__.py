"""Recommenders as a practitioner writes them: padded, plain, unaware of turbogr."""

from __future__ import annotations

from torch import nn

from .fuxi import FuXiLayer
from .hstu import HSTULayer
from .recommender import Recommender
from .sasrec import SASRecLayer

LAYERS: dict[str, type[nn.Module]] = {"hstu": HSTULayer, "sasrec": SASRecLayer, "fuxi": FuXiLayer}

__all__ = ["LAYERS", "FuXiLayer", "HSTULayer", "Recommender", "SASRecLayer"]
