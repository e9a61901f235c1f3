"""What must hold of the arguments of an op, said once, beside its schema.

    Contract(
        x=Array("R ...F"),                       # at least one dim; what follows the first is called F
        rows=Array("N", INT64, Range("R")),      # int64, one dim, entries from 0 to below R
        count=Whole(0),
    )

A size that is named twice is the same twice. The contract is compiled to straight-line Python, as dataclasses are: it
runs before each kernel and costs about as much as one allocation. From the same words come the checks of the fake, of
the reference and of the twin, and the calls that `make fuzz-ops` generates.

Sizes of fake tensors may be symbols: they are compared only where they are numbers, so that nothing is guarded on.
Entries are looked at in real tensors alone: by turbogr_check (cpu/check.cpp) in front of kernels, by torch elsewhere.

    words        what can be said of an argument, a number or a tensor
    sizes        how sizes of tensors are written
    contract     some of that, bound to an op
    source       from a contract to the source of its check
    entries      what is looked at in tensors themselves, by torch
    said         what is said of an argument that is refused
"""

from .contract import Contract, has_data, tensors
from .entries import Question
from .sizes import Dim, Shape, equal_blocks
from .words import (
    BOOL,
    HALF,
    INT64,
    REAL,
    Array,
    As,
    Ascending,
    Distances,
    Entries,
    Flags,
    Number,
    Parts,
    Range,
    Rule,
    Sizes,
    Whole,
    Word,
    together,
)

__all__ = [
    "BOOL",
    "HALF",
    "INT64",
    "REAL",
    "Array",
    "As",
    "Ascending",
    "Contract",
    "Dim",
    "Distances",
    "Entries",
    "Flags",
    "Number",
    "Parts",
    "Question",
    "Range",
    "Rule",
    "Shape",
    "Sizes",
    "Whole",
    "Word",
    "equal_blocks",
    "has_data",
    "tensors",
    "together",
]
