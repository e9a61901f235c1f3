"""Which known class of fault a shrunk program belongs to, read off its text: names for reports, not a judgement."""

from __future__ import annotations

import re

from .judge import Verdict

# The first that fits; texts are of a shrunk program, so that what is left in them matters.
CLASSES: tuple[tuple[str, str], ...] = (
    ("slice-beyond-the-start", r"-\d\d:|:-\d\d"),
    ("rounding-mode", r"rounding_mode|detach\(\) // "),
    ("alpha", r"alpha="),
    ("softmax-dtype", r"softmax\([^)]*dtype="),
    ("byte-wraps", r"byte\(\)|masku - |uint8"),
    ("narrow-arange", r"arange\([^)]*(bfloat16|int8)"),
    ("class-dim", r"cross_entropy\(.*permute|nll_loss\(.*permute|unflatten"),
    ("one-row-triangle", r"ones\(1, N[^)]*\)\.tril|ones\(N, 1|tril\(2\)|arange\(N\)\[None"),
    (
        "reduction-read-on-fewer-rows",
        r"softmax\((dim=)?1\).*(gather|last|\[:, [01]|idx)|cumsum\(1\).*(gather|last|idx)",
    ),
    ("gather-at-minus-one", r"lens - 1"),
    ("moved-zeros", r"index_select\(1|\[:, perm\]|perm|roll|flip"),
    ("cast", r"half\(\)|bfloat16|long\(\)|float\(\)|\.int\(\)"),
    ("time-out-of-range", r"Tb\["),
    ("pointwise-attention", r"silu|sigmoid|relu|gelu|tanh"),
    ("mask-nested", r"maximum|minimum|nan_to_num|clamp"),
    ("mask-then-scale", r"masked_fill.*[*/]|\* -1|/ 1024|1e-3|0\.001"),
    ("pair-mask-blind", r"pairs"),
    ("cross-attention", r"cids"),
    ("softmax-over-rows", r"softmax\((dim=)?1\)"),
    ("attention", r"softmax"),
)


def classify(verdict: Verdict) -> str:
    """'different: rounding-mode'."""
    text, kinds = verdict.program.body, verdict.program.kinds
    name = next((name for name, pattern in CLASSES if re.search(pattern, text)), "other")
    if verdict.status == "raises" and name != "time-out-of-range":
        name = "bad-id" if "bad-id" in kinds else "domain"
    elif verdict.status == "nan":  # why eager is not a number says more than what was done to it
        spoiled = any(kind in ("nan-pads", "inf-pads") for kind in kinds)
        name = "pads-not-finite" if spoiled else "masked-by-infinity" if "inf" in text or "log()" in text else name
    elif verdict.status == "crash" and verdict.program.sizes.open:
        name = "another-width"
    return f"{verdict.status}: {name}"
