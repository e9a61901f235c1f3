"""Declarations held against torch: is what is said to be row-wise row-wise, and what is said to stay zero zero?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tests.fuzz.judge import quiet

from .declared import Claim, Declarations
from .judge import TooLong, limited
from .probe import MIX, aligned, deterministic, packs
from .samples import Entry, Sample, call, covering, entries

MOST = 400_000


class Values(fx.Interpreter):
    """Runs a graph and remembers what every node gave."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = super().run_node(n)
        return self.found[n]


def study(entry: Entry, sample: Sample) -> Iterator[dict[str, Any]]:
    """One record per claim about a node of the sample's graph; 'false' says what is wrong with it."""
    tensors = [t.detach() for _, t in sample.tensors()]

    def fn(*given: torch.Tensor) -> Any:
        each = iter(given)
        leaves = [next(each) if isinstance(leaf, torch.Tensor) else leaf for leaf in sample.leaves]
        return call(entry.call, leaves, sample.spec)

    said = Declarations(fn, tensors)
    values = Values(said.module)
    with torch.no_grad():
        values.run(*tensors)
    for node in said.nodes:
        yield from witness(said, node, values.found)


def witness(said: Declarations, node: fx.Node, values: dict[fx.Node, Any]) -> Iterator[dict[str, Any]]:
    assert callable(node.target)
    leaves, spec = pytree.tree_flatten((*node.args, dict(node.kwargs)))
    real = [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    size = sum(r.numel() for r in real if isinstance(r, torch.Tensor))
    if not 0 < size <= MOST or any(isinstance(leaf, fx.Node) and values[leaf] is None for leaf in leaves):
        return
    claims = list(said.claims(node, leaves))
    if claims and not deterministic(node.target, real, spec):
        return
    for claim in claims:
        yield {
            "op": str(node.target),
            "claim": f"rows {claim.operands} to {claim.out}",
            "false": refuted(claim, real, spec),
        }
    if said.keeps_zero(node) and isinstance(real[0], torch.Tensor) and real[0].is_floating_point():
        yield {"op": str(node.target), "claim": "keeps zero", "false": _zero(node, real, spec)}


def refuted(claim: Claim, real: Sequence[Any], spec: Any) -> str:
    """Why the claim is not true; '' where nothing speaks against it."""
    target = claim.node.target
    assert callable(target)
    for leaf, dim in claim.operands:
        if real[leaf].shape[dim] < 2:
            continue
        for found in aligned(target, real, spec, leaf, dim):
            if found == MIX:
                return f"operand {leaf} mixes rows"
            if found is not None and claim.out not in found:
                return f"operand {leaf}: rows come out at {found}"
    where = {i: d for i, d in claim.operands if real[i].shape[d] > 1}
    if not where:
        return ""
    outs = [claim.out] * len(call(target, real, spec))
    said = packs(target, real, spec, where, outs)
    return said if said.startswith("other") else ""  # views must be told the new size: emission's work, not a lie


def _zero(node: fx.Node, real: Sequence[Any], spec: Any) -> str:
    assert callable(node.target)
    zero = [torch.zeros_like(real[0]), *real[1:]]
    left = [y for y in call(node.target, zero, spec) if bool((y != 0).any())]
    return "zero does not stay zero" if left else ""


def studied(entry: Entry, per: int) -> list[dict[str, Any]]:
    """Records of all claims about an entry's samples; samples that cannot be traced say nothing."""
    records: list[dict[str, Any]] = []
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in entry.dtypes), None)
    if dtype is None:
        return records
    try:
        samples = covering(entry.samples(dtype), per)
    except Exception:
        return records
    for sample in samples:
        try:
            with quiet(), limited():
                records += [{"entry": entry.name, "sample": sample.number, **r} for r in study(entry, sample)]
        except TooLong:
            records.append({"entry": entry.name, "sample": sample.number, "error": "takes too long"})
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
            records.append({"entry": entry.name, "sample": sample.number, "error": said})
    return records


def report(names: Sequence[str], per: int, out: Path | None) -> int:
    records = [r for name in names if not name.startswith("nn:") for r in studied(entries()[name], per)]
    claims = [r for r in records if "claim" in r]
    false = [r for r in claims if r["false"]]
    zero = sum(r["claim"] == "keeps zero" for r in claims)
    print(f"{len(claims)} claims about {len({r['op'] for r in claims})} overloads, {zero} of zeros; {len(false)} false")
    print(f"{sum('error' in r for r in records)} samples not studied:", Counter(
        r["error"].split(":")[0] for r in records if "error" in r
    ).most_common(5))  # fmt: skip
    for r in false:
        print(f"{r['entry']} sample {r['sample']}: {r['op']} {r['claim']}: {r['false']}")
    if out is not None:
        out.write_text(json.dumps(records, indent=1))
    return bool(false)
