"""What torch's own sharding strategies say about a dim: does a shard in come out as a shard, without communication?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree


@lru_cache(maxsize=1)
def mesh() -> Any:
    """Two ranks that do not exist."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return init_device_mesh("cpu", (2,))


def shards(c: Any, where: Mapping[str, int]) -> int | None:
    """The dim of the result that is sharded where these dims of operands are; None where torch does not say so."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema

    def placed(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placement = Shard(where[name]) if name in where else Replicate()
        return DTensorSpec(mesh(), (placement,), tensor_meta=TensorMeta(value.shape, value.stride(), value.dtype))

    known = {a.name: a for a in c.target._schema.arguments}
    args = tuple(placed(n, v) for n, v in c.named.items() if not known[n].kwarg_only)
    kwargs = {n: placed(n, v) for n, v in c.named.items() if known[n].kwarg_only}
    try:
        schema = OpSchema(c.target, args, kwargs)
        found = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    except Exception:  # no strategy
        return None
    if found.redistribute_schema is not None and _placements(found.redistribute_schema) != _placements(schema):
        return None
    specs = found.output_spec if isinstance(found.output_spec, (list, tuple)) else [found.output_spec]
    dims = {s.placements[0].dim if s is not None and type(s.placements[0]) is Shard else None for s in specs}
    return dims.pop() if len(dims) == 1 else None


def _placements(schema: Any) -> list[Any]:
    leaves = pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [leaf.placements for leaf in leaves if hasattr(leaf, "placements")]
