# ruff: noqa: RUF009  (a Figure is as immutable as the float that it is)
"""Devices, nodes and links, and how long a collective holds them. Figures of Ascend 910B, as published."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import OptionError, did_you_mean
from .events import Floats
from .figures import Figure

_PROFILE = "device profile of Ascend/msmodeling, A2 server"
_DEFAULTS = "default of Ascend/msmodeling, which marks it as to be calibrated"
_PLATFORM = "CANN platform file: cubes x 4096 x 2 x clock"


@dataclass(frozen=True)
class Cluster:
    """Nodes of devices with fast links inside of a node and slow ones across; each link carries both directions."""

    peak: Figure
    memory: Figure
    per_node: int = 8
    inside: Figure = Figure(196e9, "B/s", "vendor", f"{_PROFILE}: 7 x 28 GB/s per card and direction")
    across: Figure = Figure(25e9, "B/s", "vendor", f"{_PROFILE}: 200 Gb/s RoCE per card")
    link_efficiency: Figure = Figure(0.7, "", "assumed", _DEFAULTS)
    inside_latency: Figure = Figure(0.5e-6, "s", "vendor", f"{_PROFILE}; marked there as to be confirmed")
    across_latency: Figure = Figure(1.5e-6, "s", "vendor", f"{_PROFILE}; marked there as to be confirmed")
    collective_start: Figure = Figure(10e-6, "s", "assumed", _DEFAULTS)
    per_peer: Figure = Figure(1e-6, "s", "assumed", "to post one message of an all-to-all across nodes")
    memory_efficiency: Figure = Figure(0.6, "", "assumed", _DEFAULTS)

    def nodes(self, devices: int) -> int:
        return max(devices // self.per_node, 1)

    def in_node(self, devices: int) -> int:
        """Devices of a node that the job uses."""
        return min(devices, self.per_node)

    def all_to_all_inside(self, size: Floats | float, devices: int) -> Floats | float:
        """Seconds to exchange `size` bytes per device with the others of a node."""
        group = self.in_node(devices)
        if group == 1:
            return size * 0.0
        sent = size * ((group - 1) / group)
        return self.collective_start + self.inside_latency + sent / (self.inside * self.link_efficiency)

    def all_to_all(self, size: Floats | float, devices: int) -> Floats | float:
        """Seconds to exchange `size` bytes per device with all others; both kinds of links work at once."""
        if self.nodes(devices) == 1:
            return self.all_to_all_inside(size, devices)
        outside = (devices - self.per_node) / devices / (self.across * self.link_efficiency)
        inside = (self.per_node - 1) / devices / (self.inside * self.link_efficiency)
        posted = self.per_peer * (devices - self.per_node)
        return self.collective_start + self.across_latency + posted + size * max(outside, inside)

    def reduce_inside(self, size: float, devices: int) -> float:
        """Seconds of the first, or of the last, third of an all-reduce: scatter or gather in the node."""
        return float(self.all_to_all_inside(size, devices))

    def reduce_across(self, size: float, devices: int) -> float:
        """Seconds of the middle of an all-reduce: each device sums its part of the node's with its peers."""
        nodes = self.nodes(devices)
        if nodes == 1:
            return 0.0
        part = size / self.per_node
        rounds = 2 * math.ceil(math.log2(nodes))
        sent = 2 * part * (nodes - 1) / nodes
        return self.collective_start + rounds * self.across_latency + sent / (self.across * self.link_efficiency)

    def rows_across(self, own: float, union: float, devices: int) -> float:
        """Seconds to add up rows of replicas: bytes of `own` rows go to their summing peer, the `union` comes back.

        Where that is less, every peer sends its rows to every other one.
        """
        nodes = self.nodes(devices)
        if nodes == 1:
            return 0.0
        share = (nodes - 1) / nodes
        moved = min((own + union) * share, own * (nodes - 1))
        posted = self.collective_start + 2 * self.across_latency + self.per_peer * (nodes - 1)
        return posted + moved / (self.across * self.link_efficiency)


def cluster_of(soc: str, per_node: int = 8) -> Cluster:
    """Of devices by name: 910B1 to 910B4."""
    from ..kernels.twin.cost import SOCS

    if soc not in SOCS:
        raise OptionError(f"{soc!r} is no device: {', '.join(SOCS)}{did_you_mean(soc, SOCS)}")
    found = SOCS[soc]
    return replace(
        Cluster(
            Figure(found.peak, "FLOP/s", "vendor", _PLATFORM),
            Figure(found.bandwidth, "B/s", "vendor", f"{_PROFILE}: memory"),
        ),
        per_node=per_node,
    )
