"""Batches of any number of sequences and any width: one sequence, one column, another shape in every step."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import turbogr_compile

from .batches import SHAPES, Batch, batch
from .harness import Compiled, Graphs, counted, differences, flops, flops_of_sequences, outcome, step
from .zoo import Spec

N, D = 16, 8
SLACK = 1.05
ALONE = [
    Spec(), Spec(heads="one"), Spec(attend="sdpa"), Spec(attend="mha"), Spec(attend="hstu"), Spec(mask="window"),
    Spec(mask="causal"), Spec(heads="in-batch"), Spec(position="counted"), Spec(position="last-of-table"),
    Spec(readout="first"), Spec(readout="gather"), Spec(readout="boolean"), Spec(readout="softmax-pool"),
    Spec(loss="bpr"), Spec(loss="ce-channels"), Spec(entry="assign"), Spec(frame="first-token"), Spec(bias="toeplitz"),
    Spec(bias="log-time"), Spec(valid="lengths"), Spec(feed="conv-1"),
]  # fmt: skip


@pytest.mark.parametrize("spec", [s.mended() for s in ALONE], ids=str)
def test_one_sequence_is_packed_as_one_of_many(spec):
    compiled = Compiled(spec.model(N, D))
    for kind in SHAPES:
        compiled.compare(batch(kind, 1, 1, N, spec.pad))
    ragged = batch("graded", 0, 1, N, spec.pad)
    found, alone = flops(compiled.run, compiled.model, ragged), flops_of_sequences(spec, ragged, D)
    assert found <= SLACK * alone, f"{spec}: {found / alone:.2f} of the unpadded sequence"


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 2)], ids=str)
def test_sizes_of_one_are_right(shape):
    compiled = Compiled(Spec().model(N, D))
    for seed in range(3):
        compiled.compare(batch("right", seed, *shape))


class Loop:
    """A step that is compiled once for batches of all shapes."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.spec, self.graphs = Spec(), Graphs()
        self.model = self.spec.model(64, D)
        self.reference = copy.deepcopy(self.model)
        self.run = turbogr_compile.compile(step, on_error="raise", verify="fast", instruments=(self.graphs,))

    def __call__(self, padded: Batch, measured: bool = True) -> float:
        """FLOPs, in those of each sequence alone."""
        expected = outcome(step, self.reference, padded)
        with counted() as found:
            actual = outcome(self.run, self.model, padded)
        assert not differences(expected, actual)
        return found.total / flops_of_sequences(self.spec, padded, D) if measured else 0.0


def test_fifty_batches_of_fifty_shapes_take_two_graphs_and_one_for_single_sequences():
    drawn, loop = random.Random(0), Loop()
    widths, sizes = list(range(2, 52)), [1, 1, *range(2, 50)]
    drawn.shuffle(widths)
    drawn.shuffle(sizes)
    for seed, shape in enumerate(zip(sizes, widths, strict=True)):
        assert loop(batch("right", seed, *shape), measured=shape[0] < 10) <= SLACK, shape
    assert loop.graphs.count <= 3
    assert sum(s.calls for s in turbogr_compile.statistics()) >= 50


@pytest.mark.parametrize(
    ("shapes", "graphs"),
    [
        ([(4, 8), (4, 9), (6, 6), (7, 9), (8, 8), (9, 3)], 3),  # width first, as many sequences as columns later
        ([(4, 8), (3, 8), (5, 8), (9, 8)], 2),  # a width that never changes stays a number
        ([(8, 8), (9, 9), (4, 5), (50, 8)], 2),  # equal sizes are no law
        ([(1, 8), (1, 9), (6, 6), (7, 9), (1, 3)], 3),
    ],
)
def test_few_graphs_take_all_shapes(shapes, graphs):
    loop = Loop()
    for seed, shape in enumerate(shapes):
        assert loop(batch("right", seed, *shape)) <= SLACK, shape
    assert loop.graphs.count == graphs


def test_sizes_that_never_change_stay_numbers():
    loop = Loop()
    for seed in range(3):
        loop(batch("right", seed, 4, 8))
    assert loop.graphs.count == 1
