"""Padding elimination: which rows of a padded batch matter, and the graph that computes only those.

ops        reading calls: op names, arguments, sizes
axes       which dims of which values run over the same thing
meaning    what masks and indices say
spaces     row spaces, and how the rows of two spaces relate
sets       sets of rows as expressions, evaluated on each batch
attention  attention, however it is spelled
demand     which rows of a value can influence a result
analysis   all of the above for one graph, and its text
prologue   row indices for a batch, computed outside of the compiled graph
emit       the packed graph
"""
