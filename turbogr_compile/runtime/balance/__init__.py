"""Load balancing: which rank takes which sequence, and what that does to the loss.

    plan = Balancer().plan(cost(lengths), world=8, lengths=lengths)

BalancedBatchSampler does it for a DataLoader; Planner and exchange for batches that are already loaded;
RowExchange moves what a compiled step has computed.
"""

from .balancer import ALGORITHMS, Balancer
from .cost import Cost, count_cost, fit_cost
from .exchange import Pending, Planner, Ragged, exchange
from .in_graph import RowExchange, Way
from .plan import Imbalance, Plan, WindowPlan, imbalance_of
from .sampler import BalancedBatchSampler
from .weights import loss_weight, sample_weights

__all__ = [
    "ALGORITHMS", "BalancedBatchSampler", "Balancer", "Cost", "Imbalance", "Pending", "Plan", "Planner", "Ragged",
    "RowExchange", "Way", "WindowPlan", "count_cost", "exchange", "fit_cost", "imbalance_of", "loss_weight",
    "sample_weights",
]  # fmt: skip
