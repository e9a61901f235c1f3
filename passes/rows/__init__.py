"""Padding elimination: which rows of a padded batch matter, and the graph that computes only those.

calls        reading calls: op names, arguments, sizes
declaration  how ops treat rows: the registry of declarations
ops          declarations of torch's ops, one place per op
axes         which dims of which values run over the same thing
meaning      what masks and indices say
zeros        where values are zero: what pads contain
spaces       row spaces, and how the rows of two spaces relate
sets         sets of rows as expressions, evaluated on each batch
rowwise      ops that compute each row from the same row
moves        ops that move rows: slices, shifts, gathers
attention    attention as an expression that is evaluated: not in use yet
peeling      attention, however it is spelled: ops taken off one by one
demand       which rows of a value can influence a result
analysis     all of the above for one graph
installed    row rules of installed packages
report       the analysis as text
bias         biases of attention: by position, by time, per pair
emit         the packed graph
program      row indices for a batch, computed outside of the compiled graph
"""

from . import ops as _ops  # noqa: F401  (declares them)
