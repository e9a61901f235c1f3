"""Do the collectives of this machine return what they should? Asked once per group, before anything depends on it.

A broken collective does not raise: it returns zeros, or another rank's rows, and the model learns less. `shard` asks
for the groups and dtypes that its tables use. By hand, on the machines of a job:

    torchrun --nproc-per-node 8 -m turbogr_compile.runtime.selftest
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from ..errors import TurbogrError
from ..graph.text import dtype_text
from .accelerator import accelerator

ALWAYS = (torch.int64, torch.int32)  # numbers of rows, and ids
WIDTH = 3
_CALLS: Counter[str] = Counter()
_TESTED: set[tuple[str, tuple[int, ...], str, torch.dtype]] = set()


class CollectivesFail(TurbogrError):
    """A collective returned something else than it must."""


def check_collectives(
    group: Any = None, dtypes: Iterable[torch.dtype] = (torch.float32,), device: torch.device | str = "cpu"
) -> int:
    """How many collectives were tried; 0 where there is nothing to try or it was done. All ranks of the group call it.

    Raises CollectivesFail on all ranks when one of them got a wrong value.
    """
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or dist.get_backend(group) == "fake":
        return 0
    place = str(getattr(group, "group_name", "")), tuple(ranks), str(torch.device(device).type)
    wanted = [d for d in dict.fromkeys((*ALWAYS, *dtypes)) if (*place, d) not in _TESTED]
    if not wanted:
        return 0
    trials = [trial for dtype in wanted for trial in _trials(group, dtype, torch.device(device))]
    found = [trial.wrong() for trial in trials]  # all of them: a rank that stopped early would leave the others alone
    _conclude(group, ranks, next(filter(None, found), ""))
    _TESTED.update((*place, d) for d in wanted)
    return len(trials)


@dataclass(frozen=True)
class _Trial:
    what: str
    run: Callable[[], Tensor]
    expected: Tensor
    group: Any

    def wrong(self) -> str:
        """What is wrong with the result, for a person; '' for nothing."""
        try:
            found = self.run()
        except Exception as error:
            return f"{self._who()} raised {type(error).__name__}: {str(error).splitlines()[0]}"
        if found.shape == self.expected.shape and found.equal(self.expected):
            return ""
        zeros = "zeros" if not found.any() else f"{_shown(found)}"
        text = f"{self._who()} returned {zeros} on rank {dist.get_rank()}, where {_shown(self.expected)} was sent"
        return text + (_ZEROS if "all_to_all" in self.what and not found.any() else "")

    def _who(self) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        several = f"ranks {ranks}" if len(ranks) <= 8 else f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
        return f"{self.what} on {several} ({dist.get_backend_config(self.group)})"


_ZEROS = (
    "\n  All-to-alls that return zeros on more than two ranks have been reported by others for HCCL with CANN 8.3: try "
    "another version of CANN, or two ranks. Rows of tables would arrive as zeros, and no error would say so"
)


def _shown(x: Tensor) -> str:
    values = x.flatten()[:6].tolist()
    return f"[{', '.join(f'{v:g}' for v in values)}{', ...' if x.numel() > 6 else ''}]"


def _trials(group: Any, dtype: torch.dtype, device: torch.device) -> Iterator[_Trial]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def rows(sender: int, receiver: int) -> Tensor:
        """Other numbers of them for every pair, and none for some; values that every dtype has, and never zero."""
        count = (sender + 2 * receiver) % 3
        values = torch.arange(count * WIDTH) + 7 * sender + 3 * receiver
        return (values % 100 + 1).view(count, WIDTH).to(device, dtype)

    def uneven() -> Tensor:
        send, receive = ([len(x) for x in parts] for parts in (sent, received))
        got = torch.zeros(sum(receive), WIDTH, dtype=dtype, device=device)
        dist.all_to_all_single(got, torch.cat(sent), receive, send, group=group)
        return got

    def even() -> Tensor:
        got = torch.zeros(world, dtype=dtype, device=device)
        dist.all_to_all_single(got, torch.full_like(got, rank % 100 + 1), group=group)
        return got

    def gathered() -> Tensor:
        got = torch.zeros(world, dtype=dtype, device=device)
        dist.all_gather_single(got, got.new_full((1,), rank % 100 + 1), group=group)
        return got

    def reduced() -> Tensor:
        mine = torch.zeros(8, dtype=dtype, device=device)
        mine[rank % 8] = 1
        dist.all_reduce(mine, group=group)
        return mine

    sent, received = ([rows(rank, r) for r in range(world)], [rows(r, rank) for r in range(world)])
    each = torch.arange(world, device=device) % 100 + 1
    sums = torch.bincount(torch.arange(world) % 8, minlength=8).to(device, dtype)  # bf16 counts up to 2048 ranks so
    name = dtype_text(dtype)
    yield _Trial(f"all_to_all_single of {name} with uneven splits", uneven, torch.cat(received), group)
    yield _Trial(f"all_to_all_single of {name}", even, each.to(dtype), group)
    yield _Trial(f"all_gather_single of {name}", gathered, each.to(dtype), group)
    yield _Trial(f"all_reduce of {name}", reduced, sums, group)


def _conclude(group: Any, ranks: list[int], wrong: str) -> None:
    """One verdict for all ranks: through the store, since collectives are what is in doubt."""
    name = f"turbogr/selftest/{getattr(group, 'group_name', '')}/{ranks[0]}-{ranks[-1]}"
    _CALLS[name] += 1
    store = dist.PrefixStore(f"{name}/{_CALLS[name]}", _torch.default_store())
    if wrong:
        store.set("wrong", wrong)
    if store.add("done", 1) == len(ranks):
        store.set("verdict", store.get("wrong").decode() if store.check(["wrong"]) else "")
    if verdict := store.get("verdict").decode():
        raise CollectivesFail(f"self-test of collectives: {verdict}")


def main() -> int:
    """Under torchrun: every dtype that tables and their wires may have."""
    kind = accelerator()
    device = torch.device("cpu") if kind is None else torch.device(kind.type, int(os.environ.get("LOCAL_RANK", 0)))
    if kind is not None:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(None if kind else "gloo")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    try:
        tried = check_collectives(None, dtypes, device)
    except CollectivesFail as error:
        if dist.get_rank() == 0:
            sys.stderr.write(f"{error}\n")
        return 1
    if dist.get_rank() == 0:
        named = ", ".join(dtype_text(d) for d in (*ALWAYS, *dtypes))
        backend, ranks = dist.get_backend_config(), dist.get_world_size()
        sys.stdout.write(f"{tried} collectives of {named} on {ranks} ranks return what they should ({backend})\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
