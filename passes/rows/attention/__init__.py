"""Attention by evaluation: what a chain from a QK product to a PV product computes, whatever it is written like.

formula     indices as formulas over axes, and questions about sizes
language    atoms, leaves and factors
table       decision tables over atoms
calls       reading calls; declarations of what is modelled of them
indexing    index maps of views
numbers     numbers as torch computes them, and bounds
pointwise   rules for pointwise ops
sources     values made from positions and numbers, or put together
softmax     softmax, statistics of rows, dropout; what is hidden
speculate   patterns in tensors that were seen
evaluate    the recursion
products    products as contractions
find        which products may be an attention
normalise   from tables to the normal form
bias, times biases by distance, by bucket, by time
normal      the normal form
checks      what must hold of a batch
grid        all of it evaluated on a batch, for reference
facts       what recognition asks of the engine
recognise   the way in
"""
