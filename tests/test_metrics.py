"""Metrics against scipy and scikit-learn, and on input that has no answer."""

from __future__ import annotations

import math
import pickle
import warnings
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from sklearn import metrics as authority

from minbert.errors import MinbertError
from minbert.evaluation.bootstrap import bootstrap, paired_bootstrap
from minbert.evaluation.metrics import (
    Metric,
    accuracy,
    brier,
    calibration_error,
    confusion_matrix,
    log_loss,
    macro_f1,
    masked_accuracy,
    mean_absolute_error,
    mean_class_accuracy,
    mean_squared_error,
    metrics_of,
    overall_2023,
    overall_2024,
    pearson,
    per_class_accuracy,
    perplexity,
    primary_metric,
    roc_auc,
    spearman,
)

pytestmark = pytest.mark.filterwarnings("error:::minbert")  # nothing of ours may print a warning
quick = settings(max_examples=60, deadline=None)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@st.composite
def class_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions of up to five classes, often with some of them missing."""
    rows = draw(st.integers(1, 40))
    labels, predictions = (draw(arrays(np.int64, rows, elements=st.integers(0, draw(st.integers(0, 4))))) for _ in "lp")
    return labels, predictions


@st.composite
def value_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions in tenths, so that ties are common."""
    rows = draw(st.integers(2, 40))
    tenths = st.integers(-50, 50).map(lambda tenth: tenth / 10)
    return draw(arrays(np.float64, rows, elements=tenths)), draw(arrays(np.float64, rows, elements=tenths))


@st.composite
def probability_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Labels and (rows, classes) probabilities made of small whole parts, so that ties are common."""
    classes, rows = draw(st.integers(2, 4)), draw(st.integers(1, 30))
    parts = draw(arrays(np.int64, (rows, classes), elements=st.integers(0, 6))) + 1e-3
    return draw(arrays(np.int64, rows, elements=st.integers(0, classes - 1))), parts / parts.sum(axis=1, keepdims=True)


# --- against authorities --------------------------------------------------------------------------------------------


@pytest.mark.parity
@quick
@given(class_rows())
@pytest.mark.filterwarnings("ignore::UserWarning:sklearn")
def test_class_metrics_agree_with_sklearn(rows: tuple[np.ndarray, np.ndarray]) -> None:
    labels, predictions = rows
    assert accuracy(labels, predictions) == pytest.approx(authority.accuracy_score(labels, predictions))
    assert macro_f1(labels, predictions) == pytest.approx(authority.f1_score(labels, predictions, average="macro"))
    balanced = authority.balanced_accuracy_score(labels, predictions)
    assert mean_class_accuracy(labels, predictions) == pytest.approx(balanced)
    expected = authority.confusion_matrix(labels, predictions, labels=range(5))
    np.testing.assert_array_equal(confusion_matrix(labels, predictions, 5), expected)
    assert np.nanmean(per_class_accuracy(labels, predictions, 5)) == pytest.approx(balanced)


@pytest.mark.parity
@quick
@given(value_rows())
@pytest.mark.filterwarnings("ignore:An input array")
def test_correlations_and_errors_agree_with_scipy_and_sklearn(rows: tuple[np.ndarray, np.ndarray]) -> None:
    labels, predictions = rows
    for ours, theirs in ((pearson, stats.pearsonr), (spearman, stats.spearmanr)):
        assert ours(labels, predictions) == pytest.approx(theirs(labels, predictions).statistic, abs=1e-9, nan_ok=True)
    squared = authority.mean_squared_error(labels, predictions)
    assert mean_squared_error(labels, predictions) == pytest.approx(squared)
    absolute = authority.mean_absolute_error(labels, predictions)
    assert mean_absolute_error(labels, predictions) == pytest.approx(absolute)


@pytest.mark.parity
@quick
@given(probability_rows())
def test_probability_metrics_agree_with_sklearn(rows: tuple[np.ndarray, np.ndarray]) -> None:
    labels, probabilities = rows
    classes = list(range(probabilities.shape[1]))
    loss = authority.log_loss(labels, probabilities, labels=classes)
    assert log_loss(labels, probabilities) == pytest.approx(loss)
    squared = ((probabilities - np.eye(len(classes))[labels]) ** 2).sum(axis=1).mean()
    assert brier(labels, probabilities) == pytest.approx(squared / 2 if len(classes) == 2 else squared)

    present = np.unique(labels)
    if len(present) == 1:
        assert math.isnan(roc_auc(labels, probabilities))
    elif len(classes) == 2:
        area = authority.roc_auc_score(labels, probabilities[:, 1])
        assert roc_auc(labels, probabilities) == pytest.approx(area)
        assert roc_auc(labels, probabilities[:, 1]) == pytest.approx(area)
        expected = authority.brier_score_loss(labels, probabilities[:, 1], pos_label=1)
        assert brier(labels, probabilities[:, 1]) == pytest.approx(expected)
        assert log_loss(labels, probabilities[:, 1]) == pytest.approx(loss)
    else:
        areas = [authority.roc_auc_score(labels == each, probabilities[:, each]) for each in present]
        assert roc_auc(labels, probabilities) == pytest.approx(np.mean(areas))


@pytest.mark.parity
def test_multiclass_roc_auc_is_sklearns_macro_one_vs_rest() -> None:
    labels, probabilities = rng().integers(0, 5, 300), rng(1).dirichlet(np.ones(5), 300)
    expected = authority.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert roc_auc(labels, probabilities) == pytest.approx(expected)


def test_per_class_accuracy_names_the_absent_class() -> None:
    np.testing.assert_equal(per_class_accuracy([0, 0, 2], [0, 1, 2], 3), [0.5, np.nan, 1.0])


# --- degenerate input -----------------------------------------------------------------------------------------------


def test_masked_tokens_count_whatever_row_they_are_in() -> None:
    """Three rows with 1, 3 and 0 tokens to guess, of which 1, 1 and 0 were right."""
    assert masked_accuracy([1, 3, 0], [1, 1, 0]) == 0.5
    assert perplexity([1, 3, 0], [0.5, 5.5, 0.0]) == pytest.approx(math.exp(1.5))
    assert math.isnan(masked_accuracy([0], [0]))
    assert math.isnan(perplexity([0], [0.0]))
    assert math.isfinite(perplexity([1], [1e6])), "JSON knows no infinity"


@pytest.mark.parametrize("metric", [pearson, spearman])
@pytest.mark.parametrize("constant", [0.1, 0.0, 1e9 / 3])
def test_correlation_with_a_constant_is_nan_without_a_warning(metric: Metric, constant: float) -> None:
    labels = np.arange(7.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(metric(labels, np.full(7, constant)))
        assert math.isnan(metric(np.full(7, constant), labels))
        assert math.isnan(metric([1.0], [2.0]))
        interval = bootstrap(metric, labels, np.full(7, constant), rng=rng(), samples=20)
        assert all(math.isnan(number) for number in asdict(interval).values())
        result = paired_bootstrap(metric, labels, labels, np.full(7, constant), rng=rng(), samples=20)
        assert math.isnan(result.p_value)
        assert math.isnan(result.wins)


@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_pearson_keeps_its_digits_at_any_scale_and_offset(scale: float) -> None:
    x, y = rng().normal(size=(2, 50))
    assert pearson(x * scale, y) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert pearson(x + 1e6, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-8)


EVERY_METRIC = [
    *(accuracy, macro_f1, mean_class_accuracy, roc_auc, calibration_error, brier, log_loss),
    *(pearson, spearman, mean_squared_error, mean_absolute_error),
]


@pytest.mark.parametrize("metric", EVERY_METRIC, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize(
    ("labels", "outputs", "message"),
    [
        ([], [], r"labels has shape \(0,\); expected \(rows,\) with at least one row"),
        ([0, 1], [1], r"labels has 2 rows and \w+ 1; expected equally many"),
        ([0, math.nan], [0, 1], r"labels holds 1 NaN or infinite values; expected numbers"),
        ([0, 1], [0, math.inf], r"\w+ holds 1 NaN or infinite values; expected numbers"),
        ([[0, 1]], [0], r"labels has shape \(1, 2\); expected \(rows,\) with"),
        (["good"], [0], r"labels cannot be read as numbers"),
        ([0], [[[1]]], r"\w+ has shape \(1, 1, 1\); expected \(rows,\)"),
    ],
)
def test_bad_rows_are_named_in_one_line(metric: Metric, labels: Any, outputs: Any, message: str) -> None:
    with pytest.raises(MinbertError, match=message) as caught:
        metric(labels, outputs)
    assert "\n" not in str(caught.value)
    with pytest.raises(MinbertError, match=message):
        bootstrap(metric, labels, outputs, rng=rng())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accuracy([0, 1], [0.2, 1]), "predictions holds 0.2; expected class numbers"),
        (lambda: roc_auc([0, 0.5], [0.2, 1]), "labels holds 0.5; expected class numbers"),
        (lambda: roc_auc([0, 2], [0.2, 1]), "class 2 found; expected 0 to 1"),
        (lambda: log_loss([0, 1], [-3, 4]), r"probabilities reach from -3 to 4; expected 0 to 1 \(logits"),
        (lambda: brier([0], [[0.5, 0.9]]), "a row of probabilities sums to 1.4; expected 1"),
        (lambda: confusion_matrix([0, 3], [0, 1], 3), "class 3 found; expected 0 to 2"),
        (lambda: metrics_of("regresion"), r'kind "regresion" is unknown \(did you mean "regression"'),
        (lambda: overall_2023({}), "no task scores found; expected at least one"),
        (lambda: overall_2024({"sst": 0.5}, {"sts": "regression"}), 'task "sst" has a score but no kind'),
    ],
)
def test_what_cannot_be_scored_is_said(call: Any, message: str) -> None:
    with pytest.raises(MinbertError, match=message):
        call()


# --- which metrics, and one number of them all ----------------------------------------------------------------------


@pytest.mark.parametrize("metric", EVERY_METRIC, ids=lambda metric: metric.__name__)
def test_metrics_are_documented_and_can_be_sent_to_another_process(metric: Metric) -> None:
    assert metric.__doc__ != Metric.__doc__
    assert pickle.loads(pickle.dumps(metric)) is metric


def test_overall_scores() -> None:
    kinds = {"sst": "classification", "para": "pair-classification", "sts": "pair-regression"}
    assert [primary_metric(kind) for kind in kinds.values()] == ["accuracy", "accuracy", "pearson"]
    scores = {"sst": 0.5, "para": 0.9, "sts": 0.4}
    assert overall_2023(scores) == pytest.approx((0.5 + 0.9 + 0.4) / 3)
    assert overall_2024(scores, kinds) == pytest.approx((0.5 + 0.9 + 0.7) / 3)
    constant = scores | {"sts": math.nan}
    assert overall_2023(constant) == pytest.approx((0.5 + 0.9) / 3)
    assert overall_2024(constant, kinds) == pytest.approx((0.5 + 0.9 + 0.5) / 3)
