"""A whole training step of an unmodified padded model, and what its compilation costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import by_hand
import torch
from jagged import Batch
from measure import processor_seconds, rotated, say
from padded_models import HSTULayer, Recommender, SASRecLayer
from plan import OPTIMIZER, OURS, STEP, Disagreement, Group, Settings, Table, by_turns, require_same, result_of
from torch import Tensor, nn
from watching import Attentions

import turbogr_compile

ITEMS, NEGATIVES, LAYERS = 10_000, 128, 2
INDUCTOR, LOOP, KERNELS = "padded Inductor", "by hand, loop", "by hand, kernels"
# Products of a (rows, D) tensor with a (D, D) matrix, per layer.
PRODUCTS: dict[type[nn.Module], int] = {HSTULayer: 5, SASRecLayer: 6}


@dataclass(frozen=True)
class Model:
    """A padded model and a batch for it; the same ones for every way of running a step."""

    name: str
    layer: type[nn.Module]
    sequences: int
    longest: int
    dim: int
    heads: int

    def __str__(self) -> str:
        return f"{self.name} B{self.sequences} N{self.longest} D{self.dim}"

    @cached_property
    def batch(self) -> Batch:
        return Batch.heavy_tailed(self.sequences, self.longest)

    @cached_property
    def padded(self) -> Recommender:
        torch.manual_seed(0)
        return Recommender(self.layer, ITEMS, self.dim, self.heads, LAYERS, self.longest)

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, targets, negatives."""
        torch.manual_seed(1)
        ids, targets = torch.randint(1, ITEMS, (2, self.sequences, self.longest)) * self.batch.valid
        return ids, targets, torch.randint(1, ITEMS, (NEGATIVES,))

    @cached_property
    def packed_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids, columns, targets, negatives, as a loader would hand them to a model that is packed by hand."""
        ids, targets, negatives = self.inputs
        return self.batch.packed(ids), self.batch.columns, self.batch.packed(targets), negatives

    def flops(self, rows: int, pairs: int) -> float:
        """Of a step: the backward needs twice the products of the forward."""
        layers = LAYERS * (PRODUCTS[self.layer] * 2 * self.dim**2 * rows + 4 * self.dim * pairs)
        return 3 * (layers + 2 * self.dim * (NEGATIVES + 1) * rows)


HSTU_SHORT, HSTU_LONG = Model("HSTU", HSTULayer, 32, 256, 256, 4), Model("HSTU", HSTULayer, 16, 1024, 256, 4)
SASREC = Model("SASRec", SASRecLayer, 128, 200, 128, 2)
QUICK = (Model("HSTU", HSTULayer, 16, 256, 128, 2),)
TINY = (Model("HSTU", HSTULayer, 3, 16, 16, 2), Model("SASRec", SASRecLayer, 3, 16, 16, 2))


# --- steps -------------------------------------------------------------------------------------------


def step_groups(settings: Settings) -> Iterator[Group]:
    full = (HSTU_LONG, HSTU_SHORT, SASREC) if settings.malloc == "tuned" else (HSTU_LONG,)
    for model in settings.pick(full, QUICK, TINY):
        torch._dynamo.reset()
        # Inductor takes its time to compile: one model tells how the code generators compare.
        yield step_group(model, other_codegens() if model in (HSTU_LONG, TINY[0]) else [])


def step_group(model: Model, codegens: list[str]) -> Group:
    losses = losses_of(model, codegens)
    check_same(model, losses)
    optimizer = torch.optim.AdamW(model.padded.parameters(), lr=1e-4, fused=True)

    def step_of(loss: Callable[[], Tensor]) -> Callable[[], float]:
        def step() -> float:
            optimizer.zero_grad(set_to_none=True)
            value = loss()
            value.backward()
            optimizer.step()
            return value.item()

        return step

    ways: dict[str, Callable[[], Any]] = {name: step_of(loss) for name, loss in losses.items()}
    ways[OPTIMIZER] = optimizer.step
    batch = model.batch
    needed = model.flops(batch.rows, batch.causal_pairs)
    spent = model.flops(model.sequences * model.longest, batch.padded_pairs)
    facts = {"rows": batch.rows, "fill": round(batch.fill, 3), "padded FLOPs / jagged FLOPs": round(spent / needed, 2)}
    return Group(str(model), STEP, ways, needed, facts, unpacked_note(model))


def losses_of(model: Model, codegens: list[str]) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute the loss of one batch; turbogr with its default code generator, and with others."""
    padded = {
        "padded eager": model.padded.loss,
        INDUCTOR: torch.compile(model.padded.loss, dynamic=False),
    }
    packed = {
        LOOP: by_hand.PackedLoss(model.padded, by_hand.plain(model.batch)),
        KERNELS: by_hand.PackedLoss(model.padded, by_hand.kernels(model.batch)),
    }
    ours = {OURS: torch.compile(model.padded.loss, backend="turbogr")}
    for codegen in codegens:
        ours[f"{OURS}, {codegen}"] = torch.compile(model.padded.loss, backend="turbogr", options={"codegen": codegen})
    return {
        **{name: lambda loss=loss: loss(*model.inputs) for name, loss in padded.items()},
        **{name: lambda loss=loss: loss(*model.packed_inputs) for name, loss in packed.items()},
        **{name: lambda loss=loss: loss(*model.inputs) for name, loss in ours.items()},
    }


def other_codegens() -> list[str]:
    """Code generators of the target that are not its default."""
    default = turbogr_compile.Options().codegen
    return [codegen for codegen in ("aten", "inductor") if codegen != default]


def check_same(model: Model, losses: dict[str, Callable[[], Tensor]]) -> None:
    """Loss and gradients agree with padded eager."""
    expected: list[Tensor] = []
    for name, loss in losses.items():
        model.padded.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        found = [value.detach(), *(p.grad for p in model.padded.parameters() if p.grad is not None)]
        expected = expected or found
        if len(found) != len(expected):
            raise Disagreement(f"{model}, {name}: {len(found) - 1} gradients, and not {len(expected) - 1}")
        require_same(f"{model}, {name} and padded eager", found[:1], expected[:1], 1e-4)
        # Gradients that nearly cancel (a bias before a norm, a key bias under softmax) differ between padded ways too.
        require_same(f"{model}, gradients of {name} and padded eager", found[1:], expected[1:], 1e-2)


def unpacked_note(model: Model) -> list[str]:
    """Says so where the compiler left an attention padded."""
    seen = Attentions()
    turbogr_compile.compile(model.padded.loss, codegen="aten", instruments=(seen,))(*model.inputs)
    return [] if seen.jagged == LAYERS else [f"only {seen.jagged} of {LAYERS} attentions are jagged"]


# --- compiling ---------------------------------------------------------------------------------------


def compile_results(settings: Settings) -> Iterator[dict[str, Any]]:
    """Each compilation in a fresh process with empty caches, ways taking turns."""
    rounds = settings.pick(5, 1, 1)
    for number, model in enumerate(cold_models(settings)):
        wall: dict[str, list[float]] = {INDUCTOR: [], OURS: []}
        processor: dict[str, list[float]] = {INDUCTOR: [], OURS: []}
        for turn in range(rounds):
            for way in rotated(list(wall), turn):
                found = in_fresh_process(number, way, settings)
                wall[way].append(found["wall"])
                processor[way].append(found["processor"])
                say(f"    {way}: {found['wall']:.1f} s on the wall, {found['processor']:.1f} s of processors")
        for part, each in (("wall", wall), ("processors", processor)):
            samples = {
                way: {"calls": 1, "wall": took, "user": took, "system": [0.0] * rounds} for way, took in each.items()
            }
            yield result_of(Group(str(model), part, {}), samples)


def cold_models(settings: Settings) -> tuple[Model, ...]:
    return settings.pick((HSTU_LONG,), QUICK, TINY[:1])


def in_fresh_process(number: int, way: str, settings: Settings) -> dict[str, float]:
    here = str(Path(__file__).parent / "kernels.py")
    command = [sys.executable, here, "--cold", f"{number}:{way}", "--size", settings.size]
    with tempfile.TemporaryDirectory() as inductor, tempfile.TemporaryDirectory() as turbogr:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": inductor, "TURBOGR_CACHE_DIR": turbogr}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cold_compile(number: int, way: str, settings: Settings) -> dict[str, float]:
    """Of this process: seconds of the first step, less those of a later one."""
    model = cold_models(settings)[number]
    options: dict[str, Any] = {"dynamic": False} if way == INDUCTOR else {"backend": "turbogr"}
    loss = torch.compile(model.padded.loss, **options)

    def step() -> tuple[float, float]:
        before, began = processor_seconds(), time.perf_counter()
        loss(*model.inputs).backward()
        model.padded.zero_grad(set_to_none=True)
        return time.perf_counter() - began, processor_seconds() - before

    first, *later = (step() for _ in range(3))
    return {"wall": first[0] - min(x[0] for x in later), "processor": first[1] - min(x[1] for x in later)}


TABLES = (
    Table(
        "step",
        "Training step: embedding, 2 layers, 128 shared negatives, AdamW",
        OURS,
        (INDUCTOR, "padded eager", LOOP, KERNELS),
        by_turns(step_groups),
        "turbogr: torch.compile(model.loss, backend='turbogr') of the unmodified padded model. By hand: on rows that "
        "were packed before, with a loop over histories or with torch.ops.turbogr. Floor: FLOPs of packed rows and "
        "causal pairs at the speed of the matrix product, and the optimizer.",
    ),
    Table(
        "compile",
        "Cold compile of the step, caches empty, kernels included",
        OURS,
        (INDUCTOR,),
        compile_results,
        "seconds of the first step, less those of a later one; processors: of the process and all it started.",
        unit="s",
        once="default",
    ),
)
