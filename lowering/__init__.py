"""Targets: what runs the rewritten graphs. One module per target, named after it; packages hold what targets share."""

import sys

from ..pipeline import target

# Packages of others define targets by way of this address.
sys.modules[f"{__name__}.target"] = target
