"""One GE operator as a graph of its own: built by torchair's raw ops, checked and run by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from turbogr_compile.lowering.ge import graph
from turbogr_compile.lowering.ge.dtypes import attribute_number
from turbogr_compile.lowering.ge.interpreter import Interpreter
from turbogr_compile.lowering.torchair import load as torchair


def build(op: str, inputs: Sequence[Any], expected: Sequence[torch.Tensor | None], attributes: dict[str, Any]) -> Any:
    """The protobuf. Tensors become inputs, None an input that is not fed; a dtype becomes GE's number for it."""
    torchair.simulated()
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge._ge_graph import GeGraph

    count = 0

    def data(value: Any) -> Any:
        nonlocal count
        if isinstance(value, list):
            return [data(v) for v in value]
        if value is None:
            return None
        count += 1
        number, shape = attribute_number(value.dtype), list(value.shape)
        return ge.Data(index=count - 1, dtype=number, shape=shape, placement="CPU", node_name=f"in{count - 1}")

    made = GeGraph(name="one")
    with made:
        numbers = {k: attribute_number(v) if isinstance(v, torch.dtype) else v for k, v in attributes.items()}
        outputs = getattr(ge, op)(*[data(value) for value in inputs], **numbers)
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        kept = []
        for output, wanted in zip(outputs, expected, strict=True):
            if wanted is not None:
                output.set_meta(wanted)
                kept.append(output)
        ge.NetOutput(kept)
    return made._proto


def run(
    op: str, inputs: Sequence[Any], expected: Sequence[torch.Tensor | None], attributes: dict[str, Any]
) -> list[torch.Tensor]:
    interpreter = Interpreter(graph.from_proto(build(op, inputs, expected, attributes)))
    flat = [t for value in inputs for t in (value if isinstance(value, list) else [value]) if t is not None]
    results = interpreter.run(flat)
    assert not interpreter.doubts, interpreter.doubts
    return results
