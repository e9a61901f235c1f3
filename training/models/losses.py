"""The loss of next-item recall: the item that came next against sampled ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sampled_softmax(hidden: Tensor, targets: Tensor, drawn: Tensor, items: nn.Module, temperature: float) -> Tensor:
    """Mean over positions with a next item; `drawn` holds K items for each position. A drawn target does not count."""
    own = (hidden * items(targets)).sum(-1, keepdim=True)
    others = torch.einsum("bnd,bnkd->bnk", hidden, items(drawn))
    others = others.masked_fill(drawn == targets.unsqueeze(-1), -1e9)
    losses = -F.log_softmax(torch.cat([own, others], -1) / temperature, -1)[..., 0]
    valid = (targets != 0).to(losses.dtype)
    return (losses * valid).sum() / valid.sum()
