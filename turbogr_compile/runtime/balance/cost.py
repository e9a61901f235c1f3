"""What a sequence costs: a constant, a part that grows with its length, and one that grows with its square."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.flop_counter import FlopCounterMode

from ...errors import OptionError
from .algorithms import Floats

ROUNDS = 20
OUTLIER = 1.345  # of a typical residual: Huber's constant, 95 % as good as least squares where noise is normal


@dataclass(frozen=True)
class Cost:
    """c(L) = constant + linear * L + quadratic * L². Units do not matter for balancing; fits are in seconds."""

    constant: float = 0.0
    linear: float = 1.0
    quadratic: float = 0.0
    per_step: float = 0.0  # what a step costs besides its sequences; the same on each rank, so plans ignore it

    def __post_init__(self) -> None:
        if min(self.constant, self.linear, self.quadratic, self.per_step) < 0:
            raise OptionError(f"coefficients of a cost are not negative: {self}")

    def __call__(self, lengths: Any) -> Floats:
        """Of each sequence."""
        n = np.asarray(lengths, dtype=np.float64)
        return self.constant + n * (self.linear + self.quadratic * n)

    def step(self, lengths: Any) -> float:
        """Of a rank's step with these sequences."""
        return self.per_step + float(self(lengths).sum())

    @classmethod
    def of_model(cls, parameters: float, width: float, layers: int, causal: bool = True) -> Cost:
        """FLOPs of a training step: every token meets `parameters`; every pair of tokens meets twice in each layer.

        `parameters` are those that each token is multiplied with, without embeddings; `width` is heads times head size.
        """
        forward_and_backward = 3.0
        pairs = 0.5 if causal else 1.0
        return cls(0.0, forward_and_backward * 2.0 * parameters, forward_and_backward * 4.0 * width * layers * pairs)


def fit_cost(lengths: Sequence[Any], seconds: Sequence[float]) -> Cost:
    """The cost that explains measured times: of single sequences (a length each), or of steps (a list of lengths each).

    Robust: times are weighted by their size, and those that fit badly count less. No coefficient is negative.
    """
    steps = [np.atleast_1d(np.asarray(n, dtype=np.float64)) for n in lengths]
    times = np.asarray(seconds, dtype=np.float64)
    single = all(np.ndim(n) == 0 for n in lengths)
    if len(steps) != len(times) or not len(steps):
        raise OptionError(f"{len(steps)} lengths and {len(times)} times: give one time for each")
    if not np.isfinite(times).all() or (times <= 0).any():
        raise OptionError("times must be finite and above 0")
    features = np.array([[0.0 if single else 1.0, len(n), n.sum(), (n * n).sum()] for n in steps])
    if len(np.unique(features, axis=0)) < 3:
        raise OptionError("a fit takes times of at least 3 different lengths")
    per_step, constant, linear, quadratic = robust_fit(features, times)
    return Cost(constant, linear, quadratic, per_step)


def count_cost(run: Callable[[int], Any], lengths: Sequence[int] = (64, 256, 1024)) -> Cost:
    """The cost by FLOPs, as torch counts them while `run(length)` computes one sequence of that length."""
    counted = []
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            run(length)
        counted.append(float(counter.get_total_flops()))
    if not any(counted):
        raise OptionError("run() did no matrix product that torch counts; fit times instead (fit_cost)")
    return fit_cost(lengths, counted)


def robust_fit(features: Floats, values: Floats) -> list[float]:
    """Non-negative coefficients by least squares of relative errors, large ones weighted down again and again."""
    relative = features / values[:, None]
    weights = np.ones(len(values))
    found = _non_negative(relative, np.ones(len(values)))
    for _ in range(ROUNDS):
        error = np.abs(relative @ found - 1.0)
        typical = float(np.median(error)) * 1.4826  # the standard deviation, were errors normal
        if typical < 1e-9:
            break
        weights = np.minimum(1.0, OUTLIER * typical / np.maximum(error, 1e-300))
        root = np.sqrt(weights)
        found = _non_negative(relative * root[:, None], root)
    return found.tolist()


def _non_negative(features: Floats, values: Floats) -> Floats:
    """Least squares with no coefficient below 0: the best over all choices of which are 0."""
    size = features.shape[1]
    scale = np.maximum(np.abs(features).max(0), 1e-300)
    best, least = np.zeros(size), float((values**2).sum())
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(size), k) for k in range(1, size + 1)):
        columns = list(chosen)
        part = features[:, columns] / scale[columns]
        if not part.any():
            continue
        solution = np.linalg.lstsq(part, values, rcond=1e-10)[0]
        error = float(((part @ solution - values) ** 2).sum())
        if (solution >= 0).all() and error < least * (1 - 1e-9):
            best, least = np.zeros(size), error
            best[columns] = solution / scale[columns]
    return best
