"""Queues beside the compute of a graph, as labels on its nodes.

A pass puts a node on a stream; a target that has streams makes them, and the others ignore the label. The order of the
graph is the order of the work, and means two things beyond what values flow where:

* the nodes of one stream run in the order of the graph;
* a wait for a value of another stream does not run before the compute directly in front of it.

So who wants an overlap moves nodes: starts up, and waits down to where their value is first read.
"""

from __future__ import annotations

from torch import fx

KEY = "turbogr_stream"
COMMUNICATION = "communication"  # collectives
HOST = "host"  # work of the host, and copies from and to it
STREAMS = (COMMUNICATION, HOST)


def put_on(node: fx.Node, stream: str) -> None:
    if stream not in STREAMS:
        raise ValueError(f"no stream is named {stream!r}; there are: {', '.join(STREAMS)}")
    node.meta[KEY] = stream


def stream_of(node: fx.Node) -> str:
    """'' for the compute of the graph."""
    return str(node.meta.get(KEY, ""))
