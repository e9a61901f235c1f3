"""Negative sampling: ids are drawn, rows looked up, scored against queries, and enter a loss.

* products: products summed over one dim, in any spelling, with a label on every dim
* tables, layout, factors, norms, plans, rows: one operand read back to the table whose rows it holds
* scoring, find: which queries meet which rows, and which scorings may stop storing rows
* logits, losses, softmaxes, binary, filled, reading: the loss around scores
* drawing: where ids come from
* emit, total, grouped: what is written instead
* asked: what changes results, and happens only where it is asked for
* report: costs and remarks

Passes that come later find how ids were drawn at the node that produces them, the one whose entries are looked up:
`node.meta["turbogr_sampling"]` is a dict of

    drawn   "uniform", "popularity", "permutation" (in the graph), "given" (an input), "computed" (anything else)
    draws   name of the node that draws, or of the input; what lies between it and this node depends on no parameter
            unless `drawn` is "computed"
    per     "position" where each query has ids of its own, "shared" where queries share them
    count   ids that a query meets; None where only the run knows
    low, high   bounds of the numbers drawn, high excluded; None where they are not known
    hits    True where ids are compared with others, to mask accidental hits
"""

META = "turbogr_sampling"
