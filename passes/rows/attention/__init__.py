"""Attention by evaluation: what a chain from a QK product to a PV product computes, whatever it is written like.

    form = recognise(node, facts)          a NormalForm; Refused with the term that did not fit; None: no attention
    print(form)                            complete: what is visible and why, biases, assumptions, checks
    failed(form.checks, values)            the first check that a batch breaks
    lowered(form, builder)                 the call of `jagged_attention` on packed rows

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
bias        biases by distance, by bucket, by time, by case, dense
times       buckets of time
normal      the normal form
checks      what must hold of a batch
grid        all of it evaluated on a batch, for reference
facts       what recognition asks of the engine
recognise   the way in
lower       the way out: arguments of the op
writing     tables and sums as ops of the packed graph
bias_arguments  biases as arguments of the op
builder     what that graph is made with
"""
