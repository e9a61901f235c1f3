"""Keep `meta["val"]` true after a pass, without asking the pass to."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from .. import _torch
from ..errors import VerifyError
from .provenance import line_of
from .shapes import expression

Signature = tuple[Any, tuple[Any, ...], dict[str, Any]]


def signatures(graph: fx.Graph) -> dict[fx.Node, Signature]:
    """What each node computes from, to find the nodes a pass touched."""
    return {n: (n.target, n.args, dict(n.kwargs)) for n in graph.nodes}


def refresh(module: fx.GraphModule, before: dict[fx.Node, Signature]) -> list[fx.Node]:
    """Recompute fake values along the dirty frontier; returns the nodes whose value was recomputed.

    A node is dirty when it is new, when its target or arguments changed, or when the shape, stride, dtype
    or device of an input changed. The walk stops where a recomputed value describes the same tensor.
    """
    mode = _torch.fake_mode_of(module.graph)
    if mode is None:
        return []
    prop = FakeTensorProp(module, mode)
    moved: set[fx.Node] = set()
    done = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        touched = before.get(node) != (node.target, node.args, dict(node.kwargs))
        if not touched and not any(n in moved for n in node.all_input_nodes):
            continue
        old = node.meta.get("val")
        node.meta["val"] = _recompute(prop, mode, node)
        done.append(node)
        if not same_tensor(old, node.meta["val"]):
            moved.add(node)
    _define_counts(module.graph)
    return done


def _define_counts(graph: fx.Graph) -> None:
    """Of picks by one mask the first defines their number; where a pass took it away, the next one does."""
    counting = [n for n in graph.nodes if n.op == "call_function" and _counts_what_it_reads(n)]
    if not counting:
        return
    known = {u for n in graph.nodes if n.op == "placeholder" for u in _unbacked(n.meta.get("val"))}
    known |= {u for n in graph.nodes for u in n.meta.get("unbacked_bindings") or ()}
    for node in counting:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else ()
        found = {
            u: _torch.path_of_size(dim)
            for dim, size in enumerate(sizes) for u in _unbacked(size) - known if expression(size) == u
        }  # fmt: skip
        if found:
            node.meta["unbacked_bindings"] = found
            known |= found.keys()


def recompute_all(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Fresh fake values of every node, leaving the graph's own alone (the strict verifier compares the two)."""
    mode = _torch.fake_mode_of(module.graph)
    if mode is None:
        return {}
    prop = FakeTensorProp(module, mode)
    return {n: _recompute(prop, mode, n) for n in module.graph.nodes if n.op == "call_function"}


def _recompute(prop: FakeTensorProp, mode: _torch.FakeTensorMode, node: fx.Node) -> Any:
    if node.meta.get("unbacked_bindings") or _counts_what_it_reads(node):
        return node.meta.get("val")  # computing it again would define new sizes, which nobody refers to
    for source in node.all_input_nodes:
        prop.env[source] = source.meta.get("val")
    kept = dict(node.meta)
    try:
        # Values, not gradients: a graph before autograd holds parameters, and must not grow a tape here.
        # Casts are explicit in the normal form, so the user's autocast must not add any.
        # Symbolic sizes reach ops inside of ops as they do in capture: through the dispatcher in Python.
        fresh = _torch.ignore_fresh_unbacked(mode.shape_env)
        with mode, torch.no_grad(), _torch.without_autocast(), _torch.enable_python_dispatcher(), fresh:
            return prop.run_node(node)
    except Exception as error:
        first = str(error).strip().split("\n", 1)[0]
        text = f"%{node.name} cannot be computed from its arguments: {first}"
        raise VerifyError(text, node=node.name, line=str(line_of(node) or "")) from error
    finally:
        # FakeTensorProp writes its own keys; what the pass and torch wrote stays.
        node.meta.clear()
        node.meta.update(kept)


def _counts_what_it_reads(node: fx.Node) -> bool:
    """Is a size of the result a number of true entries? Of two picks by one mask only the first defines it."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    given = [n.meta.get("val") for n in node.all_input_nodes]
    by_mask = any(isinstance(v, torch.Tensor) and v.dtype in (torch.bool, torch.uint8) for v in given)
    return by_mask and not _unbacked(node.meta.get("val")) <= {s for v in given for s in _unbacked(v)}


def _unbacked(value: Any) -> set[Any]:
    """Sizes that only the run knows."""
    values = value if isinstance(value, (list, tuple)) else [value]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else [v])]
    return {u for s in sizes if isinstance(s, torch.SymInt) for u in _torch.free_unbacked(s)}


def same_tensor(a: Any, b: Any, strides: bool = True) -> bool:
    """Same shape, dtype, device, pending conjugation (and strides), provably and without a guard."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_tensor(x, y, strides) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.device == b.device
            and a.layout == b.layout
            and a.is_conj() == b.is_conj()
            and a.is_neg() == b.is_neg()
            and same_sizes(a.shape, b.shape)
            and (not strides or a.layout != torch.strided or same_sizes(a.stride(), b.stride()))
        )
    if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)) or isinstance(b, (torch.SymInt, torch.SymFloat)):
        return type(a) is type(b) and _torch.statically_known_true(a == b)
    return type(a) is type(b) and a == b


def same_sizes(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(_torch.statically_known_true(x == y) for x, y in zip(a, b, strict=True))
