"""GE graphs on a machine without an NPU: torchair converts as for one, and what it made is read, checked and run.

Nothing here is loaded before the first compilation that asks for it. What running proves, and what it cannot: the
graph, its wiring, attributes, dtypes and numbers; not GE's own shape inference, fusion, memory, speed or HCCL.
"""
