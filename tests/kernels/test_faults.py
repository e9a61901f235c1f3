"""Memory that runs out inside of a kernel: a MemoryError, inputs as they were, and the next call right.

A library of its own is built, in which the n-th allocation fails; every allocation of every op is failed in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .layouts import COMPILED

PROGRAM = """
import ctypes, sys, torch
from concurrent.futures import ThreadPoolExecutor
import turbogr_compile.kernels
from turbogr_compile.kernels.cpu.build import library
ops, threads = torch.ops.turbogr, int(sys.argv[1])
torch.set_num_threads(threads)
kernels = library(torch.float32)
kernels.turbogr_fail_after.argtypes = [ctypes.c_int64]

def numbers(*size):
    return torch.randn(size, generator=torch.Generator().manual_seed(0))

def ids(*size, below=40):
    return torch.randint(below, size, generator=torch.Generator().manual_seed(1))

def attention(backward):
    rows, table = torch.arange(400), numbers(4, 799)
    offsets = torch.tensor([0, 300, 400])
    given = [numbers(400, 4, 16), numbers(400, 2, 16), numbers(400, 2, 16), offsets, offsets, rows, rows, None, None,
             numbers(1, 1, 400, 400), table, None, None, None, None, None, "softmax", 1.0, 1.0, 0, 999, 0.0,
             numbers(4), 0.0]
    if not backward:
        return ops.jagged_attention, given
    result, log_sum = ops.jagged_attention(*given)
    wanted = [True, True, True, False, True, False, True]
    return ops.jagged_attention_backward, [numbers(400, 4, 16), result, log_sum, *given, wanted]

def loss(group, kind, many=64):
    wide = [numbers(many, 32), numbers(40, 32), ids(many), ids(many, 20), None]
    return ops.sampled_loss_ahead, [*wide, 1.0, 0.1, -9.0, group, kind, [True, True]]

x = numbers(4000, 33)
CALLS = {
    "gather_rows": (ops.gather_rows, [x, ids(9000, below=4000)]),
    "scatter_rows": (ops.scatter_rows, [x, ids(4000), 40]),
    "coalesce_rows": (ops.coalesce_rows, [x, ids(4000)]),
    "embedding_backward": (ops.embedding_backward, [x, ids(4000), 40, 3]),
    "segment_softmax": (ops.segment_softmax, [x, torch.tensor([0, 900, 4000])]),
    "segment_softmax_backward": (ops.segment_softmax_backward, [x, x, torch.tensor([0, 900, 4000])]),
    "norm_gate": (ops.norm_gate, [x, x, numbers(33), numbers(33), 1e-5]),
    "norm_gate_backward": (ops.norm_gate_backward,
        [x, x, x, numbers(33), numbers(33), x[:, 0].contiguous(), x[:, 1].contiguous(), [True] * 4]),
    "silu_split": (ops.silu_split, [x, [3, 30]]),
    "lookup_dot": (ops.lookup_dot, [numbers(64, 32), numbers(40, 32), ids(64, 20), 0.1]),
    "lookup_dot_backward": (ops.lookup_dot_backward,
        [numbers(64, 20), numbers(64, 32), numbers(40, 32), ids(64, 20), 0.1, [True, True]]),
    "table_gradient": (ops.lookup_table_gradient,
        [numbers(64 * 20, 4), numbers(64), numbers(64, 32), numbers(40, 32), ids(64, 20), ids(64), 4, 0.1]),
    "table_gradient, wide": (ops.lookup_table_gradient,
        [numbers(64 * 200, 4), numbers(64), numbers(64, 32), numbers(40, 32), ids(64, 200), ids(64), 4, -1.0]),
    "linear_cross_entropy": (ops.linear_cross_entropy_ahead,
        [numbers(300, 16), numbers(50, 16), numbers(50), ids(300), None, 1.0, -100, 0.1, False, [True] * 3]),
    "loss of positions": loss(1, "softmax"),
    "loss of groups": loss(4, "softmax"),
    "binary loss of groups": loss(4, "bce"),
    "attention": attention(False),
    "attention backward": attention(True),
}

def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)

def attempt(op, given, n):
    # Whether nothing failed when the n-th allocation was to fail, and what the next call gives.
    torch.set_num_threads(threads)
    kernels.turbogr_fail_after(n)
    try:
        op(*given)
        ended = True
    except MemoryError:
        ended = False
    kernels.turbogr_fail_after(-1)
    return ended, tensors(op(*given))

sites = 0
for name, (op, given) in CALLS.items():
    before = [g.clone() if isinstance(g, torch.Tensor) else g for g in given]
    wanted = tensors(op(*given))
    n, ended = 0, False
    while not ended:
        # Memory that threads keep is allocated again in a new one.
        with ThreadPoolExecutor(1) as new:
            ended, found = new.submit(attempt, op, given, n).result()
        for a, b in zip(given, before, strict=True):
            assert not isinstance(a, torch.Tensor) or torch.equal(a, b), (name, n)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b), (name, n)
        n += not ended
        assert n < 5000, name
    print(name, n)
    sites += n
print(f"{sites} allocations failed")
assert sites >= 100, sites
"""


@COMPILED
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_every_allocation_may_fail(tmp_path, threads):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TURBOGR_SANITIZE": "faults", "TURBOGR_KERNELS": "required"}
    done = subprocess.run(
        [sys.executable, str(program), str(threads)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)


LIMITED = """
import resource, torch
import turbogr_compile.kernels
ops = torch.ops.turbogr
x, rows = torch.zeros(3_000_000, 1), torch.zeros(3_000_000).long()
result = ops.scatter_rows(x[:9], rows[:9], 4)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20), resource.RLIM_INFINITY))
try:
    ops.scatter_rows(x, rows, 4)
except MemoryError as error:
    print("MemoryError:", error)
assert torch.equal(ops.scatter_rows(x[:9], rows[:9], 4), result)
"""


@COMPILED
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit of memory")
@pytest.mark.skipif("TURBOGR_SANITIZE" in os.environ, reason="the sanitizer itself wants the memory")
def test_a_limit_of_memory_is_an_error():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert "MemoryError: there is not enough of it" in done.stdout
