"""What deferral costs a step: a model whose loss is outside, against the same step compiled whole.

    python benchmarks/deferral.py [--steps 300] [--layers 2]
    python benchmarks/deferral.py --late [--steps 50]

Both run in one process and take turns; times are processor time of the thread, medians, in microseconds. The model is
as small as can be, so that nothing hides the overhead; it does not grow with rows. Parts are told apart from outside:
the call of the model (what Dynamo takes for its frame is measured with a backend that does nothing), the lines of the
loss, and the backward, in which the step is put together and run.

`--late`: a larger model, whose logits are read after the step for the number of right answers; against steps that
compute it along with the loss. FLOPs and processor time.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from time import thread_time as clock

import torch
import torch.nn.functional as F
from measure import rotated
from torch import Tensor, nn

import turbogr_compile
from turbogr_compile.testing import Flops

ITEMS, DIM, WIDTH, LENGTHS = 50, 16, 12, (3, 9, 5, 2)
Parts = dict[str, list[float]]


class Tower(nn.Module):
    """Thirty parameters with two layers."""

    def __init__(self, layers: int, items: int = ITEMS, dim: int = DIM, width: int = WIDTH) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, dim, padding_idx=0), nn.Embedding(width, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, items)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        x = self.items(ids) + self.places(torch.arange(n))
        return self.head(self.body(x, mask=future, src_key_padding_mask=ids == 0))


def batch(lengths: Tensor, items: int = ITEMS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, items, (len(lengths), width)) * (torch.arange(width) < lengths[:, None])
    return ids, ids.roll(-1, 1) * (torch.arange(width) < lengths[:, None] - 1)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1), ignore_index=0)


def measure(steps: int, layers: int) -> tuple[int, Parts]:
    torch.manual_seed(0)
    model = Tower(layers)
    ids, target = batch(torch.tensor(LENGTHS))
    options = {"target": "eager", "worth": "always"}
    whole = turbogr_compile.compile(lambda a, b: loss_of(model(a), b), deferral=False, **options)
    outside = turbogr_compile.compile(model, deferral=True, **options)
    nothing = [torch.zeros(len(LENGTHS), WIDTH, ITEMS)]
    frame = torch.compile(model, backend=lambda graph, inputs: lambda *given: nothing)
    parts: Parts = defaultdict(list)

    def note(**spans: float) -> None:
        for name, seconds in spans.items():
            parts[name].append(seconds)

    def deferred_step() -> None:
        began = clock()
        logits = outside(ids)
        called = clock()
        loss = loss_of(logits, target)
        recorded = clock()
        loss.backward()
        done = clock()
        note(call=called - began, loss=recorded - called, backward=done - recorded, deferred=done - began)

    def whole_step() -> None:
        began = clock()
        loss = whole(ids, target)
        forward = clock()
        loss.backward()
        done = clock()
        note(whole_forward=forward - began, whole_backward=done - forward, whole=done - began)

    def dynamo_alone() -> None:
        began = clock()
        frame(ids)
        note(frame=clock() - began)

    for turn in range(steps + 20):
        if turn == 20:
            parts.clear()  # compiled, validated, warm
        for step in rotated([deferred_step, whole_step, dynamo_alone], turn):
            step()
            model.zero_grad(set_to_none=True)
    return len(list(model.parameters())), parts


def read_late(steps: int, layers: int) -> str:
    """What it adds to a step that a metric is read after it, and not computed along with the loss."""
    torch.manual_seed(0)
    model, lengths = Tower(layers, 2000, 64, 64), torch.randint(5, 35, (32,))
    ids, target = batch(lengths, 2000, 64)
    called = turbogr_compile.compile(model, worth="always")

    def right(logits: Tensor) -> Tensor:
        return ((logits.argmax(-1) == target) & (target != 0)).sum()

    def plain() -> None:
        logits = called(ids)
        loss_of(logits, target).backward()

    def along() -> None:
        logits = called(ids)
        found = right(logits)
        loss_of(logits, target).backward()
        found.item()

    def late() -> None:
        logits = called(ids)
        loss_of(logits, target).backward()
        right(logits).item()

    def measured(step: Callable[[], None]) -> tuple[float, int]:
        for _ in range(6):  # compiled, validated, warm
            step()
        times = []
        for _ in range(steps):
            began = clock()
            step()
            times.append(clock() - began)
        with Flops() as flops:
            step()
        model.zero_grad(set_to_none=True)
        return statistics.median(times), flops.total

    found = {"no metric": measured(plain), "computed along": measured(along), "read after the step": measured(late)}
    seconds, flops = found["computed along"]
    lines = [f"{name:20} {1e3 * t:7.2f} ms, {t / seconds:.3f}; FLOPs {n / flops:.3f}" for name, (t, n) in found.items()]
    return "\n".join(lines)


def table(parameters: int, parts: Parts) -> str:
    def us(name: str) -> float:
        return 1e6 * statistics.median(parts[name])

    over = 1e6 * statistics.median(a - b for a, b in zip(parts["deferred"], parts["whole"], strict=True))
    put_together = us("backward") - us("whole_backward") - us("whole_forward") + us("frame")
    rows = [
        ("call of the model without Dynamo's part: twins, a place in autograd's graph", us("call") - us("frame")),
        ("lines of the loss: two calls recorded", us("loss")),
        ("the step found and called, and who may still read, beyond what it computes", put_together),
        ("Dynamo's guards of the model's frame, which the whole step has as well", us("frame")),
    ]
    lines = [f"{what:80} {value:7.0f} us" for what, value in rows]
    deferred, whole = us("deferred"), us("whole")
    lines.append(f"a step with {parameters} parameters: {deferred:.0f} us, whole {whole:.0f} us, more by {over:.0f} us")
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--late", action="store_true", help="a metric that is read after the step")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.late:
        print(read_late(options.steps, options.layers))
        return
    parameters, parts = measure(options.steps, options.layers)
    print(table(parameters, parts))


if __name__ == "__main__":
    main()
