"""What checks before kernels ask in every call of a graph, asked once: where tensors come in.

A graph's values follow from its inputs, and sizes and dtypes of all of them are known in terms of those when it is
compiled. So the contract of each op is applied to these terms, once and for all; what is left of it is about inputs:
their dtypes and sizes, and what holds of the entries of offsets, columns and row numbers. That is asked of each input
before the graph runs, and then its kernels run without checks of their own. Whatever cannot be told this way (entries
that the graph computes, for one) is checked by the op as ever. Where an input is not as it should be, the graph runs
with all of its checks, and these say what is wrong. So it does for the first inputs of a kind: some of torch's ops
return another type than they promise.

    sizes     sizes as polynomials in the sizes of inputs: comparisons that hold for every batch, or are undecided
    proof     which ops are settled by their inputs, and what is to be asked of these
    gate      that, as a function of a call's inputs
    graph     the graph with and without checks, and which of the two runs a call
"""

from .graph import run_behind_entrance

__all__ = ["run_behind_entrance"]
