"""Settings of a training run: a frozen value with a text form, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import OptionError, did_you_mean
from ..files import read_json

LARGEST = 1 << 53  # of whole numbers: those beyond it are not told apart as numbers with a point

MODELS = ("hstu", "sasrec", "fuxi")
BACKENDS = ("turbogr", "eager", "inductor")
STORAGES = ("fp32", "bf16")
LONG = ("last", "random", "chunks")
ORDERS = ("shuffled", "bucketed", "balanced", "window")
FEATURES = {
    "offload": "negatives are drawn one batch ahead, from other generators: the same distribution",
    "half": "negatives are multiplied in FP16",
    "share": "8 neighbouring positions share their negatives: another loss",
    "window": "which users meet in a batch follows from their lengths",
    "semi-async": "rows of sharded tables have missed one update; under torchrun only, and not part of 'all'",
}
SHARED = 8

# Dense parameters: about 30 thousand, 0.1 million, 3 million and 0.2 billion.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 32, "heads": 2, "layers": 2, "max_len": 64, "batch": 16, "negatives": 32,
             "users": 500, "items": 500, "mean_length": 24.0},
    "small": {"dim": 64, "heads": 2, "layers": 2, "max_len": 128, "batch": 32, "negatives": 64,
              "users": 2000, "items": 1000, "mean_length": 40.0},
    "base": {"dim": 256, "heads": 4, "layers": 8, "max_len": 512, "batch": 16, "negatives": 128,
             "users": 4000, "items": 20_000, "mean_length": 120.0},
    "large": {"dim": 1280, "heads": 10, "layers": 24, "max_len": 1024, "batch": 8, "negatives": 64,
              "users": 400, "items": 20_000, "mean_length": 250.0, "evaluate_users": 0, "save_every": 0},
}  # fmt: skip
# A layer of these has 12 squares of its width for parameters, one of HSTU 5.
FEWER_LAYERS = {("large", "sasrec"): 10, ("large", "fuxi"): 10, ("base", "sasrec"): 4, ("base", "fuxi"): 4}


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes. `size` sets the others; what is named wins."""

    model: str = _setting("hstu", "hstu, sasrec or fuxi")
    size: str = _setting("tiny", "tiny, small, base or large (0.2 B dense parameters)")
    dim: int = _setting(32, "width of the model")
    heads: int = _setting(2, "heads of attention")
    layers: int = _setting(2, "layers")
    max_len: int = _setting(64, "length that histories are padded or cut to")
    buckets: int = _setting(64, "of the time between interactions")
    dropout: float = _setting(0.0, "probability; packed and padded runs draw different masks")
    negatives: int = _setting(32, "sampled items for each position")
    temperature: float = _setting(0.1, "that logits are divided by")

    data: str = _setting("generated", "folder with KuaiRand or MovieLens files, or 'generated'")
    cache: str = _setting("", "folder for data that were read, for all runs; by default in the user's cache")
    users: int = _setting(500, "of generated data")
    items: int = _setting(500, "of generated data")
    mean_length: float = _setting(24.0, "of generated histories")
    keep: str = _setting("", "what counts: all, clicks, long_views or likes; by default as the kind of data does")
    min_length: int = _setting(3, "interactions; users with fewer are left out")
    long: str = _setting("last", "of histories beyond max_len: last, random (a stretch) or chunks (all, once an epoch)")
    batch: int = _setting(16, "histories in a batch, for each rank")
    order: str = _setting("shuffled", "of batches: shuffled, bucketed, balanced or window")
    cost: str = _setting("flops", "that balanced and window even out: flops (length and its square) or tokens")

    steps: int = _setting(100, "updates")
    accumulate: int = _setting(1, "batches whose gradients are averaged for one update")
    lr: float = _setting(1e-3, "of AdamW, for dense parameters")
    table_lr: float = _setting(2e-2, "of row-wise Adagrad, for the item table")
    weight_decay: float = _setting(1e-2, "of AdamW")
    warmup: int = _setting(10, "updates until the full learning rate")
    storage: str = _setting("fp32", "of dense parameters, their gradients and moments: fp32 or bf16")

    backend: str = _setting("turbogr", "turbogr, eager or inductor")
    codegen: str = _setting("aten", "of backend turbogr: aten or inductor")
    features: tuple[str, ...] = _setting((), f"opt-in, by comma, or 'all': {', '.join(FEATURES)}")

    evaluate_every: int = _setting(0, "updates; 0: only at the end")
    evaluate_users: int = _setting(500, "whose held-out item is ranked; 0: none")
    save_every: int = _setting(50, "updates, and at the end; 0: only when interrupted")
    seed: int = _setting(0, "of parameters, batches and draws")
    malloc: str = _setting("keep", "keep: freed memory stays for the next step; default: the C library decides")
    threads: int = _setting(0, "of torch; 0: as many as torch chooses")
    deterministic: bool = _setting(False, "the same bits in every run; an op that cannot is an error")

    def __post_init__(self) -> None:
        for name, known in (
            ("model", MODELS), ("size", SIZES), ("backend", BACKENDS), ("storage", STORAGES), ("order", ORDERS),
            ("codegen", ("aten", "inductor")), ("malloc", ("keep", "default")), ("long", LONG),
            ("cost", ("flops", "tokens")),
        ):  # fmt: skip
            _one_of(name, getattr(self, name), known)
        for feature in self.features:
            _one_of("features", feature, FEATURES)
        for name in ("dim", "heads", "layers", "negatives", "buckets", "batch", "steps", "accumulate", "users",
                     "min_length"):  # fmt: skip
            _at_least(name, getattr(self, name), 1)
        for name in ("evaluate_every", "evaluate_users", "save_every", "seed", "threads", "warmup", "lr", "table_lr",
                     "weight_decay", "dropout"):  # fmt: skip
            _at_least(name, getattr(self, name), 0)
        _at_least("max_len", self.max_len, 2)
        if self.dim % self.heads:
            raise OptionError(f"dim must be a multiple of heads; got {self.dim} and {self.heads}")
        if self.temperature <= 0 or self.dropout >= 1:
            raise OptionError("temperature must be above 0, dropout below 1")
        compiled = sorted(set(self.features) - {"window"})
        if compiled and self.backend != "turbogr":
            raise OptionError(f"features {', '.join(compiled)} are turbogr's: leave them out, or --backend turbogr")
        if "window" in self.features and self.order not in ("shuffled", "window"):
            raise OptionError(f"feature window is an order of batches, and --order {self.order} another: give one")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Config:
        """From numbers or texts; the size first, then what is named."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in given:
            if name not in known:
                raise OptionError(f"no setting is named {name!r}{did_you_mean(name, known)}")
        values = {name: _value(known[name], value) for name, value in given.items()}
        size, model = values.get("size", cls.size), values.get("model", cls.model)
        _one_of("size", size, SIZES)
        _one_of("model", model, MODELS)
        preset = dict(SIZES[size])
        if (size, model) in FEWER_LAYERS:
            preset["layers"] = FEWER_LAYERS[size, model]
        return cls(**preset | values)

    @property
    def batch_order(self) -> str:
        return "window" if "window" in self.features else self.order

    def as_dict(self) -> dict[str, Any]:
        """What `read` takes; all of JSON's own types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def read_file(path: Path) -> dict[str, Any]:
    """Settings in a JSON file, or those of a run in its run.json."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read settings from {path}: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f"{path} holds no settings: expected names and values, found a {type(found).__name__}")
    return found.get("config", found) if found.get("format") else found


def _value(known: dataclasses.Field[Any], given: Any) -> Any:
    """Of the setting's type, from a number, a truth value or a text."""
    name, kind = known.name, type(known.default)
    if kind is tuple:
        names = given.replace(" ", "").split(",") if isinstance(given, str) else given
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise OptionError(f"{name} takes names, got {given!r}")
        names = [n for n in names if n]
        if "all" in names:
            names = [*FEATURES][:-1] + [n for n in names if n != "all"]
        return tuple(n for n in FEATURES if n in names) + _unknown(names)
    if kind is str and isinstance(given, (str, Path)):
        return str(given)
    if kind is bool and isinstance(given, bool):
        return given
    try:
        number = float(given)
        right = math.isfinite(number) and (kind is float or (number == int(number) and abs(number) < LARGEST))
        if kind in (int, float) and not isinstance(given, bool) and right:
            return kind(number)
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
    raise OptionError(f"{name} takes {wanted}, got {given!r}")


def _unknown(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(n for n in names if n not in FEATURES)


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise OptionError(f"{name} {value!r} is not known{did_you_mean(value, known)}; there are {', '.join(known)}")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise OptionError(f"{name} must be at least {least}, got {value}")
