"""Labels and outputs in, numbers out: the metrics of each kind of task, and the overall scores. numpy only.

Each metric is written once, over row weights: ``weights`` is (samples, rows), a row of it says how often every row of
the data counts, and the answer is one value per sample. Called plainly, ``accuracy(labels, predictions)``, all rows
count once. `bootstrap.py` hands in how often each row was drawn, so a thousand resamples are a few matrix products
instead of a thousand calls; ranks, too, are taken within each resample, so the answers are those of resampling rows.
"""

from __future__ import annotations

from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minbert.errors import MinbertError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Array: TypeAlias = NDArray[np.float64]
Outputs: TypeAlias = Literal["classes", "values", "probabilities", "losses"]


# --- what we were given, checked once -------------------------------------------------------------------------------


def _numbers(name: str, values: ArrayLike, dimensions: tuple[int, ...] = (1,)) -> Array:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MinbertError(f"{name} cannot be read as numbers ({error}); expected one row per example") from error
    if array.ndim not in dimensions or array.size == 0:
        shapes = " or ".join("(rows,)" if d == 1 else "(rows, classes)" for d in dimensions)
        raise MinbertError(f"{name} has shape {array.shape}; expected {shapes} with at least one row")
    if not np.isfinite(array).all():
        raise MinbertError(f"{name} holds {np.sum(~np.isfinite(array))} NaN or infinite values; expected numbers")
    return array


def checked_rows(reads: Outputs, labels: ArrayLike, outputs: ArrayLike) -> tuple[Array, Array]:
    """Both as float arrays of one length: whole numbers where classes are read, (rows,) unless probabilities are."""
    name = reads if reads in ("probabilities", "losses") else "predictions"
    truth = _numbers("labels", labels)
    found = _numbers(name, outputs, (1, 2) if reads == "probabilities" else (1,))
    if len(truth) != len(found):
        raise MinbertError(f"labels has {len(truth)} rows and {name} {len(found)}; expected equally many")
    for which, array in (("labels", truth), (name, found)):
        whole = array == np.floor(array)
        if not whole.all() and (reads == "classes" or (reads == "probabilities" and which == "labels")):
            raise MinbertError(f"{which} holds {array[~whole][0]:g}; expected class numbers")
    return truth, found


def class_numbers(labels: Array, classes: int) -> NDArray[np.intp]:
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        raise MinbertError(f"class {labels[outside][0]:g} found; expected 0 to {classes - 1}")
    return labels.astype(np.intp)


def class_columns(probabilities: Array) -> Array:
    """(rows, classes) probabilities; the (rows,) of a binary task are those of class 1."""
    if probabilities.min() < -1e-6 or probabilities.max() > 1 + 1e-6:
        found = f"from {probabilities.min():g} to {probabilities.max():g}"
        raise MinbertError(f"probabilities reach {found}; expected 0 to 1 (logits need a softmax first)")
    if probabilities.ndim == 1:
        return np.stack([1 - probabilities, probabilities], axis=1)
    sums = probabilities.sum(axis=1)
    if np.abs(sums - 1).max() > 0.01:  # half-precision softmax is that far off
        raise MinbertError(f"a row of probabilities sums to {sums[np.abs(sums - 1).argmax()]:g}; expected 1")
    return probabilities


# --- metrics --------------------------------------------------------------------------------------------------------


class Metric:
    """A metric over weighted rows, and callable on plain ones: ``metric(labels, outputs) -> float``.

    ``reads`` says what the outputs are; ``weighted(labels, outputs, weights)`` takes checked arrays.
    """

    def __init__(self, reads: Outputs, weighted: Callable[..., Array]) -> None:
        update_wrapper(self, weighted)
        self.reads = reads
        self.weighted = weighted

    def __call__(self, labels: ArrayLike, outputs: ArrayLike, **options: Any) -> float:
        truth, found = checked_rows(self.reads, labels, outputs)
        return float(self.weighted(truth, found, np.ones((1, len(truth))), **options)[0])

    def __reduce__(self) -> str:
        return self.weighted.__name__  # pickled by name, as a function is


def reads(outputs: Outputs) -> Callable[[Callable[..., Array]], Metric]:
    """Make the function of weights below a `Metric` of such outputs."""
    return lambda weighted: Metric(outputs, weighted)


def _mean(values: Array, weights: Array) -> Array:
    mean: Array = weights @ values / weights.sum(axis=1)
    return mean


def _ratio(top: Array, bottom: Array) -> Array:
    """``top / bottom``, nan where ``bottom`` is not positive."""
    quotient: Array = np.divide(top, bottom, out=np.full(bottom.shape, np.nan), where=bottom > 0)
    return quotient


def _mean_over_classes(values: Array) -> Array:
    """The mean of each row's numbers that are not nan; nan where there are none."""
    present = ~np.isnan(values)  # (samples, classes)
    return _ratio(np.where(present, values, 0.0).sum(axis=1), present.sum(axis=1).astype(np.float64))


def _class_counts(labels: Array, predictions: Array, weights: Array) -> tuple[Array, Array, Array]:
    """How often each class was hit, predicted and true, each (samples, classes)."""
    classes = np.union1d(labels, predictions)
    true = (labels[:, None] == classes).astype(np.float64)  # (rows, classes)
    predicted = (predictions[:, None] == classes).astype(np.float64)
    return weights @ (true * predicted), weights @ predicted, weights @ true


def _centred_ranks(values: Array, weights: Array) -> Array:
    """Midranks of every row within each resample, less their mean: (samples, rows)."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    in_order = np.take(weights, np.argsort(group), axis=1)
    tied = np.add.reduceat(in_order, np.cumsum(sizes) - sizes, axis=1)  # (samples, distinct values)
    middle = np.cumsum(tied, axis=1) - tied / 2 - weights.sum(axis=1, keepdims=True) / 2
    return np.take(middle, group, axis=1)


@reads("classes")
def accuracy(labels: Array, predictions: Array, weights: Array) -> Array:
    """Share of rows whose predicted class is the label."""
    return _mean((labels == predictions).astype(np.float64), weights)


@reads("classes")
def macro_f1(labels: Array, predictions: Array, weights: Array) -> Array:
    """F1 averaged over the classes that occur among labels or predictions."""
    hit, predicted, true = _class_counts(labels, predictions, weights)
    return _mean_over_classes(_ratio(2 * hit, predicted + true))


@reads("classes")
def mean_class_accuracy(labels: Array, predictions: Array, weights: Array) -> Array:
    """Balanced accuracy: recall averaged over the classes that occur among the labels."""
    hit, _, true = _class_counts(labels, predictions, weights)
    return _mean_over_classes(_ratio(hit, true))


@reads("probabilities")
def roc_auc(labels: Array, probabilities: Array, weights: Array) -> Array:
    """Area under the ROC curve, ties counting half; nan when the labels hold one class only.

    Two classes: by the score of class 1, given as (rows,) or (rows, 2). More: one against the rest, averaged over the
    classes that occur. Only the order matters, so logits serve as well.
    """
    scores = probabilities[:, None] if probabilities.ndim == 1 else probabilities
    binary = scores.shape[1] <= 2
    truth = class_numbers(labels, 2 if binary else scores.shape[1])
    areas = []
    for positive in [1] if binary else np.unique(truth):
        mine = weights * (truth == positive)  # (samples, rows)
        pairs = mine.sum(axis=1) * (weights.sum(axis=1) - mine.sum(axis=1))
        ranks = _centred_ranks(scores[:, -1 if binary else positive], weights)
        areas.append(0.5 + _ratio(np.einsum("sr,sr->s", mine, ranks), pairs))
    return _mean_over_classes(np.stack(areas, axis=1))


@reads("probabilities")
def calibration_error(labels: Array, probabilities: Array, weights: Array, bins: int = 15) -> Array:
    """Expected calibration error of the top class over equal-width bins of confidence, (0, 1/bins] and so on.

    It is never negative and noise adds to it, so resampled values lie above the measured one on average: read its
    bootstrap interval as a cautious one.
    """
    columns = class_columns(probabilities)
    right = columns.argmax(axis=1) == class_numbers(labels, columns.shape[1])
    confidence = columns.max(axis=1)
    filled = np.clip(np.ceil(confidence * bins) - 1, 0, bins - 1)
    gaps = (filled[:, None] == np.arange(bins)) * (right - confidence)[:, None]  # (rows, bins)
    error: Array = np.abs(weights @ gaps).sum(axis=1) / weights.sum(axis=1)
    return error


@reads("probabilities")
def brier(labels: Array, probabilities: Array, weights: Array) -> Array:
    """Squared error of the probabilities, summed over classes, halved for two: the binary one is mean (p - y)²."""
    columns = class_columns(probabilities)
    classes = columns.shape[1]
    wanted = class_numbers(labels, classes)[:, None] == np.arange(classes)
    return _mean(((columns - wanted) ** 2).sum(axis=1) / (2 if classes == 2 else 1), weights)


@reads("probabilities")
def log_loss(labels: Array, probabilities: Array, weights: Array) -> Array:
    """Mean -log of the label's probability, which is held within 2.2e-16 of 0 and 1."""
    columns = class_columns(probabilities)
    given = columns[np.arange(len(labels)), class_numbers(labels, columns.shape[1])]
    epsilon = np.finfo(np.float64).eps
    return _mean(-np.log(np.clip(given, epsilon, 1 - epsilon)), weights)


@reads("values")
def pearson(labels: Array, predictions: Array, weights: Array) -> Array:
    """Linear correlation; nan when labels or predictions are constant up to rounding."""
    x, y = _within_one(labels), _within_one(predictions)
    mean_x, mean_y, xx, yy, xy = (_mean(each, weights) for each in (x, y, x * x, y * y, x * y))
    var_x, var_y = xx - mean_x**2, yy - mean_y**2
    varies = (var_x > 1e-12 * xx) & (var_y > 1e-12 * yy)
    return np.clip(_ratio(xy - mean_x * mean_y, np.sqrt(np.where(varies, var_x * var_y, 0.0))), -1, 1)


def _within_one(values: Array) -> Array:
    """Centred and scaled, which no correlation notices, so that sums of squares keep their digits; constant: zeros."""
    centred = values - values.mean()
    reach = np.abs(centred).max()
    return centred / reach if reach > 1e-13 * np.abs(values).max() else np.zeros_like(values)


@reads("values")
def spearman(labels: Array, predictions: Array, weights: Array) -> Array:
    """Correlation of the midranks; nan when labels or predictions are constant."""
    x, y = _centred_ranks(labels, weights), _centred_ranks(predictions, weights)
    xx, yy, xy = (np.einsum("sr,sr->s", weights * a, b) for a, b in ((x, x), (y, y), (x, y)))
    return np.clip(_ratio(xy, np.sqrt(xx * yy)), -1, 1)


@reads("values")
def mean_squared_error(labels: Array, predictions: Array, weights: Array) -> Array:
    """Mean squared difference."""
    return _mean((labels - predictions) ** 2, weights)


@reads("values")
def mean_absolute_error(labels: Array, predictions: Array, weights: Array) -> Array:
    """Mean absolute difference."""
    return _mean(np.abs(labels - predictions), weights)


@reads("values")
def retrieval(_labels: Array, found: Array, weights: Array) -> Array:
    """Share of rows whose second text is the nearest of all second texts; `found` is 1 for those, else 0, or between."""
    return _mean(found, weights)


@reads("values")
def masked_accuracy(labels: Array, predictions: Array, weights: Array) -> Array:
    """Share of masked tokens that were guessed right: a row's label is how many it has, its prediction how many were."""
    return _ratio(weights @ predictions, weights @ labels)


@reads("losses")
def perplexity(labels: Array, losses: Array, weights: Array) -> Array:
    """exp of the mean loss of a masked token: a row's label is how many it has, its loss that of all of them."""
    return np.exp(np.minimum(_ratio(weights @ losses, weights @ labels), 700.0))  # more is no float


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, classes: int) -> NDArray[np.intp]:
    """(classes, classes) counts: a row per true class, a column per predicted one."""
    truth, found = checked_rows("classes", labels, predictions)
    cells = class_numbers(truth, classes) * classes + class_numbers(found, classes)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def per_class_accuracy(labels: ArrayLike, predictions: ArrayLike, classes: int) -> Array:
    """(classes,) recall of each class; nan for a class that no label names."""
    counts = confusion_matrix(labels, predictions, classes).astype(np.float64)
    return _ratio(counts.diagonal(), counts.sum(axis=1))


# --- which metrics, and one number of them all ----------------------------------------------------------------------

_CLASSIFICATION = {
    "accuracy": accuracy,
    "macro-f1": macro_f1,
    "mean-class-accuracy": mean_class_accuracy,
    "roc-auc": roc_auc,
    "ece": calibration_error,
}
_REGRESSION = {"pearson": pearson, "spearman": spearman, "mse": mean_squared_error}

METRICS: dict[str, dict[str, Metric]] = {
    "classification": _CLASSIFICATION,
    "pair-classification": _CLASSIFICATION,
    "regression": _REGRESSION,
    "pair-regression": _REGRESSION,
    "contrastive": {"retrieval": retrieval},
    "masked": {"masked-accuracy": masked_accuracy, "perplexity": perplexity},
}
"""The metrics of each kind of task; the first is the primary one."""


def metrics_of(kind: str) -> dict[str, Metric]:
    if kind not in METRICS:
        raise MinbertError(f'task kind "{kind}" is unknown{suggest(kind, METRICS)}; expected {", ".join(METRICS)}')
    return METRICS[kind]


def primary_metric(kind: str) -> str:
    return next(iter(metrics_of(kind)))


def overall_2023(scores: Mapping[str, float]) -> float:
    """Mean of the tasks' primary metrics, by task name. A nan correlation counts as 0: constants tell nothing."""
    if not scores:
        raise MinbertError("no task scores found; expected at least one")
    return float(np.mean(np.nan_to_num(list(scores.values()))))


def overall_2024(scores: Mapping[str, float], kinds: Mapping[str, str]) -> float:
    """As `overall_2023`, with each correlation r first brought to 0..1 as (r + 1) / 2 (so nan gives 0.5)."""
    for task in scores:
        if task not in kinds:
            raise MinbertError(f'task "{task}" has a score but no kind; kinds are given for {", ".join(kinds)}')
    correlated = {task for task in scores if primary_metric(kinds[task]) == "pearson"}
    return overall_2023({t: (float(np.nan_to_num(s)) + 1) / 2 if t in correlated else s for t, s in scores.items()})
