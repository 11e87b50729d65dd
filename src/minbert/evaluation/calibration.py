"""Outputs made honest on dev: a temperature for logits, a threshold for probabilities, and how far off they are.

Outputs come first here, then the labels that they are fitted to. numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from minbert.errors import MinbertError
from minbert.evaluation.metrics import calibration_error, checked_rows, class_columns, class_numbers

TEMPERATURES = (0.01, 100.0)  # the least and the most


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """See `calibration_error`, the metric that the table and the bootstrap use."""
    return calibration_error(labels, probabilities, bins=bins)


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """The T > 0 for which softmax(logits / T), or sigmoid for (rows,) logits, has the least negative log-likelihood.

    That loss is convex in 1/T, so we halve the interval of log T by the sign of its slope. T stays within 0.01
    (every row is right: ever sharper is better) and 100 (no better than chance: ever flatter); 1 if it has no effect.
    """
    truth, found = checked_rows("probabilities", labels, logits)
    columns = np.stack([np.zeros_like(found), found], axis=1) if found.ndim == 1 else found
    columns = columns - columns.max(axis=1, keepdims=True)
    wanted = columns[np.arange(len(truth)), class_numbers(truth, columns.shape[1])].mean()

    def slope(temperature: float) -> float:
        """Of the loss by 1/T: the mean logit the model expects, less the mean logit of the labels."""
        odds = np.exp(columns / temperature)
        return float(((odds * columns).sum(axis=1) / odds.sum(axis=1)).mean() - wanted)

    if slope(1.0) == 0:
        return 1.0
    low, high = np.log(TEMPERATURES)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(np.exp(middle)) > 0 else (low, middle)
    return float(np.clip(np.exp((low + high) / 2), *TEMPERATURES))


def best_threshold(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """The t for which ``probability >= t`` is right most often: the middle of the best gap, nearest 0.5 among equals.

    ``probabilities`` are (rows,) of class 1, or (rows, 2). t lies just above 1 when even a 1 should be refused.
    """
    truth, found = checked_rows("probabilities", labels, probabilities)
    columns = class_columns(found)
    if columns.shape[1] != 2:
        raise MinbertError(f"probabilities of {columns.shape[1]} classes found; a threshold is for 2")
    values, group = np.unique(columns[:, 1], return_inverse=True)
    refused = np.bincount(
        group, weights=1.0 - 2 * class_numbers(truth, 2)
    )  # gain in right answers by refusing each value
    gain = np.concatenate([[0.0], np.cumsum(refused)])
    edges = np.concatenate([[min(0.0, values[0])], values, [np.nextafter(max(1.0, values[-1]), 2)]])
    middle = (edges[:-1] + edges[1:]) / 2
    thresholds = np.where(middle > edges[:-1], middle, edges[1:])  # neighbouring floats have no middle
    best = thresholds[gain == gain.max()]
    return float(best[np.abs(best - 0.5).argmin()])
