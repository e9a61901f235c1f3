"""Ranks of the balancer's tests: python balance_ranks.py WORLD STORE. Prints ok.

Torch is imported once and ranks are forked, before anything starts a thread: imports would take most of the time.
"""

import multiprocessing
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from turbogr_compile.errors import OptionError, TurbogrError
from turbogr_compile.runtime.balance import Balancer, Cost, Planner, Ragged, exchange, loss_weight, sample_weights

COST = Cost(0, 1, 0.1)
ITEMS = 50


def global_batch(world: int, step: int) -> list[list[torch.Tensor]]:
    """Ids of each rank's sequences, numbers of both uneven; each process draws the same."""
    random = torch.Generator().manual_seed(step)
    counts = torch.randint(1, 6, (world,), generator=random).tolist()
    lengths = [torch.randn(n, generator=random).mul(1.2).add(2).exp().clamp(1, 60).long().tolist() for n in counts]
    return [[torch.randint(0, ITEMS, (n,), generator=random) for n in rank] for rank in lengths]


def ragged(sequences: list[torch.Tensor], first: int) -> Ragged:
    lengths = torch.tensor([len(s) for s in sequences])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat(sequences)
    return Ragged(
        offsets,
        {"ids": ids, "pair": torch.stack([ids, ids * 2], 1).half()},
        {"user": torch.arange(first, first + len(sequences)), "odd": lengths % 2 == 1},
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(ITEMS, 8), nn.Linear(8, ITEMS)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of each token: of a sequence, the next item after the mean of those before."""
        x = self.table(ids).cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        return nn.functional.cross_entropy(self.out(x.tanh()), ids.roll(-1), reduction="none")


def losses(model: Model, batch: Ragged) -> list[torch.Tensor]:
    return [model(part) for part in batch.values["ids"].split(batch.lengths.tolist())]


def gradient(model: Model, loss: torch.Tensor, average: bool) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    if average:
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    return flat


def check_step(rank: int, world: int, step: int, planner: Planner) -> None:
    every = global_batch(world, step)
    flat = [s for part in every for s in part]
    mine = ragged(every[rank], sum(len(part) for part in every[:rank]))
    plan = planner.plan(mine.lengths)
    moved = exchange(mine, plan)

    wanted = plan.samples(rank).tolist()
    assert moved.samples["user"].tolist() == wanted
    assert moved.lengths.tolist() == [len(flat[i]) for i in wanted]
    assert moved.samples["odd"].tolist() == [len(flat[i]) % 2 == 1 for i in wanted]
    ids = torch.cat([flat[i] for i in wanted])
    assert moved.values["ids"].equal(ids) and moved.values["pair"].equal(torch.stack([ids, ids * 2], 1).half())

    model = Model()
    whole = [model(s) for s in flat]
    reference = gradient(model, torch.cat(whole).mean(), average=False)
    found = gradient(model, torch.cat(losses(model, moved)).mean() * loss_weight(plan, rank), average=True)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-12)

    whole = [model(s).mean() for s in flat]
    reference = gradient(model, torch.stack(whole).mean(), average=False)
    means = torch.stack([part.mean() for part in losses(model, moved)])
    found = gradient(model, means.mean() * loss_weight(plan, rank, "sequences"), average=True)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-12)

    # As the unbalanced job does it: each rank takes the mean of its own tokens.
    reference = gradient(model, torch.cat(losses(model, mine)).mean(), average=True)
    sums = torch.stack([part.sum() for part in losses(model, moved)])
    found = gradient(model, sums @ sample_weights(plan, rank), average=True)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-12)


def check_ahead(rank: int, world: int) -> None:
    """Plans that are started two steps ahead are the plans made on the spot."""
    planner = Planner(COST)
    lengths = [torch.tensor([len(s) for s in global_batch(world, step)[rank]]) for step in range(4)]
    started = [planner.start(n) for n in lengths[:2]]
    for step in range(4):
        if step + 2 < 4:
            started.append(planner.start(lengths[step + 2]))
        assert started[step].result().digest == planner.plan(lengths[step]).digest


def check_refusals(rank: int, world: int) -> None:
    lengths = torch.tensor([40, 3, 7, 9, 30] if rank == 0 else [1, 2, 3, 4, 5])
    try:
        Planner(COST, Balancer("given" if rank == 0 else "lpt")).plan(lengths)
    except TurbogrError as error:
        assert "made different plans" in str(error)
    else:
        raise AssertionError("different plans passed")
    plan = Planner(COST).plan(lengths)
    other = Ragged(torch.tensor([0, 1]), {"ids": torch.zeros(1)})
    try:
        exchange(other, plan)
    except OptionError as error:
        assert "other lengths" in str(error)
    else:
        raise AssertionError("a batch of other lengths passed")


def run_rank(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for step in range(4):
        check_step(rank, world, step, Planner(COST))
        check_step(rank, world, step, Planner(COST, Balancer(keep_counts=False)))
    check_ahead(rank, world)
    check_refusals(rank, world)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    world, store = int(sys.argv[1]), sys.argv[2]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, world, store)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    failed = [number for number, rank in enumerate(ranks) if rank.exitcode]
    sys.stdout.write(f"ranks {failed} failed\n" if failed else "ok\n")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
