"""A graph as a small Python file that runs the same passes again."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..graph.phases import Phase
from ..pipeline.instrument import GraphRun
from ..registry import PACKAGE

SMALL = 64  # constants up to this many values are written out

TEMPLATE = '''"""The graph {name} as it reached phase {phase}; run this file to run its passes again."""

import torch
from torch import device, inf, nan  # noqa: F401

import turbogr_compile
{imports}
PIPELINE = {pipeline!r}

{source}

def graph_inputs():
    """Made from the shapes the compiler saw; floats random, integers zero."""
    torch.manual_seed(0)
    return [
{inputs}    ]


if __name__ == "__main__":
    report = turbogr_compile.replay(
        graph, graph_inputs(), pipeline=PIPELINE, phase={phase!r}, role={role!r}, verify="strict"
    )
    print(report)
'''


def repro_source(run: GraphRun) -> str:
    """Text of repro.py for the graph as it stands."""
    items = run.pipeline.ordered(run.phase)
    return TEMPLATE.format(
        imports=_imports(run), name=run.name, phase=run.phase.value, role=run.role.value,
        pipeline=", ".join(i.spec for i in items),
        source=function_source(run.module), inputs="".join(f"        {text},\n" for text in _inputs(run)),
    )  # fmt: skip


def _imports(run: GraphRun) -> str:
    """Passes from outside of turbogr are known only once their module is imported."""
    modules = sorted({type(p).__module__ for p in run.pipeline.passes() if p.phase is run.phase})
    lines = []
    for name in (m for m in modules if m.split(".")[0] != PACKAGE):
        # A pass of the main program has no module to import.
        lines.append(f"import {name}  # noqa: F401" if name != "__main__" else "# import your passes here")
    return "".join(f"{line}\n" for line in lines)


def function_source(module: fx.GraphModule) -> str:
    """The graph as a plain function named `graph`."""
    graph = _torch.copy_graph(module.graph)
    graph.set_codegen(fx.graph.CodeGen())  # AOTAutograd's joint graphs take their inputs in nested tuples
    code = graph.python_code("constants", verbose=False)
    body = re.sub(r"^def forward\(self(, )?", "def graph(", code.src.strip(), count=1)
    names = sorted({str(n.target) for n in module.graph.nodes if n.op == "get_attr"})
    return (_constants(module, names) + body).strip() + "\n"


def _constants(module: fx.GraphModule, names: list[str]) -> str:
    if not names:
        return ""
    lines = []
    for name in names:
        value = module
        for part in name.split("."):
            value = getattr(value, part)
        lines.append(f"    {name.replace('.', '_')} = {_constant(value)}\n")
    return "class constants:\n" + "".join(lines) + "\n\n"


def _constant(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "None"
    if value.numel() <= SMALL:
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    return f"torch.zeros({list(value.shape)}, dtype={value.dtype})  # values left out"


def _inputs(run: GraphRun) -> list[str]:
    values = [n.meta.get("val") for n in run.graph.find_nodes(op="placeholder")]
    given = [*(run.inputs or ()), *values][: len(values)]
    trained = [isinstance(x, torch.Tensor) and x.requires_grad and run.phase is Phase.PRE_GRAD for x in given]
    return [_make(v, t) for v, t in zip(values, trained, strict=True)]


def _make(value: Any, trained: bool) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [_number(s) for s in value.shape]
        if value.dtype.is_floating_point:
            return f"torch.randn({sizes}).to({value.dtype})" + (".requires_grad_()" if trained else "")
        return f"torch.zeros({sizes}, dtype={value.dtype})"
    return str(_number(value)) if isinstance(value, (int, torch.SymInt)) else repr(value)


def _number(size: Any) -> int:
    """A size the compiler saw; two where it is known only at run time."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 2
