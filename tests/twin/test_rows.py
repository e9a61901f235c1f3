"""AscendC kernels of rows in the twin: gather_rows, scatter_rows, embedding, embedding_backward."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turbogr_compile.kernels.twin import TwinFault, device, launch, rows
from turbogr_compile.kernels.twin.build import KERNELS, kernels_from

ops = torch.ops.turbogr
CORES = [1, 2, 20, 40, 48]
LENGTHS = [0, 1, 15, 16, 17, 255, 256, 257]
F16, BF16, F32, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64
TOLERANCE = {F16: 2e-3, BF16: 2e-2, F32: 1e-5}  # of the sum of magnitudes


def numbers(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def choice(limit: int, count: int, dtype: torch.dtype = I64, seed: int = 0) -> Tensor:
    return torch.randint(0, limit, (count,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(lengths: list[int], longest: int) -> Tensor:
    """Rows of a padded batch that hold something."""
    return torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)])


def in_order(x: Tensor, rows: Tensor, count: int, skip: int = -1) -> Tensor:
    """What the kernels promise to the bit: floats added in the order of x, rounded once."""
    total = torch.zeros(count, x.shape[1])
    for row, value in zip(rows.tolist(), x.float(), strict=True):
        if row != skip:
            total[row] += value
    return total.to(x.dtype)


def assert_sums(found: Tensor, x: Tensor, rows: Tensor, count: int, skip: int = -1) -> None:
    assert torch.equal(found, in_order(x, rows, count, skip))
    kept = rows != skip
    exact, size = (
        torch.zeros(count, x.shape[1], dtype=torch.float64).index_add_(0, rows[kept].long(), part[kept])
        for part in (x.double(), x.double().abs())
    )
    assert ((found.double() - exact).abs() <= TOLERANCE[x.dtype] * size).all()


# --- gather ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, index, width, cores",
    [
        (F16, I64, 16, 1),
        (F16, I64, 7, 2),
        (F16, I64, 64, 48),
        (BF16, I32, 1, 20),
        (BF16, I32, 32, 40),
        (BF16, I32, 33, 48),
        (F32, I64, 48, 2),
        (F32, I64, 128, 20),
        (F32, I64, 5, 40),
    ],
)
def test_gather(dtype, index, width, cores):
    x = numbers(61, width, dtype=dtype)
    for count in LENGTHS:
        chosen = choice(61, count, index, seed=count)
        assert torch.equal(rows.gather_rows(x, chosen, cores=cores), x[chosen])


@pytest.mark.parametrize("cores", [1, 3])
def test_gather_of_more_numbers_than_are_read_at_once(cores):
    x, runs = numbers(5000, 3), packed([2048, 0, 1500, 17, 1000], 1000)
    chosen = torch.cat([choice(5000, 2100), runs, choice(5000, 50, seed=1)])
    assert torch.equal(rows.gather_rows(x, chosen, cores=cores), x[chosen])


@pytest.mark.parametrize("dtype, width", [(F32, 9216), (F32, 9217), (F32, 20001), (F16, 40003)])
def test_gather_of_rows_that_fit_no_buffer(dtype, width):
    x, chosen = numbers(4, width, dtype=dtype), torch.tensor([1, 2, 3, 3, 0, 1, 2])
    for cores in (1, 5):
        assert torch.equal(rows.gather_rows(x, chosen, cores=cores), x[chosen])


@pytest.mark.parametrize("dtype", [I64, I32, torch.bool, torch.float64])
@pytest.mark.parametrize("rest", [(), (3,), (2, 3), (8,), (0,)])
def test_gather_moves_bytes_of_any_dtype_and_shape(dtype, rest):
    x, chosen = numbers(9, *rest), torch.tensor([8, 0, 0, 1, 2, 7])
    x = x > 0 if dtype is torch.bool else (1e4 * x).to(dtype)
    found = rows.gather_rows(x, chosen, cores=2)
    assert found.dtype == dtype and torch.equal(found, x[chosen])


def test_gather_takes_what_is_not_contiguous():
    x, chosen = numbers(9, 14)[:, ::2], choice(9, 40)[::2]
    assert torch.equal(rows.gather_rows(x, chosen, cores=4), x[chosen])
    assert torch.equal(rows.gather_rows(x.T, chosen[chosen < 7], cores=4), x.T[chosen[chosen < 7]])


@pytest.mark.parametrize("dtype, index, padding", [(F32, I64, -1), (F16, I32, 3)])
@pytest.mark.parametrize("shape", [(), (5,), (0,), (3, 17), (2, 3, 4)])
def test_embedding(dtype, index, padding, shape):
    weight = numbers(50, 48, dtype=dtype)
    ids = torch.randint(0, 50, shape).to(index)
    assert torch.equal(rows.embedding(weight, ids, padding, cores=20), weight[ids.long()])


# --- scatter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, index, width, cores",
    [
        (F32, I64, 16, 1),
        (F32, I64, 33, 20),
        (F32, I64, 128, 48),
        (F16, I32, 1, 2),
        (F16, I32, 48, 40),
        (F16, I32, 64, 20),
        (BF16, I64, 7, 1),
        (BF16, I64, 32, 48),
        (BF16, I64, 64, 2),
    ],
)
def test_scatter(dtype, index, width, cores):
    for entries in LENGTHS:
        for count in (1, 61):
            x, chosen = numbers(entries, width, dtype=dtype), choice(count, entries, index, seed=entries)
            assert_sums(rows.scatter_rows(x, chosen, count, cores=cores), x, chosen, count)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_padding_and_packing_are_inverse(dtype):
    lengths = [0, *LENGTHS, 0, 3, 0]  # empty first, in the middle and last
    chosen, count = packed(lengths, 257).to(I32 if dtype is F16 else I64), 257 * len(lengths)
    x = numbers(len(chosen), 64, dtype=dtype)
    padded = rows.scatter_rows(x, chosen, count, cores=40)
    wanted = x.new_zeros(count, 64)
    wanted[chosen.long()] = x
    assert torch.equal(padded, wanted)
    assert torch.equal(rows.gather_rows(padded, chosen.long(), cores=40), x)


@pytest.mark.parametrize("dtype, index", [(F32, I64), (F16, I32), (BF16, I64)])
def test_cores_change_no_bit(dtype, index):
    x, chosen = numbers(3000, 24, dtype=dtype), choice(700, 3000, index) ** 2 // 700
    sums = [rows.scatter_rows(x, chosen, 700, cores=cores) for cores in CORES]
    asked = chosen.to(I32 if dtype is BF16 else I64)
    found = [rows.gather_rows(sums[0], asked, cores=cores) for cores in CORES]
    assert all(torch.equal(a, sums[0]) for a in sums)
    assert all(torch.equal(a, sums[0][chosen.long()]) for a in found)
    assert_sums(sums[0], x, chosen, 700)


@pytest.mark.parametrize(
    "dtype, index, width, count, cores, hot",
    [
        (F32, I64, 16, 3000, 1, 0.0),  # the list is full: it is started again for fewer rows
        (F32, I64, 16, 3000, 1, 0.8),  # one tile has more entries than a list takes
        (F16, I32, 16, 1500, 3, 0.8),
        (BF16, I64, 3, 2, 48, 0.5),
    ],
)
def test_scatter_of_more_than_a_list_takes(dtype, index, width, count, cores, hot):
    entries = 9001
    x, chosen = numbers(entries, width, dtype=dtype), choice(count, entries, index)
    chosen[numbers(entries, seed=2).abs() < torch.distributions.Normal(0, 1).icdf(torch.tensor(0.5 + hot / 2))] = 1
    assert_sums(rows.scatter_rows(x, chosen, count, cores=cores), x, chosen, count)


@pytest.mark.parametrize("dtype, width", [(F32, 2048), (F32, 4101), (F16, 4097), (BF16, 9000)])
def test_scatter_of_rows_in_pieces(dtype, width):
    index = I32 if dtype is F16 else I64
    x, chosen = numbers(40, width, dtype=dtype), choice(23, 40, index)
    for cores in (1, 4):
        assert_sums(rows.scatter_rows(x, chosen, 23, cores=cores), x, chosen, 23)


def test_scatter_of_other_shapes():
    x, chosen = numbers(6, 2, 3), torch.tensor([4, 0, 0, 4, 4, 1])
    found = rows.scatter_rows(x, chosen, 5, cores=3)
    assert torch.equal(found.view(5, 6), in_order(x.view(6, 6), chosen, 5))
    assert rows.scatter_rows(x[:, :, :0], chosen, 5, cores=3).shape == (5, 2, 0)
    assert rows.scatter_rows(x[:0], chosen[:0], 0, cores=3).shape == (0, 2, 3)
    assert torch.equal(rows.scatter_rows(x[:, 0, 0], chosen, 5, cores=3), found[:, 0, 0])


@pytest.mark.parametrize("dtype, index", [(F32, I64), (BF16, I32)])
@pytest.mark.parametrize("padding", [-1, 0, 7, 60])
def test_embedding_backward(dtype, index, padding):
    ids = torch.randint(0, 61, (3, 85), generator=torch.Generator().manual_seed(3)).to(index)
    ids[0], ids[2, 80:] = max(padding, 0), max(padding, 0)
    grad = numbers(3, 85, 32, dtype=dtype)
    if padding >= 0:
        grad[ids == padding] = float("nan")  # what is skipped is not looked at
    for cores in (1, 40):
        found = rows.embedding_backward(grad, ids, 61, padding, cores=cores)
        assert_sums(found, grad.view(-1, 32), ids.view(-1), 61, padding)
        assert padding < 0 or not found[padding].any()


def test_padding_fills_no_list():
    """All of a padded batch's padding is one row of the table: skipped before it is listed."""
    ids, grad = torch.zeros(20, 400, dtype=I64), numbers(20, 400, 8)
    ids[:, ::50] = choice(90, 160).view(20, 8)
    found = rows.embedding_backward(grad, ids, 90, 0, cores=2)
    assert_sums(found, grad.view(-1, 8), ids.view(-1), 90, 0)


# --- any shape, autograd -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(0, 300),
    st.integers(1, 70),
    st.sampled_from(CORES),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_shape(count, entries, width, cores, ordered, seed):
    chosen = choice(count, entries, seed=seed)
    chosen = chosen.sort().values if ordered else chosen
    x = numbers(entries, width, seed=seed)
    sums = rows.scatter_rows(x, chosen, count, cores=cores)
    assert torch.equal(sums, in_order(x, chosen, count))
    assert torch.equal(rows.gather_rows(sums, chosen, cores=cores), sums[chosen])


def test_gradients_of_rows():
    chosen, weight = choice(31, 90), numbers(90, 20, seed=1)
    x = numbers(31, 20).requires_grad_()
    with device(cores=20) as twin:
        y = ops.gather_rows(x, chosen)
        z = ops.scatter_rows(y * weight, chosen, 40)
        z.square().sum().backward()
    assert twin.ran == ["gather_rows", "scatter_rows", "gather_rows", "scatter_rows"]
    exact = x.detach().double().requires_grad_()
    total = torch.zeros(40, 20).double().index_add(0, chosen, exact[chosen] * weight.double())
    total.square().sum().backward()
    torch.testing.assert_close(z.double(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-4)


def test_gradients_of_embedding():
    ids, weight = choice(50, 120).view(4, 30), numbers(50, 48).requires_grad_()
    with device(cores=40) as twin:
        (ops.embedding(weight, ids, 3) * numbers(4, 30, 48, seed=1)).sum().backward()
    assert twin.ran == ["embedding", "embedding_backward"]
    exact = weight.detach().double().requires_grad_()
    (torch.nn.functional.embedding(ids, exact, padding_idx=3) * numbers(4, 30, 48, seed=1).double()).sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    assert weight.grad.any() and not weight.grad[3].any()


# --- what is wrong is found --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 9])
def test_rows_that_do_not_exist(bad):
    chosen = torch.tensor([0, bad, 3])
    with pytest.raises(IndexError, match="gather_rows"):
        rows.gather_rows(numbers(9, 4), chosen, cores=2)
    with pytest.raises(IndexError, match="embedding"):
        rows.embedding(numbers(9, 4), chosen, -1, cores=2)
    with pytest.raises(IndexError, match="scatter_rows"):
        rows.scatter_rows(numbers(3, 4), chosen, 9, cores=2)
    with pytest.raises(IndexError, match="embedding_backward"):
        rows.embedding_backward(numbers(3, 4), chosen, 9, -1, cores=2)


def test_sums_of_integers_have_no_kernel():
    with pytest.raises(TypeError, match="int64"):
        rows.scatter_rows(torch.ones(3, 4, dtype=I64), torch.tensor([0, 1, 2]), 3, cores=2)


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_the_gather_kernel_reads_nothing_outside(bad):
    x, result = numbers(9, 4), torch.empty(3, 4)
    with pytest.raises(TwinFault, match="gather_rows"):
        gather(x, torch.tensor([0, bad, 3]), result)


@pytest.mark.parametrize("bad", [-1, 9, -(2**31), 2**31 - 1])
def test_the_scatter_kernel_adds_nothing_for_rows_outside(bad):
    x, result = numbers(3, 4), torch.full((9, 4), float("nan"))
    scatter(x, torch.tensor([4, bad, 4]), result)
    assert torch.equal(result, in_order(x[::2], torch.tensor([4, 4]), 9))


def test_every_number_is_written():
    x, chosen = numbers(9, 5), choice(9, 70)
    result = torch.full((70, 5), float("nan"))
    gather(x, chosen, result)
    assert torch.equal(result, x[chosen])
    sums = torch.full((100, 5), float("nan"))
    scatter(result, chosen, sums)
    assert torch.equal(sums, in_order(result, chosen, 100))


def test_rows_of_no_numbers():
    gather(numbers(9, 0), choice(9, 7), torch.empty(7, 0))
    scatter(numbers(7, 0), choice(9, 7), torch.empty(9, 0))


BROKEN = [
    ("gather_rows", "rows_gather.h", "Fence<AscendC::HardEvent::MTE2_S>(pipe_);"),
    ("scatter_rows", "rows_scatter.h", "if (row <= highest) {\n        AscendC::PipeBarrier<PIPE_V>();\n      }"),
    ("scatter_rows", "rows_scatter.h", "Fence<AscendC::HardEvent::V_S>(pipe_);"),
]


@pytest.mark.parametrize("op, header, line", BROKEN, ids=lambda x: x[:24].strip())
def test_a_missing_line_is_found(tmp_path, op, header, line):
    for part in ("common", op):
        shutil.copytree(KERNELS / part, tmp_path / part)
    source = tmp_path / "common" / header
    assert source.read_text().count(line) == 1
    source.write_text(source.read_text().replace(line, ""))
    x, chosen = numbers(3000, 8), torch.cat([torch.tensor([5, 5, 2, 5]), choice(9, 2996)])
    with pytest.raises(TwinFault, match=op), kernels_from(tmp_path):
        if op == "gather_rows":
            gather(x, chosen, torch.empty(3000, 8))
        else:
            scatter(x, chosen, torch.empty(9, 8))


def gather(x: Tensor, chosen: Tensor, result: Tensor) -> None:
    """The kernel alone."""
    problem = rows.GatherProblem(*result.shape, x.element_size(), 2)
    launch("gather_rows", {"X": x.dtype, "ROWS": chosen.dtype}, [x, chosen, result], problem, outputs=1)


def scatter(x: Tensor, chosen: Tensor, result: Tensor) -> None:
    problem = rows.ScatterProblem(x.shape[0], *result.shape, x.element_size(), chosen.element_size(), 2)
    launch("scatter_rows", {"X": x.dtype, "ROWS": chosen.dtype}, [x, chosen, result], problem, outputs=1)
