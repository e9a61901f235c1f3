"""What it brings to draw negatives, and to find the rows of packing, one batch ahead.

    python benchmarks/offload.py [--steps 12] [--rounds 7] [--items 20000] [--json FILE]

`sampling`: negatives by popularity, without replacement, deduplicated, hits masked; as many groups of them as make that
part as long as the rest of the step. `packing`: a padded transformer, whose rows are found in the prologue. Ways to run
the same training steps, in turns, medians of wall time with one thread for the ops of each step:

    in the graph   as the model is written
    before         cut out, computed when the step is called
    ahead          cut out, computed during the step before (a second core)

Losses of `before` and `ahead` are compared bit by bit over a whole training run. Measured on the machine at hand. The
last way needs two free cores: where others take them, the processor time of the training thread still says what it is
spared, and the share of the others is printed. Cores share memory as well: weights of more items than a cache holds
are read from it by both threads, which then wait for each other (--items 50000).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Effort, Neighbours, machine, say, seconds, take_turns
from torch import Tensor, nn

import turbogr_compile

DIM, NEGATIVES, FEW = 96, 16, 2000
ROWS, LENGTH = 16, 48
Step = Callable[[Any], Tensor]


class Tower(nn.Module):
    """A few causal transformer layers over padded sequences of items."""

    def __init__(self, items: int, layers: int = 3) -> None:
        super().__init__()
        self.items = nn.Embedding(items, DIM, padding_idx=0)
        self.mix = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(DIM, 8 * DIM) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(8 * DIM, DIM) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * layers))

    def forward(self, ids: Tensor) -> Tensor:
        keep = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & (ids != 0)[:, None, :]
        x = self.items(ids)
        for i, (mix, up, down) in enumerate(zip(self.mix, self.up, self.down, strict=True)):
            q, k, v = mix(self.norms[2 * i](x)).chunk(3, -1)
            x = x + (q @ k.mT / DIM**0.5).masked_fill(~keep, -1e9).softmax(-1) @ v
            x = x + down(F.silu(up(self.norms[2 * i + 1](x))))
        return x


class Sampled(Tower):
    """Loss against groups of negatives that are drawn by popularity, one group for so many sequences."""

    def __init__(self, items: int, groups: int) -> None:
        super().__init__(items)
        self.groups = groups
        self.register_buffer("popularity", 1 / torch.arange(1.0, items + 1) ** 0.75)

    def draw(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drawn = torch.multinomial(self.popularity.expand(self.groups, -1), NEGATIVES)
        unique, back = torch.unique(drawn, return_inverse=True)
        # Every position is compared with the negatives of each group.
        return unique, back, ids[..., None] == drawn.flatten()

    def loss(self, ids: Tensor) -> Tensor:
        unique, back, hits = self.draw(ids[:, 1:])
        hidden = self(ids)[:, :-1]
        negatives = (hidden @ self.items(unique).T)[..., back.flatten()].masked_fill(hits, -1e9)
        positives = (hidden * self.items(ids[:, 1:])).sum(-1, keepdim=True)
        loss = torch.cat([positives, negatives], -1).logsumexp(-1) - positives.squeeze(-1)
        valid = ids[:, 1:] != 0
        return (loss * valid).sum() / valid.sum()


class Full(Tower):
    """Loss against a part of the catalogue that is small enough to take whole."""

    def loss(self, ids: Tensor) -> Tensor:
        logits = self(ids)[:, :-1] @ self.items.weight[:FEW].T
        return F.cross_entropy(logits.flatten(0, 1), (ids[:, 1:] % FEW).flatten(), ignore_index=0)


def padded(count: int, items: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, items, (count, ROWS, LENGTH), generator=g)
    lengths = torch.randint(LENGTH // 4, LENGTH + 1, (count, ROWS, 1), generator=g)
    return list(ids * (torch.arange(LENGTH) < lengths))


def train(model: nn.Module, step: Step, loop: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in loop:
        optimizer.zero_grad()
        loss = step(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(x) for x in losses]


def clock(run: Callable[[], Any], calls: int = 5) -> float:
    """Processor seconds of a call on one thread."""

    def once() -> float:
        began = time.thread_time()
        run()
        return time.thread_time() - began

    run()
    return statistics.median(once() for _ in range(calls))


def balanced_groups(items: int) -> int:
    """As many groups as make sampling as long as the rest, which has their scores to compute."""
    batch, groups = padded(1, items)[0], 16
    for _ in range(3):
        model = Sampled(items, groups)
        drawn = model.draw(batch[:, 1:])
        sampling = clock(lambda model=model: model.draw(batch[:, 1:]))
        model.draw = lambda ids, drawn=drawn: drawn  # type: ignore[method-assign]
        step = turbogr_compile.compile(model.loss)
        rest = clock(lambda step=step: step(batch).backward())
        # What the scores of more groups add is seen in the next round.
        groups = max(1, round(groups * rest / sampling))
    return groups


def compare(model: nn.Module, ways: dict[str, tuple[Step, Callable[[Any], Any]]], args: argparse.Namespace) -> dict:
    """Medians per step, and whether the losses of two ways are the same."""
    batches = padded(args.steps, args.items)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    losses, thread = {}, {name: list[float]() for name in ways}
    for name, (step, loop) in ways.items():
        model.load_state_dict(start)
        turbogr_compile.seed(0)
        losses[name] = train(model, step, loop(batches), optimizer)

    def run(name: str) -> None:
        step, loop = ways[name]
        began = time.thread_time()
        train(model, step, loop(batches), optimizer)
        thread[name].append((time.thread_time() - began) / args.steps)

    runs = {name: partial(run, name) for name in ways}
    taken = take_turns(runs, Effort(args.rounds, args.rounds, 0), peak=False, called_before=True)
    return {
        "seconds per step": {n: (seconds(samples, 2) or float("nan")) / args.steps for n, samples in taken.items()},
        "of the training thread": {n: statistics.median(found) for n, found in thread.items()},
        "losses identical": losses["before"] == losses["ahead"],
    }


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    groups = args.groups or balanced_groups(args.items)
    say(f"{groups} groups of {NEGATIVES} negatives")
    torch.manual_seed(0)
    model = Sampled(args.items, groups)
    inside = turbogr_compile.compile(model.loss)
    cut = turbogr_compile.compile(model.loss, passes=["offload-sampling"], expect={"offload-sampling": ">=1"})
    ways = {"in the graph": (inside, list), "before": (cut, list), "ahead": (cut, turbogr_compile.ahead)}
    found = compare(model, ways, args)
    batch = padded(1, args.items)[0]
    alone = clock(lambda: model.draw(batch[:, 1:]))
    return {"groups": groups, "seconds of sampling alone": alone, **found}


def packing(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Full(args.items)
    step = turbogr_compile.compile(model.loss)
    return compare(model, {"before": (step, list), "ahead": (step, turbogr_compile.ahead)}, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--items", type=int, default=20_000, help="that negatives are drawn from")
    parser.add_argument("--groups", type=int, default=0, help="of negatives; 0 to find out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.items < FEW:
        parser.error(f"--items takes {FEW} or more, not {args.items}")
    torch.set_num_threads(1)
    neighbours = Neighbours()
    results: dict[str, Any] = {"machine": machine()}
    for table in (sampling, packing):
        found = results[table.__name__] = table(args)
        times, own = found["seconds per step"], found["of the training thread"]
        say(f"{table.__name__}: losses of before and ahead identical: {found['losses identical']}")
        for name, taken in times.items():
            busy = f"{own[name] * 1e3:8.2f} ms of its thread, {own['before'] / own[name]:.2f}x less"
            say(f"  {name:14} {taken * 1e3:8.2f} ms a step, {times['before'] / taken:.2f}x faster than before;  {busy}")
    results["neighbours"] = neighbours.share()
    say(f"other processes took {results['neighbours']:.0%} of the processors" if results["neighbours"] else "")
    say(str(turbogr_compile.statistics()))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
