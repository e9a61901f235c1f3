"""Which pairs of an attention are dropped: a pure function of seed, sequence, head, query column and key column.

Nothing is drawn and nothing is stored. The backward asks again and gets the same answer, however rows are packed, split
into blocks or spread over threads. Numbers are unsigned, of 32 bits; any language repeats them bit for bit:

    mix(x):   x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x *= 0x735a2d97;  x ^= x >> 15
    bits:     mix(mix(mix(mix(mix(mix(0x9e3779b9 ^ seed[0:32]) ^ seed[32:64]) ^ sequence) ^ head) ^ query) ^ key)
    dropped:  bits < round_half_even(p · 2^32)       (of 33 bits where p is 1: then all are dropped)

A seed is the 64 bits of an int64; the other numbers count by their low 32 bits. Both multipliers are below 2^31, so
products of int64 tensors do not overflow before they are cut to 32 bits. The constants of `mix` come from the public
search for integer hashes without bias, hash-prospector.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
START = 0x9E3779B9

Bits = TypeVar("Bits", int, Tensor)


def mix(x: Bits) -> Bits:
    """A bijection of 32-bit numbers in which every input bit turns about half of the output bits."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def bits(seed: int, sequence: int, head: int, query_columns: Tensor, key_columns: Tensor) -> Tensor:
    """32 random bits for each pair of a query and a key, as int64 (Lq, Lk)."""
    state = mix(START ^ (seed & MASK))
    for number in (seed >> 32, sequence, head):
        state = mix(state ^ (number & MASK))
    rows = mix((query_columns & MASK) ^ state)
    return mix(rows[:, None] ^ (key_columns & MASK)[None, :])


def kept(
    seed: int, sequence: int, heads: int, query_columns: Tensor, key_columns: Tensor, probability: float
) -> Tensor:
    """bool (heads, Lq, Lk): pairs that stay when each is dropped with the given probability."""
    limit = round(probability * (MASK + 1))
    return torch.stack([bits(seed, sequence, h, query_columns, key_columns) >= limit for h in range(heads)])


def gain(probability: float) -> float:
    """What pairs that stay are multiplied by, so that the mean stays."""
    return 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
