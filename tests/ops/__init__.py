"""torch's own database of ops against the compiler.

Two layers: a witness holds what the compiler declares about an op against what torch does (no compiling), and a sweep
runs ops with rows at every position, and ops inside of idioms, through the compiler.

    python -m tests.ops sweep --out sweep.json          everything, in child processes that outlive what ops do to them
    python -m tests.ops show 'CASE'                     one case, as its failure names it
    python -m tests.ops witness --out witness.json
"""
