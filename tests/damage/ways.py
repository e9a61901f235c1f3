"""Ways in which a file may be damaged: its bytes, or one of its values. Each follows from a number."""

from __future__ import annotations

import json
import random
from typing import Any

OTHERS = (None, -1, 2**70, float("nan"), float("inf"), "x", [], {}, [None], {"a": 1}, True, 1e308, "\0", -(2**63))
OTHERS += ("\ud800", 10**4000)  # no text of UTF-8; a number that no machine has


def damaged(content: bytes, number: int) -> bytes:
    """Bytes cut, changed, left out, put in between, or all of them others."""
    chance = random.Random(number)
    data = bytearray(content)
    match number % 6:
        case 0:
            del data[chance.randrange(len(data)) :]
        case 1:
            for _ in range(8):
                data[chance.randrange(len(data))] = chance.randrange(256)
        case 2:
            start = chance.randrange(len(data))
            data[start : start + chance.randrange(1, 40)] = b""
        case 3:
            start = chance.randrange(len(data))
            data[start:start] = bytes(chance.randrange(256) for _ in range(9))
        case 4:
            data = bytearray(b"[" * chance.randrange(1, 200_000))
        case 5:
            data = bytearray(json.dumps(chance.choice([None, 3, "x", [], {}, [[1]], {"a": 1}])).encode())
    return bytes(data)


def twisted(content: bytes, number: int) -> bytes:
    """JSON, or lines of it, in which one value is another, or is not there."""
    chance = random.Random(number)
    try:
        return json.dumps(_twisted(json.loads(content), chance)).encode()
    except ValueError:
        pass
    lines = content.splitlines()
    at = chance.randrange(len(lines))
    lines[at] = json.dumps(_twisted(json.loads(lines[at]), chance)).encode()
    return b"\n".join(lines) + b"\n"


def _twisted(data: Any, chance: random.Random) -> Any:
    at = data
    for _ in range(chance.randrange(1, 6)):
        inner = list(at.items()) if isinstance(at, dict) else list(enumerate(at))
        if not inner:
            break
        key, value = chance.choice(inner)
        if not isinstance(value, (dict, list)) or chance.random() < 0.3:
            if chance.random() < 0.2 and isinstance(at, dict):
                del at[key]
            else:
                at[key] = chance.choice(OTHERS)
            break
        at = value
    return data


def version(content: bytes, number: int) -> bytes:
    """One of both; values only of what is JSON."""
    if number % 2 == 0:
        try:
            return twisted(content, number)
        except (ValueError, IndexError):
            pass
    return damaged(content, number // 2)
