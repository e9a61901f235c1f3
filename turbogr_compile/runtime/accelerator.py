"""The accelerator of this machine: the package index's default build of torch knows one that need not be there."""

from __future__ import annotations

import torch


def accelerator() -> torch.device | None:
    """None where there is none, whatever torch was built for."""
    return torch.accelerator.current_accelerator(check_available=True)
