"""How much a program computes, batch by batch, packed and in eager: what the list of packed programs is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .judge import EXPLAINED, inputs, judge, quiet
from .program import Program


class Work(TorchDispatchMode):
    """Counts arithmetic, numbers written, and rows looked up in the table of ids."""

    def __init__(self, table: torch.Tensor | None) -> None:
        super().__init__()
        self.table = table.data_ptr() if table is not None else None
        self.flops = self.numbers = self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        if isinstance(result, torch.Tensor) and result.is_floating_point() and not func.is_view:
            self.numbers += result.numel()
            first = args[0] if args and isinstance(args[0], torch.Tensor) else None
            if self.table is not None and first is not None and first.data_ptr() == self.table and result.dim():
                self.rows += result.numel() // max(result.shape[-1], 1)
        return result

    @property
    def found(self) -> list[int]:
        return [self.rows, self.numbers, self.flops]


def measure(program: Program) -> dict[str, Any]:
    """One entry of the list: is it packed, and [rows, numbers, FLOPs] of each batch, packed and in eager."""
    verdict = judge(program)
    entry = {"seed": program.seed, "hash": program.hash, "status": verdict.status, "packed": verdict.packed}
    if verdict.status == "invalid" or not verdict.packed:
        return entry
    with quiet():
        packed, eager = verdict.compiled.run, program.function()
        pairs = [[_work(packed, program, k), _work(eager, program, k)] for k in range(len(program.kinds))]
    return {**entry, "work": {kind: pair for kind, pair in zip(program.kinds, pairs, strict=True) if None not in pair}}


def _work(run: Any, program: Program, number: int) -> list[int] | None:
    values = inputs(program, number)
    table = dict(zip(program.arguments, values, strict=True)).get("E")
    try:
        with torch.no_grad(), Work(table) as work:
            run(*values)
    except Exception:
        return None
    return work.found


def lost(old: list[dict[str, Any]], new: list[dict[str, Any]], slack: float = 0.02) -> list[str]:
    """Programs that compute more than they did, with what of; wrong ones count as lost to nobody."""
    now = {e["hash"]: e for e in new}
    found = []
    for entry in old:
        other = now.get(entry["hash"])
        if other is None or not entry["packed"] or entry["status"] not in ("same", "pass-error", *EXPLAINED):
            continue
        if not other["packed"]:
            found.append(f"seed {entry['seed']} {entry['hash']}: no longer packed")
            continue
        for kind, (mine, _) in entry["work"].items():
            theirs = other.get("work", {}).get(kind, [mine])[0]
            more = [
                w for w, a, b in zip(("rows", "numbers", "flops"), mine, theirs, strict=True) if b > a * (1 + slack)
            ]
            if more:
                found.append(
                    f"seed {entry['seed']} {entry['hash']} {kind}: more {', '.join(more)}: {mine} became {theirs}"
                )
                break
    return found
