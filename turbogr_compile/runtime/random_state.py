"""The state of everything that draws random numbers, for checkpoints."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import TurbogrError
from . import draws
from .accelerator import accelerator
from .ranks.together import Together


def random_state(group: Any = None) -> RandomState:
    """Generators of torch, its accelerator, NumPy and Python on every rank, and what compiled graphs draw outside."""
    return RandomState(group)


class RandomState:
    """All ranks call `state_dict` together. A rank that is new begins as the others, where these had one seed."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": Together(self.group).gather(_state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        stored, rank = state.get("ranks"), Together(self.group).rank
        if not stored:
            raise TurbogrError(f"not a state of random_state(): expected 'ranks', got {sorted(state)}")
        states = [pickle.loads(each) for each in stored]
        if rank < len(states):
            _restore(states[rank])
        elif len({each["draws"]["seed"] for each in states}) == 1:  # all ranks were to draw the same
            _restore(states[0])
        else:
            _begin(states[0], rank)


def _state() -> bytes:
    state = {
        "python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state().numpy(),
        "draws": draws.state_dict(), "accelerator": None,
    }  # fmt: skip
    if device := _accelerator():
        state["accelerator"] = device.get_rng_state().numpy()
    return pickle.dumps(state)


def _restore(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    device = _accelerator()
    if device and state["accelerator"] is not None:
        device.set_rng_state(torch.from_numpy(state["accelerator"]))
    draws.load_state_dict(state["draws"])


def _begin(first: Mapping[str, Any], rank: int) -> None:
    """From the first rank's seed, but not with its numbers. What compiled graphs draw goes on with its count."""
    text = f"{first['draws']['seed']}/{rank}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    draws.load_state_dict({**first["draws"], "seed": seed})


def _accelerator() -> Any:
    kind = accelerator()
    return torch.get_device_module(kind) if kind is not None else None
