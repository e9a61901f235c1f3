"""The training loop: batches, loss, update, evaluation, checkpoints, figures."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import turbogr_compile as turbogr

from ..errors import OptionError
from . import build, storage
from .compiled import Loss
from .config import FEATURES, Config
from .data import Batches, Histories
from .evaluation import Evaluation
from .flops import gemm_peak, step_cost, step_flops
from .folder import FORMAT, RunFolder
from .interrupt import Interrupt
from .memory import Peak, keep_freed
from .needs import GIB, available, needs, problems
from .optimizers import StochasticAdamW
from .progress import Progress, Reading
from .ranks import Ranks, joined

# Between a run and what goes on with it.
MAY_CHANGE = {"cache", "malloc", "steps", "evaluate_every", "evaluate_users", "save_every"}


@dataclass(frozen=True)
class Result:
    """How a run ended; the same figures as in summary.json."""

    folder: Path
    summary: dict[str, Any]
    model: nn.Module

    @property
    def interrupted(self) -> bool:
        return not self.summary["finished"]


def train(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    after_step: Callable[[int], None] = lambda step: None,
) -> Result:
    """Train, from the beginning or from the last checkpoint in `out`. Under torchrun all ranks call this."""
    with settings(config), joined() as ranks:
        run = Run(config, RunFolder(Path(out), ranks.first), ranks, resume, quiet)
        return run(after_step)


class settings:
    """Threads and determinism of torch, as they were afterwards."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __enter__(self) -> None:
        self._before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        if self.config.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.compiler.reset()  # sizes that another run in this process had would make them symbolic here

    def __exit__(self, *error: Any) -> None:
        threads, deterministic = self._before
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


class Run:
    """One run in its folder."""

    def __init__(self, config: Config, folder: RunFolder, ranks: Ranks, resume: bool, quiet: bool) -> None:
        self.config, self.folder, self.ranks, self.quiet = config, folder, ranks, quiet
        self._check(resume)
        if config.malloc == "keep" and keep_freed():
            self._say("malloc keeps what is freed for the next step (--malloc default: the C library decides)")
        self.peak = Peak()
        self.gemm = gemm_peak()
        self.histories = self._histories()
        self.batches = Batches(
            self.histories, config.batch, config.max_len, config.seed, config.batch_order, ranks.rank, ranks.count,
            long=config.long, cost=step_cost(config),
        )  # fmt: skip
        self._check_memory()
        self._build(self.histories.catalogue)
        self.saved = turbogr.Checkpoints(folder.checkpoints, keep=2)
        self.state: dict[str, Any] = {
            "model": self.model, "dense": self.dense, "tables": self.tables, "random": turbogr.random_state(),
        }  # fmt: skip
        self.done = 0
        self._start(resume)

    def _check(self, resume: bool) -> None:
        if "semi-async" in self.config.features and not self.ranks.several:
            raise OptionError("feature semi-async is about tables that are spread over ranks: start with torchrun")
        if not resume:
            if self.folder.begun and any(self.folder.checkpoints.glob("step-*")):
                raise OptionError(f"{self.folder.path} holds a run already: go on with --resume, or name another --out")
            self.ranks.meet()
            self.folder.clear(data=self.config.data == "generated")
            return
        before = Config.read(self.folder.read("run.json")["config"])
        old, new = before.as_dict(), self.config.as_dict()
        for name in old:
            if old[name] != new[name] and name not in MAY_CHANGE:
                raise OptionError(
                    f"the run in {self.folder.path} has {name} {old[name]!r}, and {new[name]!r} is asked for: a run "
                    f"goes on as it began; only {', '.join(sorted(MAY_CHANGE))} may change"
                )

    def _check_memory(self) -> None:
        """Before it is too late, and aloud: a run that cannot fit ends in the middle of its first step."""
        found, has = needs(self.config, self.histories.catalogue, self.ranks.count), available()
        self._say(f"needs about {found.memory / GIB:.2f} GiB of memory ('turbogr plan' says what for)")
        for problem in problems(found, has, shutil.disk_usage(self.folder.path).free):
            self._say(problem)

    def _histories(self) -> Histories:
        if self.ranks.first:  # may have to write them
            tell = Reading(shown=not self.quiet)
            found = build.histories(self.config, self.folder.path / "data", tell)
            self.folder.write("problems.json", found.problems.to_json())
        self.ranks.meet()
        return found if self.ranks.first else build.histories(self.config, self.folder.path / "data")

    def _build(self, catalogue: int) -> None:
        config = self.config
        optimizer: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        torch.manual_seed(config.seed)
        self.model = build.recommender(config, catalogue, table="meta")
        self.parameters = build.parameters_of(self.model)
        build.place_tables(self.model, config, self.ranks.count)
        self.tables = turbogr.RowWiseAdagrad(self.model, lr=config.table_lr)
        own = set(self.model.items.parameters())  # of one process; of several, no table is a parameter
        storage.store(self.model, config.storage, own)
        dense = [p for p in self.model.parameters() if p not in own]
        if config.storage == "bf16":
            self.dense: torch.optim.Optimizer = StochasticAdamW(dense, **optimizer, seed=config.seed)
        else:
            self.dense = torch.optim.AdamW(dense, **optimizer, fused=True)
        self.loss = Loss(self.model, config)
        self.evaluation = Evaluation(self.model, config, self.batches, self.ranks)

    def _start(self, resume: bool) -> None:
        """Compile; then go on from a checkpoint, or begin. Neither depends on what compiling drew."""
        count = self.parameters
        self._say(str(self.histories))
        self._say(f"{self.config.model}: {count['dense']:,} dense parameters, {count['tables']:,} in tables; compiling")
        self.loss.warm_up(self.batches.at(0, 0))
        self.tables.zero_grad()
        turbogr.seed(self.config.seed * 1_000_003 + self.ranks.rank)
        if resume:
            self.done = self.saved.load({**self.state, "batches": self.batches}) or 0
            self.folder.go_back_to(self.done)
        if not resume or not self.folder.begun:
            self.folder.write("run.json", self._about())

    # --- the loop ------------------------------------------------------------------------------------

    def __call__(self, after_step: Callable[[int], None]) -> Result:
        config, began = self.config, time.perf_counter()
        shown = Progress(
            config.steps, self.done, self.gemm * self.ranks.count, shown=not self.quiet and self.ranks.first
        )
        stopped = False
        try:
            with Interrupt() as interrupt:
                for line in self._steps():
                    self.done = line["step"]
                    self.folder.append("steps.jsonl", line)
                    shown.step(line)
                    if self._due(config.evaluate_every) and self.done < config.steps:
                        self._evaluate(shown)
                    stopped = self._agree(interrupt.asked)
                    if stopped or self._due(config.save_every) or (config.save_every and self.done == config.steps):
                        self._save()
                    after_step(self.done)
                    if stopped:
                        break
                if not stopped and self.done == config.steps:
                    self._evaluate(shown)
        finally:
            shown.close()
        reason = "done" if self.done >= config.steps else "interrupted"
        summary = self._summary(reason, time.perf_counter() - began)
        self.folder.write("summary.json", summary)
        return Result(self.folder.path, summary, self.model)

    def _due(self, every: int) -> bool:
        return bool(every) and self.done % every == 0

    def _steps(self) -> Iterator[dict[str, Any]]:
        left = (self.config.steps - self.done) * self.config.accumulate
        stream: Any = islice(self.batches.forever(), left)
        if self.config.backend == "turbogr":
            stream = turbogr.ahead(stream)
        batches = iter(stream)
        for step in range(self.done, self.config.steps):
            yield self._step(step, batches)

    def _step(self, step: int, batches: Iterator[Mapping[str, Tensor]]) -> dict[str, Any]:
        began, config = time.perf_counter(), self.config
        figures = torch.zeros(3, dtype=torch.float64)  # loss, tokens, FLOPs
        taken = step * config.accumulate
        for micro in range(config.accumulate):
            batch = next(batches)
            loss = self.loss(batch) / config.accumulate
            if self.ranks.several:
                epoch, place = divmod(taken + micro, len(self.batches))
                loss = loss * self.batches.weight(place, epoch)
            loss.backward()
            if config.accumulate > 1:
                self.tables.merge()  # rows that several batches name are kept once
            lengths = (batch["ids"] != 0).sum(1)
            figures += torch.tensor([loss.item(), float(lengths.sum()), step_flops(config, lengths.numpy())])
        self._update(step)
        figures = self.ranks.add_up(figures)
        value, tokens, flops = figures.tolist()
        return {
            "step": step + 1, "loss": value / self.ranks.count, "seconds": time.perf_counter() - began,
            "tokens": int(tokens), "padded": config.accumulate * config.batch * config.max_len * self.ranks.count,
            "flops": flops, "memory": self.peak.bytes(),
        }  # fmt: skip

    def _update(self, step: int) -> None:
        if self.ranks.several:
            turbogr.average_gradients(self.model)
        part = min(1.0, (step + 1) / self.config.warmup) if self.config.warmup else 1.0
        for optimizer, rate in ((self.dense, self.config.lr), (self.tables, self.config.table_lr)):
            for group in optimizer.param_groups:
                group["lr"] = rate * part
            optimizer.step()
            optimizer.zero_grad()

    def _agree(self, asked: bool) -> bool:
        """A rank that was asked to stop stops all."""
        return bool(self.ranks.add_up(torch.tensor(int(asked))).item()) if self.ranks.several else asked

    def _save(self) -> None:
        place = _At(self.batches, self.done * self.config.accumulate)
        self.saved.save(self.done, {**self.state, "batches": place})

    def _evaluate(self, shown: Progress) -> None:
        if not self.config.evaluate_users or any(e["step"] == self.done for e in self.folder.lines("evals.jsonl")):
            return
        found = self.evaluation()
        line = {"step": self.done, **found.as_dict()}
        self.folder.append("evals.jsonl", line)
        shown.evaluated(line)
        if self.done < self.config.steps:
            self._say(f"step {self.done}: {shown.quality.strip()} of {found.count} users")

    # --- figures -------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        config = self.config
        return {
            "format": FORMAT, "name": config.backend, "model": config.model, "config": config.as_dict(),
            "parameters": self.parameters,
            "machine": {"processor": _processor(), "threads": torch.get_num_threads(), "ranks": self.ranks.count,
                        "system": platform.system()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "options": [f"{f}: {FEATURES[f]}" for f in config.features]
            + ["bf16 storage: parameters are rounded by chance"] * (config.storage == "bf16"),
            "passes": self.loss.passes, "remarks": self.loss.remarks,
        }  # fmt: skip

    def _summary(self, reason: str, seconds: float) -> dict[str, Any]:
        steps, evals = self.folder.lines("steps.jsonl"), self.folder.lines("evals.jsonl")
        total = {k: sum(s[k] for s in steps) for k in ("seconds", "tokens", "padded", "flops")}
        spent = max(total["seconds"], 1e-9)
        self.gemm = max(self.gemm, gemm_peak())  # neighbours may have had the machine at the start
        quality = evals[-1] if evals else {}
        return {
            "steps": len(steps), "seconds": total["seconds"], "tokens_per_second": total["tokens"] / spent,
            "mfu": total["flops"] / spent / (self.gemm * self.ranks.count), "gemm_flops": self.gemm,
            "padding_saved": 1 - total["tokens"] / max(total["padded"], 1), "peak_memory": self.peak.bytes(),
            "first_loss": steps[0]["loss"] if steps else None, "last_loss": steps[-1]["loss"] if steps else None,
            "hr@10": quality.get("hr@10"), "ndcg@10": quality.get("ndcg@10"),
            "baselines": self.evaluation.baselines if quality and self.ranks.first else {},
            "finished": reason == "done", "reason": reason, "seconds_with_saving": seconds,
        }  # fmt: skip

    def _say(self, text: str) -> None:
        if not self.quiet and self.ranks.first:
            sys.stderr.write(f"{text}\n")


class _At:
    """Batches as they are after those that were trained on; the loop has already looked at the next one."""

    def __init__(self, batches: Batches, taken: int) -> None:
        self.batches, self.taken = batches, taken

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict(self.taken)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
