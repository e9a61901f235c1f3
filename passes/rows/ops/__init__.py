"""Declarations of torch's ops, one place per op: how each treats rows.

pointwise    each element from the elements at its own index
views        the same elements in another shape
reductions   sums, means, norms over dims
along        ops that run along one dim: softmax, cumulative sums, sorting
norms        normalisation of features
convolutions windows over features, and over neighbouring rows
products     linear layers, matrix products, einsum
lookups      tables, gathers, indexing
losses       losses, with or without reduction
joins        concatenation, stacking, splitting
moves        slices, pads, shifts, and which rows they read
jagged       ops on rows that the model itself packs
scatters     writing into features
recurrent    what is carried from row to row
fourier      complex numbers, Fourier transforms
derived      all others, by a generated table
functions    `autograd.Function`, by its bodies
packing      helpers for the packed side
"""

from . import (
    along,
    convolutions,
    derived,
    fourier,
    functions,
    jagged,
    joins,
    lookups,
    losses,
    moves,
    norms,
    pointwise,
    products,
    recurrent,
    reductions,
    scatters,
    views,
)

__all__ = [
    "along",
    "convolutions",
    "derived",
    "fourier",
    "functions",
    "jagged",
    "joins",
    "lookups",
    "losses",
    "moves",
    "norms",
    "pointwise",
    "products",
    "recurrent",
    "reductions",
    "scatters",
    "views",
]  # fmt: skip
