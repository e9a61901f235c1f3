"""One chain of names from torch to the kernel: each op of kernels/ascendc is spelled the same way in all of its files.

    torch schema  ⇔  <op>.json  ⇔  op_host/<op>_def.cpp (OpDef)  ⇔  op_graph/<op>_proto.h (REG_OP)
                  ⇔  op_kernel/<op>.cpp (entry)  ⇔  torch/adapter.cpp (aclnn call)

Tensors come first, then attributes, each in the order of the schema. CANN and torchair map by position and by name, and
notice nothing where two of these differ: the kernel would read another tensor. So the files are read and compared.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import turbogr_compile.kernels  # noqa: F401  registers the ops

ASCENDC = Path(__file__).resolve().parents[2] / "kernels" / "ascendc"
OPS = sorted(path.parent.parent.name for path in ASCENDC.glob("*/op_host/*_def.cpp"))
ADAPTER = ASCENDC / "torch" / "adapter.cpp"
HONEST = "functionally emulated, not run on an NPU"

# --- where the chain may differ, and why -----------------------------------------------------------------

# Ops whose type in CANN is not the torch op's name in camel case.
TYPES = {
    # aclnnEmbedding is CANN's own, with other arguments, and torch_npu calls it for torch.nn.Embedding. Functions of
    # custom packages are found first, so that a second one of this name would break every model.
    "embedding": "EmbeddingRows",
}
# Arguments whose attribute is of another kind than the schema's.
ATTRIBUTES = {
    "wanted": "Int",  # bool[]: bit i is set where gradient i is asked for
}
# Kinds of the schema, as OpDef, REG_OP and the json name them.
KINDS = {"int": "Int", "float": "Float", "bool": "Bool", "str": "String"}
JSON_KINDS = {"int": "Int", "float": "Float", "bool": "Bool", "string": "String"}
JSON_DTYPES = {
    "float16": "FLOAT16", "fp16": "FLOAT16", "bfloat16": "BF16", "bf16": "BF16", "float": "FLOAT", "float32": "FLOAT",
    "fp32": "FLOAT", "int32": "INT32", "int64": "INT64", "bool": "BOOL", "uint8": "UINT8", "int8": "INT8",
}  # fmt: skip
# Functions that CANN has already: aclnn<Type> of ours must be none of them.
TAKEN = {
    "Embedding", "EmbeddingBag", "EmbeddingDenseBackward", "EmbeddingRenorm", "Gather", "GatherNd", "GatherV2",
    "IndexSelect", "LayerNorm", "LayerNormBackward", "Scatter", "ScatterAdd", "Softmax", "SoftmaxBackward",
}  # fmt: skip


def type_of(op: str) -> str:
    """The op's name in CANN."""
    return TYPES.get(op) or "".join(part.capitalize() for part in op.split("_"))


def snake(name: str) -> str:
    """camelCase or CamelCase in snake case, as CANN's build makes a kernel's name from that of an op."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


# --- an op, as one file tells it --------------------------------------------------------------------------


@dataclass
class Signature:
    """What one link of the chain says of an op; None where it says nothing."""

    type: str | None = None
    inputs: list[str] = field(default_factory=list)
    optional: list[str] | None = None  # those of the inputs that may be absent
    attributes: list[tuple[str, str]] | None = None  # name and kind
    outputs: list[str] | int = 0  # or how many
    dtypes: dict[str, list[str]] = field(default_factory=dict)  # of inputs and outputs, column by column


def of_schema(op: str) -> Signature:
    schema = getattr(torch.ops.turbogr, op).default._schema
    found = Signature(type_of(op), [], [], [])
    for argument in schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            found.inputs.append(argument.name)
            if kind != "Tensor":
                found.optional.append(argument.name)
        else:
            found.attributes.append((argument.name, ATTRIBUTES.get(argument.name) or KINDS[kind]))
    names = [result.name for result in schema.returns]
    found.outputs = names if all(names) and len(names) > 1 else len(names)
    return found


def of_json(folder: Path) -> Signature:
    said = json.loads((folder / f"{folder.name}.json").read_text(encoding="utf-8"))
    (op,) = said if isinstance(said, list) else [said]
    inputs, outputs = op["input_desc"], op["output_desc"]
    for x in (*inputs, *outputs):
        assert len(x["type"]) == len(x["format"]), f"{x['name']}: one format for each type"
    return Signature(
        op["op"],
        [x["name"] for x in inputs],
        [x["name"] for x in inputs if x["param_type"] == "optional"],
        [(x["name"], JSON_KINDS[x["type"]]) for x in op.get("attr", [])],
        [x["name"] for x in outputs],
        {x["name"]: [JSON_DTYPES[dtype] for dtype in x["type"]] for x in (*inputs, *outputs)},
    )


def of_definition(folder: Path) -> Signature:
    text = _code(folder / "op_host" / f"{folder.name}_def.cpp")
    (kind,) = set(re.findall(r"\bclass (\w+) : public (?:ops::)?OpDef\b", text))
    (added,) = re.findall(r"\bOP_ADD\((\w+)\)", text)
    assert kind == added, f"class {kind}, OP_ADD({added})"
    found = Signature(kind, [], [], [], [])
    for what, name, rest in re.findall(r"this->(Input|Output|Attr)\(\s*\"(\w+)\"\s*\)(.*?);", text, re.S):
        if what == "Attr":
            (type_,) = re.findall(r"\.(Int|Float|Bool|String|ListInt|ListBool)\(", rest)
            found.attributes.append((name, type_))
            continue
        (found.inputs if what == "Input" else found.outputs).append(name)
        if re.search(r"\.ParamType\(OPTIONAL\)", rest):
            found.optional.append(name)
        found.dtypes[name] = _dtypes(rest)
    for config in ("ascend910b", "ascend910_93"):
        assert f'AddConfig("{config}"' in text, f"no configuration for {config}"
    return found


def _dtypes(text: str) -> list[str]:
    """Of `.DataType({...})`, or of `.DataType(Function())` where a header of common/ says what the function returns."""
    listed = re.search(r"\.DataType\(\s*(?:\{(?P<here>.*?)\}|(?:\w+::)*(?P<function>\w+)\(\))\s*\)", text, re.S)
    assert listed, f"no list of types in {text.strip()}"
    if listed["here"] is not None:
        return re.findall(r"\bDT_(\w+)", listed["here"])
    headers = "".join(_code(path) for path in sorted((ASCENDC / "common").glob("*.h")))
    bodies = re.findall(rf"ge::DataType> {listed['function']}\(\) \{{(.*?;)\s*\}}", headers, re.S)
    assert len(bodies) == 1, f"{len(bodies)} functions {listed['function']} in common"
    repeated = re.search(r"\((\d+), ge::DT_(\w+)\)", bodies[0])
    return [repeated[2]] * int(repeated[1]) if repeated else re.findall(r"\bDT_(\w+)", bodies[0])


def of_prototype(folder: Path) -> Signature:
    text = _code(folder / "op_graph" / f"{folder.name}_proto.h")
    (body,) = re.findall(r"REG_OP\((.*?)\.OP_END_FACTORY_REG\(", text, re.S)
    (end,) = re.findall(r"\.OP_END_FACTORY_REG\((\w+)\)", text)
    name = body.partition(")")[0].strip()
    assert name == end, f"REG_OP({name}) ends as {end}"
    found = Signature(name, [], [], [], [])
    for what, name, rest in re.findall(r"\.(INPUT|OPTIONAL_INPUT|OUTPUT|ATTR|REQUIRED_ATTR)\((\w+),\s*(\w+)", body):
        if what.endswith("ATTR"):
            found.attributes.append((name, rest))
            continue
        (found.outputs if what == "OUTPUT" else found.inputs).append(name)
        if what == "OPTIONAL_INPUT":
            found.optional.append(name)
    return found


def of_kernel(folder: Path) -> Signature:
    text = _code(folder / "op_kernel" / f"{folder.name}.cpp")
    ((entry, listed),) = re.findall(r'extern "C" __global__ __aicore__ void (\w+)\((.*?)\)', text, re.S)
    parameters = [snake(name) for name in re.findall(r"\bGM_ADDR (\w+)", listed)]
    assert parameters[-2:] == ["workspace", "tiling"], f"the last two of {parameters} must be workspace and tiling"
    definition = of_definition(folder)
    count = len(definition.inputs)
    dtypes = {name.lower() for name in re.findall(r"\bDTYPE_(\w+)", text)}
    unknown = dtypes - {*definition.inputs, *definition.outputs}
    assert not unknown, f"DTYPE_ of {sorted(unknown)}, and there is no such input or output"
    matching = definition.type if entry == snake(definition.type) else f"of kernel {entry}"
    return Signature(matching, parameters[:count], None, None, parameters[count:-2])


def of_adapter(op: str, source: Path) -> Signature:
    """The call of the generated function: inputs, attributes, outputs, under the names they have in the definition."""
    text = _code(source)
    calls = re.findall(rf"EXEC_NPU_CMD_EXT\(\s*aclnn{type_of(op)}\s*,(.*?)\);", text, re.S)
    assert len(calls) == 1, f"{len(calls)} calls of aclnn{type_of(op)}"
    assert f'm.impl("{op}"' in text, "not registered"
    named = [name.strip().rpartition(".")[2] for name in calls[0].split(",")]
    wanted = of_definition(ASCENDC / op)
    inputs, attributes = len(wanted.inputs), len(wanted.attributes)
    kinds = dict(wanted.attributes)
    return Signature(
        type_of(op),
        named[:inputs],
        None,
        [(name, kinds.get(name, "of no attribute")) for name in named[inputs : inputs + attributes]],
        named[inputs + attributes :],
    )


def _code(path: Path) -> str:
    """A source without its comments."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


# --- comparing --------------------------------------------------------------------------------------------


def problems(folder: Path, adapter: Path = ADAPTER) -> list[str]:
    """What is wrong with an op's names, one line each."""
    op = folder.name
    wanted = of_schema(op)
    found: list[str] = []
    if wanted.type in TAKEN:
        found.append(f"type: CANN has an aclnn{wanted.type} of its own")
    links: dict[str, Callable[[], Signature]] = {
        "definition": lambda: of_definition(folder),
        "json": lambda: of_json(folder),
        "prototype": lambda: of_prototype(folder),
        "kernel": lambda: of_kernel(folder),
        "adapter": lambda: of_adapter(op, adapter),
    }
    read: dict[str, Signature] = {}
    for name, link in links.items():
        try:
            read[name] = link()
        except (AssertionError, FileNotFoundError, KeyError, ValueError) as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    for name, said in read.items():
        found += [f"{name}: {what}" for what in _differences(said, wanted)]
    found += _output_problems(read) + _dtype_problems(read)
    readme = folder / "README.md"
    if not readme.exists() or HONEST.lower() not in " ".join(readme.read_text(encoding="utf-8").lower().split()):
        found.append(f"README: must say '{HONEST}'")
    return found


def _differences(said: Signature, wanted: Signature) -> list[str]:
    found = []
    for what in ("type", "inputs", "optional", "attributes"):
        mine, theirs = getattr(said, what), getattr(wanted, what)
        if mine is not None and mine != theirs:
            found.append(f"{what} {mine}, wanted {theirs}")
    names = said.outputs if isinstance(said.outputs, list) else []
    if isinstance(wanted.outputs, list) and names != wanted.outputs:
        found.append(f"outputs {names}, wanted {wanted.outputs}")
    if isinstance(wanted.outputs, int) and len(names) != wanted.outputs:
        found.append(f"outputs {names}, wanted {wanted.outputs} of them")
    return found


def _output_problems(read: dict[str, Signature]) -> list[str]:
    """The schema may leave outputs without names; all others give them the same ones."""
    if "definition" not in read:
        return []
    wanted = read["definition"].outputs
    return [
        f"{name}: outputs {x.outputs}, in the definition {wanted}" for name, x in read.items() if x.outputs != wanted
    ]


def _dtype_problems(read: dict[str, Signature]) -> list[str]:
    """Columns of the dtype tables are combinations, so they are equally many, and the same ones, everywhere."""
    found = []
    for name, said in read.items():
        counts = {len(column) for column in said.dtypes.values()}
        if len(counts) > 1:
            found.append(f"{name}: numbers of types differ: { {k: len(v) for k, v in said.dtypes.items()} }")
    if "definition" in read and "json" in read:
        ours, theirs = read["definition"].dtypes, read["json"].dtypes
        found += [
            f"json: types of {k} {theirs.get(k)}, in the definition {ours[k]}" for k in ours if ours[k] != theirs.get(k)
        ]
    return found


# --- tests ------------------------------------------------------------------------------------------------


def test_there_are_ops() -> None:
    assert {"gather_rows", "scatter_rows", "jagged_attention", "jagged_attention_backward"} <= set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_names_agree(op: str) -> None:
    assert not problems(ASCENDC / op)


def test_every_registration_of_the_adapter_has_an_op() -> None:
    assert sorted(re.findall(r'm\.impl\("(\w+)"', _code(ADAPTER))) == OPS


def test_no_type_is_used_twice() -> None:
    types = [type_of(op) for op in OPS]
    assert len(set(types)) == len(types)


# What was done to a copy of scatter_rows, and what must be said of it. A file of None is the adapter.
DOCTORED: list[tuple[str, str | None, str, str, str]] = [
    ("input renamed", "op_host/scatter_rows_def.cpp", 'Input("rows")', 'Input("row")', "definition: inputs"),
    ("output renamed", "op_host/scatter_rows_def.cpp", 'Output("y")', 'Output("z")', "outputs"),
    ("attribute's kind", "op_host/scatter_rows_def.cpp", ".Int(", ".Float(", "definition: attributes"),
    ("class renamed", "op_host/scatter_rows_def.cpp", "ScatterRows", "ScatterRow", "definition: type"),
    ("chip left out", "op_host/scatter_rows_def.cpp", '"ascend910_93"', '"ascend310p"', "ascend910_93"),
    ("order in the kernel", "op_kernel/scatter_rows.cpp", "x, GM_ADDR rows", "rows, GM_ADDR x", "kernel: inputs"),
    ("entry renamed", "op_kernel/scatter_rows.cpp", "void scatter_rows(", "void scatter(", "kernel: type"),
    ("json's attribute", "scatter_rows.json", '"count"', '"size"', "json: attributes"),
    ("json's type", "scatter_rows.json", '"int64"', '"int32"', "json: types of rows"),
    ("prototype's name", "op_graph/scatter_rows_proto.h", "ScatterRows", "ScatterRow", "prototype: type"),
    ("prototype's attribute", "op_graph/scatter_rows_proto.h", "count, Int", "count, Float", "prototype: attributes"),
    ("README", "README.md", "not run on an NPU", "run on an NPU", "README"),
    ("adapter's call", None, "aclnnScatterRows, x, rows", "aclnnScatterRows, rows, x", "adapter: inputs"),
    ("adapter's name", None, 'm.impl("scatter_rows"', 'm.impl("scatter"', "adapter: AssertionError: not registered"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "said"), [d[1:] for d in DOCTORED], ids=[d[0] for d in DOCTORED])
def test_a_doctored_copy_is_noticed(tmp_path: Path, file: str | None, old: str, new: str, said: str) -> None:
    folder = tmp_path / "scatter_rows"
    shutil.copytree(ASCENDC / folder.name, folder)
    adapter = tmp_path / ADAPTER.name
    shutil.copy(ADAPTER, adapter)
    assert not problems(folder, adapter)
    path = folder / file if file else adapter
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path.name} has no {old!r} to be replaced"
    path.write_text(text.replace(old, new), encoding="utf-8")
    found = problems(folder, adapter)
    assert any(said in line for line in found), found


def test_a_type_of_cann_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TYPES, "embedding")
    assert any("CANN has an aclnnEmbedding" in line for line in problems(ASCENDC / "embedding"))


def test_snake() -> None:
    names: dict[str, Any] = {"GatherRows": "gather_rows", "queryOffsets": "query_offsets", "x": "x"}
    assert {name: snake(name) for name in names} == names
