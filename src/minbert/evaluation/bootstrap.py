"""How sure is a number? Percentile intervals and paired comparisons over resampled rows. numpy only.

bootstrap(accuracy, labels, predictions, rng=rng)               # 0.532 [0.503, 0.561]
paired_bootstrap(accuracy, labels, a, b, rng=rng).p_value       # is b different from a?
score("classification", labels, predictions, rng=rng)           # every metric of the kind
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from minbert.errors import MinbertError
from minbert.evaluation.metrics import Array, Metric, checked_rows, metrics_of

if TYPE_CHECKING:
    from collections.abc import Callable

COUNTS_PER_BLOCK = 1_000_000  # resamples go by blocks of 8 MB; the results do not depend on it


@dataclass(frozen=True)
class Interval:
    """A value and the percentile interval around it; ``dataclasses.asdict`` makes it plain floats for JSON."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class PairedResult:
    """How b differs from a on the same rows."""

    difference: Interval
    """metric(b) - metric(a)"""
    p_value: float
    """two-sided: twice the smaller share of resamples on either side of no difference"""
    wins: float
    """share of resamples in which b scores higher (for an error: is worse); a tie counts half"""


def bootstrap(
    metric: Metric | Callable[..., float],
    *arrays: ArrayLike,
    rng: np.random.Generator,
    samples: int = 1000,
    level: float = 0.95,
) -> Interval:
    """The metric of ``arrays`` (for a `Metric`: labels, outputs) and its percentile interval over resampled rows.

    Any other function of arrays works too, called once per resample: lower ``samples`` if it is slow. Resamples in
    which the metric is undefined (nan) are left out; if it is in all of them, the interval is nan.
    """
    rows, values = _over_weights(metric, *arrays)
    return _interval(values(np.ones((1, rows))), _resampled(values, rows, samples, rng), level)


def paired_bootstrap(
    metric: Metric | Callable[..., float],
    labels: ArrayLike,
    predictions_a: ArrayLike,
    predictions_b: ArrayLike,
    *,
    rng: np.random.Generator,
    samples: int = 10_000,
    level: float = 0.95,
) -> PairedResult:
    """Is b different from a? Both are scored on the same resampled rows."""
    rows, a = _over_weights(metric, labels, predictions_a)
    _, b = _over_weights(metric, labels, predictions_b)
    draws = _resampled(lambda weights: b(weights) - a(weights), rows, samples, rng)
    everything = np.ones((1, rows))
    difference = _interval(b(everything) - a(everything), draws, level)
    draws = draws[~np.isnan(draws)]
    if draws.size == 0:
        return PairedResult(difference, float("nan"), float("nan"))
    # The data itself counts as one more resample, so that p is never 0
    smaller = min(np.sum(draws <= 0), np.sum(draws >= 0))
    p_value = min(1.0, 2 * float(smaller + 1) / (draws.size + 1))
    return PairedResult(difference, p_value, float(np.mean((np.sign(draws) + 1) / 2)))


def score(
    kind: str,
    labels: ArrayLike,
    predictions: ArrayLike,
    probabilities: ArrayLike | None = None,
    *,
    losses: ArrayLike | None = None,
    rng: np.random.Generator,
    samples: int = 1000,
) -> dict[str, Interval]:
    """Every metric of this kind of task, over the same resamples; without probabilities, those that need none."""
    columns = {}
    for name, metric in metrics_of(kind).items():
        outputs = {"probabilities": probabilities, "losses": losses}.get(metric.reads, predictions)
        if outputs is not None:
            rows, columns[name] = _over_weights(metric, labels, outputs)

    def values(weights: Array) -> Array:
        return np.stack([column(weights) for column in columns.values()])  # (metrics, samples)

    scored = zip(columns, values(np.ones((1, rows))), _resampled(values, rows, samples, rng), strict=True)
    return {name: _interval(value, draws, 0.95) for name, value, draws in scored}


def _resampled(values: Callable[[Array], Array], rows: int, samples: int, rng: np.random.Generator) -> Array:
    """``values`` of how often each row is drawn, when ``rows`` rows are drawn with replacement: (..., samples)."""
    if samples < 1:
        raise MinbertError(f"{samples} bootstrap samples asked for; expected at least 1")
    block = max(1, COUNTS_PER_BLOCK // rows)
    results = []
    for start in range(0, samples, block):
        size = min(block, samples - start)
        drawn = rng.integers(rows, size=(size, rows)) + rows * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * rows).reshape(size, rows)
        results.append(values(counts.astype(np.float64)))
    return np.concatenate(results, axis=-1)


def _over_weights(metric: Metric | Callable[..., float], *arrays: ArrayLike) -> tuple[int, Callable[[Array], Array]]:
    """The number of rows, and the metric of ``arrays`` as a function of weights: (samples, rows) to (samples,)."""
    if isinstance(metric, Metric):
        labels, outputs = checked_rows(metric.reads, *arrays)
        return len(labels), lambda weights: metric.weighted(labels, outputs, weights)
    columns = [np.asarray(array) for array in arrays]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1 or lengths[0] == 0:
        raise MinbertError(f"arrays of {lengths} rows found; expected equally many, at least one")

    def one_by_one(weights: Array) -> Array:
        indices = (np.repeat(np.arange(lengths[0]), counts.astype(np.intp)) for counts in weights)
        return np.array([metric(*(column[index] for column in columns)) for index in indices], dtype=np.float64)

    return lengths[0], one_by_one


def _interval(value: Array, draws: Array, level: float) -> Interval:
    defined = draws[~np.isnan(draws)]
    tail = (1 - level) / 2
    low, high = np.quantile(defined, [tail, 1 - tail]) if defined.size else (np.nan, np.nan)
    return Interval(float(value[0]), float(low), float(high))
