"""The adapter for torch_npu, compiled against a stand-in for torch_npu's header and run on CPU tensors.

The stand-in hands each aclnn call to Python, which looks at the arguments as CANN would (dtypes that the definition
lists together, contiguous tensors, the right number of everything) and computes the outputs with the op's reference. So
what the adapter prepares, allocates and converts back is exercised; the kernels are not, and neither is torch_npu.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

from turbogr_compile.kernels.jagged_attention import Inputs

from .test_ascendc_names import ADAPTER, ASCENDC, OPS, of_definition, of_json, of_schema, type_of

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs g++")
ops = torch.ops.turbogr
NPU = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

HEADER = """
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace stand_in {

inline void add(c10::List<std::optional<at::Tensor>>& tensors, std::string& kinds, std::vector<double>& numbers,
                std::string& text, const std::optional<at::Tensor>& x) {
  tensors.push_back(x);
  kinds += 't';
}
template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
void add(c10::List<std::optional<at::Tensor>>& tensors, std::string& kinds, std::vector<double>& numbers,
         std::string& text, Number x) {
  numbers.push_back(static_cast<double>(x));
  kinds += std::is_same_v<Number, int64_t> ? 'i' : std::is_same_v<Number, bool> ? 'b' : 'f';
}
inline void add(c10::List<std::optional<at::Tensor>>& tensors, std::string& kinds, std::vector<double>& numbers,
                std::string& text, char* x) {
  text = x;
  kinds += 's';
}

// Arguments are lvalues, as torch_npu's macro asks for.
template <typename... Arguments>
void call(const char* api, Arguments&... arguments) {
  c10::List<std::optional<at::Tensor>> tensors;
  std::string kinds, text;
  std::vector<double> numbers;
  (add(tensors, kinds, numbers, text, arguments), ...);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("turbogr_stand_in::call", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, std::string(api), kinds, tensors, numbers, text);
  op.callBoxed(&stack);
}

}  // namespace stand_in

#define EXEC_NPU_CMD_EXT(api, ...) stand_in::call(#api, __VA_ARGS__)
"""


class Cann:
    """What stands in for CANN: the calls it got, each computed by the op's reference."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, api: str, kinds: str, tensors: list[Tensor | None], numbers: list[float], text: str) -> None:
        (op,) = [op for op in OPS if f"aclnn{type_of(op)}" == api]
        self.calls.append(op)
        definition, left, figures = of_definition(ASCENDC / op), iter(tensors), iter(numbers)
        takes = {"Int": "i", "Float": "f", "Bool": "b", "String": "s"}
        names = [*definition.inputs, *(name for name, _ in definition.attributes), *definition.outputs]
        wanted = ["t"] * len(definition.inputs) + [takes[kind] for _, kind in definition.attributes]
        assert kinds == "".join([*wanted, *"t" * len(definition.outputs)])
        values = [next(left) if kind == "t" else text if kind == "s" else next(figures) for kind in kinds]
        given = dict(zip(names, values, strict=True))
        self._check(op, {name: x for name, x in given.items() if isinstance(x, Tensor)}, definition.optional)
        found = getattr(ops, op)(*_as_schema(op, given))
        for name, result in zip(definition.outputs, found if isinstance(found, tuple) else (found,), strict=True):
            # The gradient of a bias may be left for the adapter to add up.
            assert given[name].shape == result.shape or name == "bias_grad", f"{op}: {name}"
            given[name].zero_()[tuple(slice(size) for size in result.shape)] = result

    def _check(self, op: str, tensors: dict[str, Tensor], optional: list[str]) -> None:
        """All tensors contiguous, none absent that must be there, dtypes of one column of the definition's lists."""
        columns = of_json(ASCENDC / op).dtypes
        assert set(columns) - set(tensors) <= set(optional), f"{op}: absent"
        assert all(x.is_contiguous() for x in tensors.values()), f"{op}: not contiguous"
        rows = [
            all(DTYPES[kinds[i]] == tensors[name].dtype for name, kinds in columns.items() if name in tensors)
            for i in range(len(next(iter(columns.values()))))
        ]
        assert any(rows), f"{op}: no kernel for { {name: x.dtype for name, x in tensors.items()} }"


DTYPES = {
    "FLOAT16": torch.float16, "BF16": torch.bfloat16, "FLOAT": torch.float32, "INT32": torch.int32,
    "INT64": torch.int64, "BOOL": torch.bool, "UINT8": torch.uint8, "INT8": torch.int8,
}  # fmt: skip


def _as_schema(op: str, given: dict[str, Any]) -> list[Any]:
    """Arguments of the torch op: kernels take masks and numbers of 32 bits where the op has flags and 64 bits."""
    arguments: list[Any] = []
    for argument in getattr(ops, op).default._schema.arguments:
        value = given[argument.name]
        if argument.name == "wanted":
            value = [bool(int(value) >> bit & 1) for bit in range(len(of_schema(op).inputs))][: _gradients(op)]
        elif isinstance(value, Tensor) and value.dtype == torch.int32:
            value = value.long()
        elif str(argument.type) == "int":
            value = int(value)
        arguments.append(value)
    return arguments


def _gradients(op: str) -> int:
    return len(getattr(ops, op).default._schema.returns)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cann]:
    """The adapter, loaded; torch refuses a kernel whose arguments are not those of the schema."""
    folder, cann = tmp_path_factory.mktemp("adapter"), Cann()
    (folder / "npu_cpp_extension.h").write_text(HEADER)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    include = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    include += [f"-I{ASCENDC / 'common'}", f"-I{ASCENDC.parent / 'twin' / 'include'}"]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch", "-ltorch_cpu"]
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas", abi]
    command = [
        str(COMPILER),
        *flags,
        f"-I{folder}",
        *include,
        str(ADAPTER),
        "-o",
        str(folder / "adapter.so"),
        *libraries,
    ]
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=kept)
    with torch.library._scoped_library("turbogr_stand_in", "DEF") as own:
        own.define("call(str api, str kinds, Tensor?[] tensors, float[] numbers, str text) -> ()")
        own.impl("call", cann.call, "CompositeExplicitAutograd")
        torch.ops.load_library(folder / "adapter.so")
        yield cann


@pytest.fixture
def cann(adapter: Cann) -> Cann:
    adapter.calls.clear()
    return adapter


def on_npu(op: str, *arguments: Any) -> Any:
    """What the adapter computes, as if the tensors were on an NPU."""
    return getattr(ops, op).default.redispatch(NPU, *arguments)


def check(op: str, *arguments: Any) -> Any:
    """The adapter's results are the reference's: shapes, dtypes and, since the reference computes both, numbers."""
    found, wanted = on_npu(op, *arguments), getattr(ops, op)(*arguments)
    for mine, theirs in zip(*([x] if isinstance(x, Tensor) else x for x in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    return found


# --- rows --------------------------------------------------------------------------------------------


REALS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OTHERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", [*REALS, *OTHERS])
@pytest.mark.parametrize("shape", [(5, 3), (5,), (5, 2, 7)], ids=str)
def test_gather_rows(cann: Cann, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.arange(-20, -20 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    check("gather_rows", x, torch.tensor([4, 0, 0, 2]))
    assert cann.calls == ["gather_rows"]


def test_rows_at_any_stride(cann: Cann) -> None:
    x = torch.randn(6, 5).t()
    check("gather_rows", x, torch.tensor([4, 1, 0, 0])[::2])
    check("scatter_rows", x, torch.tensor([4, 1, 0, 0, 3]), 6)
    check("embedding", x, torch.tensor([[4, 1], [0, 0]]).t(), -1)
    check("embedding_backward", torch.randn(4, 3, 2).transpose(0, 1), torch.randint(5, (4, 3)).t(), 5, 2)
    assert cann.calls == ["gather_rows", "scatter_rows", "embedding", "embedding_backward"]


def test_rows_that_are_not_there(cann: Cann) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    check("gather_rows", torch.randn(3, 4), none)
    check("gather_rows", torch.randn(3, 0), torch.tensor([1]))
    check("scatter_rows", torch.randn(0, 4), none, 3)
    check("scatter_rows", torch.randn(0, 4), none, 0)
    check("embedding", torch.randn(3, 4), none.view(0, 2), -1)
    check("embedding_backward", torch.randn(0, 4), none, 3, -1)
    assert cann.calls == []


def test_ids_of_32_bits(cann: Cann) -> None:
    ids = torch.tensor([[1, 2], [0, 1]], dtype=torch.int32)
    check("embedding", torch.randn(3, 4), ids, 0)
    check("embedding_backward", torch.randn(2, 2, 4), ids, 3, 0)
    assert cann.calls == ["embedding", "embedding_backward"]


def test_what_a_kernel_does_not_take_goes_to_the_reference(cann: Cann, capfd: pytest.CaptureFixture[str]) -> None:
    """And torch says so, once."""
    for _ in range(2):
        check("scatter_rows", torch.randn(3, 4, dtype=torch.float64), torch.tensor([1, 1, 0]), 2)
        check("embedding_backward", torch.randn(3, 4, dtype=torch.float64), torch.tensor([1, 1, 0]), 2, -1)
    assert cann.calls == []
    said = capfd.readouterr().err
    for op in ("scatter_rows", "embedding_backward"):
        text = f"turbogr::{op}: the slower reference runs instead of the AscendC kernel, which takes no Double"
        assert said.count(text) == 1


# --- norm_gate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectors", ["both", "weight", "bias", "none", "wider"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_gate(cann: Cann, dtype: torch.dtype, vectors: str) -> None:
    x, gate, grad = torch.randn(3, 2, 5, 24, dtype=dtype).unbind()
    vector = torch.float32 if vectors == "wider" else dtype
    weight = torch.randn(24, dtype=vector) if vectors in ("both", "weight", "wider") else None
    bias = torch.randn(24, dtype=dtype) if vectors in ("both", "bias", "wider") else None
    _, mean, rstd = check("norm_gate", x, gate.transpose(0, 1).contiguous().transpose(0, 1), weight, bias, 1e-5)
    for wanted in ([True] * 4, [False] * 4, [True, False, True, False], [False, True, False, True]):
        check("norm_gate_backward", grad, x, gate, weight, bias, mean, rstd, wanted)
    assert cann.calls == ["norm_gate", *["norm_gate_backward"] * 4]


def test_norm_gate_of_no_rows(cann: Cann) -> None:
    x, weight = torch.randn(0, 8), torch.randn(8)
    _, mean, rstd = check("norm_gate", x, x, weight, weight, 1e-5)
    check("norm_gate_backward", x, x, x, weight, weight, mean, rstd, [True] * 4)
    assert cann.calls == []


@pytest.mark.parametrize(("width", "dtype"), [(8193, torch.float32), (8, torch.float64)])
def test_norm_gate_by_reference(cann: Cann, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, width, dtype=dtype)
    _, mean, rstd = check("norm_gate", x, x, None, None, 1e-5)
    check("norm_gate_backward", x, x, x, None, None, mean, rstd, [True] * 4)
    assert cann.calls == []


# --- sampled_softmax ---------------------------------------------------------------------------------


def softmax_inputs(dtype: torch.dtype, width: int = 32, ids: bool = True, scales: bool = True) -> list[Any]:
    numbers = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 4, 7])
    query, positive, negative = torch.randn(6, width), torch.randn(6, width), torch.randn(7, width)
    return [
        *(x.to(dtype) for x in (query, positive, negative)), *numbers,
        torch.randint(4, (6,)) if ids else None, torch.randint(4, (7,)) if ids else None,
        torch.tensor([1.0, 2.0, 0.5]) if scales else None, 0.25,
    ]  # fmt: skip


@pytest.mark.parametrize("extras", [(True, True), (False, False), (True, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sampled_softmax(cann: Cann, dtype: torch.dtype, extras: tuple[bool, bool]) -> None:
    arguments = softmax_inputs(dtype, 32, *extras)
    arguments[2] = torch.stack([arguments[2]] * 2, -1)[..., 1]  # at a stride
    loss, log_sum = check("sampled_softmax", *arguments)
    for wanted in ([True] * 3, [False] * 3, [False, True, False], [True, False, True]):
        check("sampled_softmax_backward", loss, log_sum, *arguments, wanted)
    assert cann.calls == ["sampled_softmax", *["sampled_softmax_backward"] * 4]


@pytest.mark.parametrize(("width", "dtype"), [(20, torch.float16), (528, torch.float32), (32, torch.float64)])
def test_sampled_softmax_by_reference(cann: Cann, width: int, dtype: torch.dtype) -> None:
    arguments = softmax_inputs(dtype, width)
    loss, log_sum = check("sampled_softmax", *arguments)
    check("sampled_softmax_backward", loss, log_sum, *arguments, [True] * 3)
    assert cann.calls == []


# --- jagged_attention --------------------------------------------------------------------------------


def attention_inputs(dtype: torch.dtype = torch.float32, activation: str = "silu", **others: Any) -> list[Any]:
    """3 sequences, one of them empty, and a row that belongs to none."""
    rows, heads, groups, depth = 8, 4, 2, 16
    offsets = torch.tensor([0, 3, 3, 7])
    columns = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0])
    given = Inputs(
        query=torch.randn(rows, heads, depth).to(dtype),
        key=torch.randn(groups, rows, depth).to(dtype).transpose(0, 1),
        value=torch.randn(rows, groups, 2 * depth).to(dtype)[..., ::2],
        query_offsets=offsets, key_offsets=offsets, query_columns=columns, key_columns=columns,
        key_valid=None, pair_mask=None, bias=None, position_bias=None, time_bias=None, time_bounds=None,
        query_times=None, key_times=None, dropout_seed=None, activation=activation, scale=0.25, post_scale=0.5,
        min_distance=0, max_distance=1 << 40, dropout=0.0,
    )  # fmt: skip
    return list(given._replace(**others))


def biases(dtype: torch.dtype) -> dict[str, Any]:
    times = torch.tensor([5, 9, 40, 1 << 40, (1 << 40) + 7, (1 << 40) + 8, 1 << 60, 3])
    return {
        "position_bias": torch.randn(4, 9).to(dtype), "time_bias": torch.randn(1, 4).to(dtype),
        "time_bounds": torch.tensor([2, 8, 1 << 20]), "query_times": times, "key_times": times,
        "key_valid": torch.tensor([1, 0, 1, 1, 1, 1, 0, 1]).bool(),
    }  # fmt: skip


WANTED = (
    [True] * 7,
    [True, True, True, False, False, False, False],
    [False, False, True, False, False, True, False],
    [False] * 7,
)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_jagged_attention(cann: Cann, dtype: torch.dtype, activation: str, biased: bool) -> None:
    arguments = attention_inputs(dtype, activation, **(biases(dtype) if biased else {}))
    result, log_sum = check("jagged_attention", *arguments)
    grad = torch.randn_like(result)
    for wanted in WANTED:
        check("jagged_attention_backward", grad, result, log_sum, *arguments, wanted)
    assert cann.calls == ["jagged_attention", *["jagged_attention_backward"] * 3]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("given", ["bias", "mask", "both", "small bias"])
def test_attention_with_a_bias_of_pairs(cann: Cann, given: str, deterministic: bool) -> None:
    """Sums over what a bias is shared by may be left to the adapter."""
    others: dict[str, Any] = {}
    if given in ("bias", "both"):
        others["bias"] = torch.randn(3, 1, 4, 4, dtype=torch.float16)
    if given == "small bias":
        others["bias"] = torch.randn(1, 4, 1, 4)
    if given in ("mask", "both"):
        others["pair_mask"] = torch.rand(1, 4, 4, 4) < 0.7
    arguments = attention_inputs(torch.float16, "softmax", **others)
    try:
        torch.use_deterministic_algorithms(deterministic)
        result, log_sum = check("jagged_attention", *arguments)
        for wanted in WANTED:
            check("jagged_attention_backward", torch.randn_like(result), result, log_sum, *arguments, wanted)
    finally:
        torch.use_deterministic_algorithms(False)
    assert cann.calls == ["jagged_attention", *["jagged_attention_backward"] * 3]


def test_attention_with_dropout(cann: Cann) -> None:
    arguments = attention_inputs(dropout=0.5, dropout_seed=torch.tensor([7]))
    result, log_sum = check("jagged_attention", *arguments)
    check("jagged_attention_backward", result, result, log_sum, *arguments, [True] * 7)
    assert cann.calls == ["jagged_attention", "jagged_attention_backward"]


def test_attention_with_nothing_to_see(cann: Cann) -> None:
    none = torch.zeros(2, dtype=torch.int64)
    empty = {"key": torch.randn(0, 2, 16), "value": torch.randn(0, 2, 16), "key_columns": none[:0], "key_offsets": none}
    arguments = attention_inputs(query_offsets=torch.tensor([0, 8]), activation="softmax", **empty)
    result, log_sum = check("jagged_attention", *arguments)
    check("jagged_attention_backward", result, result, log_sum, *arguments, [True] * 7)
    assert cann.calls == []


@pytest.mark.parametrize(
    "others",
    [
        {"bias": torch.randn(1, 4, 4, 1)},
        {"pair_mask": torch.rand(1, 4, 4, 1) < 0.7},
        {"query": torch.randn(8, 4, 528), "key": torch.randn(8, 2, 528)},
        {"activation": "softmax", "sink": torch.randn(4)},
        {"score_cap": 0.5},
        {"activation": "sigmoid"},
        {"activation": "squared_relu"},
    ],
    ids=["bias shared by keys", "mask shared by keys", "depth", "sink", "cap", "sigmoid", "squared_relu"],
)
def test_attention_by_reference(cann: Cann, others: dict[str, Any]) -> None:
    arguments = attention_inputs(**others)
    result, log_sum = check("jagged_attention", *arguments)
    check("jagged_attention_backward", result, result, log_sum, *arguments, [True] * 7)
    assert cann.calls == []


# --- sizes that do not fit ---------------------------------------------------------------------------

ROWS, X = torch.tensor([1, 0]), torch.randn(2, 32)
WRONG: list[tuple[str, list[Any]]] = [
    ("gather_rows", [X, ROWS.view(1, 2)]),
    ("scatter_rows", [X, torch.tensor([1]), 3]),
    ("scatter_rows", [X, ROWS, -1]),
    ("embedding", [torch.randn(3), ROWS, -1]),
    ("embedding", [X, ROWS, 2]),
    ("embedding_backward", [torch.randn(3, 32), ROWS, 2, -1]),
    ("norm_gate", [X, X[:1], None, None, 1e-5]),
    ("norm_gate", [X, X.half(), None, None, 1e-5]),
    ("norm_gate", [X, X, torch.randn(31), None, 1e-5]),
    ("norm_gate_backward", [X[:1], X, X, None, None, torch.ones(2), torch.ones(2), [True] * 4]),
    ("norm_gate_backward", [X, X, X, None, None, torch.ones(1), torch.ones(2), [True] * 4]),
    ("sampled_softmax", [X, X[:1], X, ROWS, ROWS, None, None, None, 1.0]),
    ("sampled_softmax", [X, X, X[:, :16], ROWS, ROWS, None, None, None, 1.0]),
    ("sampled_softmax", [X, X, X, ROWS, ROWS[:1], None, None, None, 1.0]),
    ("sampled_softmax", [X, X, X, ROWS, ROWS, ROWS, None, None, 1.0]),
    ("sampled_softmax", [X, X, X, ROWS, ROWS, None, None, torch.ones(2), 1.0]),
    ("jagged_attention", attention_inputs(key=torch.randn(8, 2, 15))),
    ("jagged_attention", attention_inputs(key_offsets=torch.tensor([0, 8]))),
    ("jagged_attention", attention_inputs(query_columns=torch.arange(7))),
    ("jagged_attention", attention_inputs(key_valid=torch.ones(7, dtype=torch.bool))),
    ("jagged_attention", attention_inputs(bias=torch.randn(2, 1, 4, 4))),
    ("jagged_attention", attention_inputs(position_bias=torch.randn(4, 8))),
    ("jagged_attention", attention_inputs(time_bias=torch.randn(4, 8))),
    ("jagged_attention", attention_inputs(activation="relu")),
    ("jagged_attention", attention_inputs(activation="softmax", sink=torch.randn(3))),
    ("jagged_attention", attention_inputs(activation="silu", sink=torch.randn(4))),
    ("jagged_attention", attention_inputs(score_cap=-1.0)),
]


@pytest.mark.parametrize(("op", "arguments"), WRONG)
def test_sizes_that_do_not_fit_are_refused(cann: Cann, op: str, arguments: list[Any]) -> None:
    """As the reference refuses them: a kernel would read what is not there."""
    with pytest.raises(ValueError):
        getattr(ops, op)(*arguments)
    with pytest.raises(ValueError, match=f"^{op}"):
        on_npu(op, *arguments)
    assert cann.calls == []
