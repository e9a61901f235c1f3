"""Tables that are spread over the ranks of a job. docs/distributed.md says how to use them."""

from .convert import shard
from .delays import Staleness
from .dense import average_gradients, broadcast_parameters, dense_parameters
from .embedding import ShardedEmbedding
from .optim import LazyAdam, RowAdagrad, RowOptimizer, RowSGD, RowWiseAdagrad
from .own import OwnEmbedding, row_gradients
from .placements import ColumnWise, Hierarchical, Placement, Replicated, RowWise, TableWise
from .plan import Plan, plan
from .stale import staleness
from .table import sharded_tables

__all__ = [
    "ColumnWise", "Hierarchical", "LazyAdam", "OwnEmbedding", "Placement", "Plan", "Replicated", "RowAdagrad",
    "RowOptimizer", "RowSGD", "RowWise", "RowWiseAdagrad", "ShardedEmbedding", "Staleness", "TableWise",
    "average_gradients", "broadcast_parameters", "dense_parameters", "plan", "row_gradients", "shard", "sharded_tables",
    "staleness",
]  # fmt: skip
