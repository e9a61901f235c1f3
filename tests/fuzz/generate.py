"""Programs from seeds: an entry, a few things that happen to rows, a loss; and batches to try them on."""

from __future__ import annotations

from . import attention, losses, masks, rows
from .data import LATER, OTHER_COUNTS, OTHER_WIDTHS, SANE, Sizes
from .draw import VOCABULARY, Draw, slot
from .program import Line, Program

# B, N, D, H, V, K, M: unequal, all alike, ones.
SIZES = (
    (3, 6, 4, 2, 9, 3, 5), (4, 7, 6, 2, 9, 2, 4), (6, 6, 6, 3, 9, 6, 6), (4, 4, 4, 4, 9, 4, 4), 
    (2, 4, 8, 1, 9, 3, 4), (1, 5, 4, 2, 9, 2, 3), (5, 1, 4, 2, 9, 1, 2), (3, 9, 4, 2, 9, 3, 5), (5, 4, 4, 1, 9, 5, 6), 
    (2, 2, 2, 1, 9, 2, 2), (9, 9, 4, 2, 9, 4, 9), (4, 8, 2, 2, 12, 3, 3), (3, 5, 1, 1, 9, 2, 3), (4, 6, 4, 2, 9, 1, 1), 
    (9, 9, 9, 3, 9, 9, 9), (3, 3, 3, 3, 3, 3, 3), (1, 1, 4, 2, 9, 1, 1), (6, 3, 6, 2, 12, 6, 3),
    (3, 12, 4, 2, 6, 12, 12),
)  # fmt: skip
HOSTILE, GENTLE = 0.5, 0.08  # share of what is unusual
LONG = (2, 270, 2, 1, 9, 3, 4)  # more columns than narrow types count exactly
NARROW = ("valid:bfloat16-arange", "valid:int8-arange", "seen:arange-bfloat16", "seen:arange-int8")
ATTACKS = {
    "pairs": ("blind", "no-pairs"),
    "times": ("late",),
    "cids": ("some-empty",),
    "lens": ("empty",),
    "ema": ("full",),
    "maskf": ("grey",),
    "maski": ("grey",),
    "masku": ("grey",),
}
RETURNED = slot(
    "returned", {"nothing": (), "rows": ("x",), "zeroed": ("z",), "probabilities": ("p",), "logits": ("l",)}
)
MIDDLE = slot("middle", {
    "attention": attention.attention, "rowwise": rows.rowwise, "move": rows.move, "spread": rows.spread,
    "zeroed": rows.zeroed,
})  # fmt: skip
# Where a forced word of a slot can occur.
_WEIGHTS = (
    "keys-from", "scores", "heads", "score-step", "activation", "probability", "values", "hide", "minus-infinity",
    "seen", "aside",
)  # fmt: skip
_ATTENTION = (*_WEIGHTS, "attend", "sdpa", "mha", "cross", "side")
_MIDDLE_OF = {
    **dict.fromkeys(_ATTENTION, "attention"),
    **{w: w for w in ("rowwise", "move", "spread", "zeroed")},
}
_ATTEND_OF = {
    **dict.fromkeys(_WEIGHTS, "by-hand"), "sdpa": "sdpa", "mha": "mha", "cross": "cross", "side": "between",
}  # fmt: skip


def words() -> list[str]:
    """Every construct of the vocabulary."""
    return [f"{s}:{name}" for s, names in VOCABULARY.items() for name in names]


def generate(seed: int, force: str = "", loud: float = 1.0, hostility: float = HOSTILE, long: float = 0.004) -> Program:
    """The program of a seed; `force` is a word that it must contain, `long` the share of those of many columns."""
    chosen = Draw(seed, Sizes(), f"sizes {force}").random
    b, n, d, h, v, k, m = chosen.choice(SIZES) if chosen.random() < 0.75 else SIZES[chosen.randrange(2)]
    if chosen.random() < (0.7 if force in NARROW else long):
        b, n, d, h, v, k, m = LONG
    pad = 0 if chosen.random() < 0.85 or force == "valid:gt" else v - 1
    opened = 3 <= n < 13 and chosen.random() < 0.12
    sizes = Sizes(b, n, d, h, v, k, m, pad, opened, many=b >= 3 and chosen.random() < 0.1)
    g = Draw(seed, sizes, force, hostility)
    x = rows.entry(g)
    v_ = masks.valid(g)
    for what in _middle(g):
        g.words.add(f"middle:{what}")
        x = _apply(g, what, x, v_)
        if g.hostile(0.25):
            v_ = masks.valid(g)
    loss = _loss(g, x, v_)
    loss = _aside(g, loss)
    outputs = _outputs(g, x, v_)
    if g.hostile(0.2) or g.forced("metric"):
        outputs += (losses.metric(g, x, v_),)
    if g.hostile(0.06) or force == "spread:ema-buffer":
        g.lines.append(Line("ema0", f"ema.mul_(0.9).add_({x}.detach().mean((0, 1)) * 0.1)"))
    return Program(tuple(g.lines), loss, outputs, sizes, _kinds(g), seed, frozenset(g.words), loud)


def _middle(g: Draw) -> list[str]:
    """What happens to rows, in order."""
    slot_ = g.force.partition(":")[0]
    must = [g.force.partition(":")[2]] if slot_ == "middle" else [_MIDDLE_OF[slot_]] if slot_ in _MIDDLE_OF else []
    usual = ["attention", "attention", "attention", "rowwise", "rowwise", "rowwise"]
    some = [g.one(*usual) if not g.hostile(0.5) else g.one(*MIDDLE) for _ in range(g.one(0, 1, 1, 2, 2, 3) - len(must))]
    if not must and not some and g.chance(0.7):
        some = ["attention"]
    every = must + some
    g.random.shuffle(every)
    return every


def _apply(g: Draw, what: str, x: str, v: str) -> str:
    if what != "attention":
        return MIDDLE[what](g, x, v)
    wanted = _ATTEND_OF.get(g.force.partition(":")[0]) if g.force not in g.words else None
    o = attention.ATTEND[wanted](g, x, v) if wanted else attention.attention(g, x, v)
    return g.let("x", g.one(f"{x} + {o}", o, f"{o} @ O", f"F.layer_norm({x} + {o} @ O, (D,))", f"{x} * {o}"))


def _loss(g: Draw, x: str, v: str) -> str:
    v = v if g.chance(0.75) else masks.valid(g)
    few = g.forced("readout", "loss-of-sequences") or (g.chance(0.35) and not g.forced("loss"))
    loss = losses.over_sequences(g, x, v) if few else losses.over_rows(g, x, v)
    if g.hostile(0.25):
        other = losses.over_rows(g, x, v) if few else losses.over_sequences(g, x, v)
        loss = g.let("loss", f"{loss} + {other} * 0.5")
    return loss


# What an attention leaves behind is read once more: {p} its weights, {s} its scores.
ASIDE = slot(
    "aside",
    {
        "weights": "{loss} + {p}.square().mean() * 0.1",
        "entropy": "{loss} - ({p} * ({p} + 1e-3).log()).nan_to_num().sum() * 0.01",
        "of-first-query": "{loss} + {p}[:, 0].sum() * 0.1",
        "column-sums": "{loss} + {p}.sum(-2).square().sum() * 0.01",
        "scores": "{loss} + {s}.clamp(-5, 5).mean() * 0.1",
        "detached": "{loss} * (1 + {p}.detach().amax().nan_to_num().clamp(0, 1))",
    },
)


def _aside(g: Draw, loss: str) -> str:
    made = {kind: [line.name for line in g.lines if line.name.rstrip("0123456789") == kind] for kind in "ps"}
    if not all(made.values()) or not (g.forced("aside") or g.hostile(0.12)):
        return loss
    text = g.word("aside", ASIDE)
    return g.let("loss", text.format(loss=loss, p=g.one(*made["p"]), s=g.one(*made["s"])))


def _outputs(g: Draw, x: str, v: str) -> tuple[str, ...]:
    kind = g.word("returned", RETURNED, ("nothing", "nothing", "nothing"), 0.25)
    if kind == ("z",):
        return (g.let("z", f"{x} * {v}[..., None]"),)
    made = [line.name for line in g.lines if kind and line.name.startswith(kind[0]) and line.name[1:].isdigit()]
    return (made[-1],) if made else ()


def _kinds(g: Draw) -> tuple[str, ...]:
    """A sane batch first; then some of all kinds, and those that are about what the program reads."""
    later, text = list(LATER), " ".join(line.text for line in g.lines)
    g.random.shuffle(later)
    aimed = [kind for name, kinds in ATTACKS.items() if name in text for kind in kinds]
    kinds = list(dict.fromkeys([g.one(*SANE), *later[:4], *aimed]))
    if g.sizes.open:
        kinds += OTHER_WIDTHS
    if g.sizes.many:
        kinds += OTHER_COUNTS
    if g.hostile(0.2):
        kinds.append(g.one("bad-id", "bad-target"))
    return tuple(kinds)
