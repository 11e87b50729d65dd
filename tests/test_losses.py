"""Losses against torch, scikit-learn, sentence-transformers and plain numpy; weightings and gradients by formula."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from minbert.config import TrainingConfig
from minbert.task_checks import check_task
from minbert.tasks import CONTRASTIVE, LOSSES, Task
from minbert.training.gradients import add_gradients
from minbert.training.losses import (
    WEIGHTINGS,
    LossWeighting,
    MeanWeighting,
    UncertaintyWeighting,
    binary_cross_entropy,
    build_loss,
    cosent,
    cosine_mse,
    cross_entropy,
    mean_squared_error,
    sigmoid_mse,
    thresholded_bce,
)

ROWS = 12


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classes_of(count: int) -> Tensor:
    """Labels as batches bring them: floats."""
    return (torch.arange(ROWS) * 7 % count).float()


def scores_of(low: float = 0.0, high: float = 5.0) -> Tensor:
    return low + (high - low) * torch.rand(ROWS, generator=torch.Generator().manual_seed(1))


def classifier(count: int, **row: Any) -> Task:
    return check_task(Task("t", "classification", classes=tuple("abcdef"[:count]), **row))


def scorer(**row: Any) -> Task:
    return check_task(Task("t", "pair-regression", text2="b", **row))


def probabilities(logits: Tensor) -> np.ndarray:
    powers = np.exp(logits.double().numpy())
    return powers / powers.sum(1, keepdims=True)


def guesser() -> Task:
    return check_task(Task("mlm", "masked"))


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
def test_cross_entropy_is_scikit_learns_log_loss(weights: list[float] | None) -> None:
    logits, labels = random(ROWS, 3), classes_of(3)
    table = None if weights is None else torch.tensor(weights)
    rows = None if weights is None else np.array(weights)[labels.long().numpy()]
    expected = log_loss(labels.numpy(), probabilities(logits), sample_weight=rows)
    assert cross_entropy(logits, labels, class_weights=table).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_smoothing_gives_each_class_its_share_of_the_target(smoothing: float) -> None:
    logits, labels = random(ROWS, 4), classes_of(4)
    targets = np.eye(4)[labels.long().numpy()] * (1 - smoothing) + smoothing / 4
    expected = -(targets * np.log(probabilities(logits))).sum(1).mean()
    assert cross_entropy(logits, labels, smoothing=smoothing).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_binary_cross_entropy_is_scikit_learns_log_loss(weights: list[float] | None) -> None:
    logits, labels = random(ROWS, 1), classes_of(2)
    chance = 1 / (1 + np.exp(-logits[:, 0].double().numpy()))
    rows = None if weights is None else np.array(weights)[labels.long().numpy()]
    expected = log_loss(labels.numpy(), chance, sample_weight=rows)
    table = None if weights is None else torch.tensor(weights)
    assert binary_cross_entropy(logits, labels, class_weights=table).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_binary_cross_entropy_is_torchs(smoothing: float) -> None:
    logits, labels = random(ROWS, 1), classes_of(2)
    targets = labels * (1 - smoothing) + smoothing / 2
    expected = F.binary_cross_entropy_with_logits(logits[:, 0], targets)
    torch.testing.assert_close(binary_cross_entropy(logits, labels, smoothing=smoothing), expected)


@settings(max_examples=50, deadline=None)
@given(
    weights=st.none() | st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 9),
)
def test_one_logit_and_two_cost_the_same(weights: tuple[float, float] | None, smoothing: float, seed: int) -> None:
    """Two logits count by their difference: with it as the single one, bce is cross-entropy, gradients too."""
    two = random(ROWS, 2, seed=seed).requires_grad_()
    one = (two.detach()[:, 1:] - two.detach()[:, :1]).requires_grad_()
    table = None if weights is None else torch.tensor(weights)
    wide = cross_entropy(two, classes_of(2), smoothing=smoothing, class_weights=table)
    narrow = binary_cross_entropy(one, classes_of(2), smoothing=smoothing, class_weights=table)
    wide.backward()
    narrow.backward()
    torch.testing.assert_close(narrow, wide)
    assert one.grad is not None
    assert two.grad is not None
    torch.testing.assert_close(one.grad, two.grad[:, 1:])


def test_a_class_without_weight_does_not_count() -> None:
    logits, labels = random(ROWS, 3), classes_of(3)
    kept = labels != 1
    found = cross_entropy(logits, labels, class_weights=torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(found, F.cross_entropy(logits[kept], labels[kept].long()))


def test_logits_that_are_sure_and_wrong_stay_finite() -> None:
    assert binary_cross_entropy(torch.tensor([[200.0], [-200.0]]), torch.tensor([0.0, 1.0])).item() == 200
    assert cross_entropy(torch.tensor([[200.0, 0.0]]), torch.tensor([1.0])).item() == 200


# --- scores ---------------------------------------------------------------------------------------------------------


def test_thresholded_bce_counts_what_lies_above_as_one() -> None:
    logits, scores = random(6, 1), torch.tensor([0.0, 2.0, 2.5, 2.6, 3.0, 5.0])
    expected = F.binary_cross_entropy_with_logits(logits[:, 0], torch.tensor([0.0, 0, 0, 1, 1, 1]))
    torch.testing.assert_close(thresholded_bce(logits, scores, threshold=2.5), expected)


def test_mean_squared_error_by_hand() -> None:
    assert mean_squared_error(torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 4.5])).item() == (4 + 0.25) / 2


def test_sigmoid_mse_lays_the_sigmoid_over_the_scale() -> None:
    """A logit of 0 is the middle, 3; a large one the top, 5."""
    found = sigmoid_mse(torch.tensor([[0.0], [100.0]]), torch.tensor([4.0, 3.0]), low=1.0, high=5.0)
    assert found.item() == (1 + 4) / 2


def test_cosine_mse_compares_the_cosine_with_the_score_brought_to_one() -> None:
    outputs, scores = torch.tensor([[2.5], [-5.0]]), torch.tensor([3.0, 1.0])  # cosines 0.5 and -1; scores 0.5 and 0
    assert cosine_mse(outputs, scores, scale=5.0, low=1.0, high=5.0).item() == pytest.approx((0 + 1) / 2)


def plain_cosent(cosines: np.ndarray, scores: np.ndarray, sharpness: float = 20.0) -> float:
    total = 1.0
    for lower in range(len(scores)):
        for higher in range(len(scores)):
            if scores[lower] < scores[higher]:
                total += math.exp(sharpness * (cosines[lower] - cosines[higher]))
    return math.log(total)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-1, 1, width=32), st.sampled_from([0.0, 1.0, 2.5, 5.0])), min_size=1, max_size=8),
    scale=st.sampled_from([1.0, 5.0]),
)
def test_cosent_is_its_formula(rows: list[tuple[float, float]], scale: float) -> None:
    cosines, scores = np.array(rows).T
    outputs = torch.tensor(cosines * scale)[:, None]
    found = cosent(outputs, torch.tensor(scores), scale=scale)
    assert found.item() == pytest.approx(plain_cosent(cosines, scores), rel=1e-9, abs=1e-9)


@pytest.mark.parity
def test_cosent_is_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

    u, v = random(ROWS, 8), random(ROWS, 8, seed=1)
    scores = (torch.arange(ROWS) % 5).float()
    theirs = CoSENTLoss(model=None).compute_loss_from_embeddings([u, v], scores)  # type: ignore[arg-type]
    ours = cosent(F.cosine_similarity(u, v)[:, None] * 5, scores, scale=5)
    torch.testing.assert_close(ours, theirs)


def test_cosent_of_equal_scores_is_nothing_and_asks_for_nothing() -> None:
    outputs = random(ROWS, 1).requires_grad_()
    loss = cosent(outputs, torch.full((ROWS,), 3.0))
    loss.backward()
    assert loss.item() == 0
    assert outputs.grad is not None
    assert torch.equal(outputs.grad, torch.zeros(ROWS, 1))


def test_cosent_pulls_a_pair_in_the_wrong_order_apart() -> None:
    outputs = torch.tensor([[0.9], [0.1]], requires_grad=True)
    cosent(outputs, torch.tensor([1.0, 4.0])).backward()
    assert outputs.grad is not None
    assert outputs.grad[0] > 0 > outputs.grad[1]


# --- from the table -------------------------------------------------------------------------------------------------


def test_every_loss_of_the_table_is_built_with_the_tasks_settings() -> None:
    many, one, scores = random(ROWS, 3), random(ROWS, 1), scores_of()
    weights = torch.tensor([1.0, 2.0, 3.0])
    asked = {
        "cross-entropy": (
            classifier(3, label_smoothing=0.1, class_weights=(1.0, 2.0, 3.0)),
            (many, classes_of(3)),
            cross_entropy(many, classes_of(3), smoothing=0.1, class_weights=weights),
        ),
        "bce": (
            classifier(2, loss="bce", label_smoothing=0.1, class_weights=(1.0, 2.0)),
            (one, classes_of(2)),
            binary_cross_entropy(one, classes_of(2), smoothing=0.1, class_weights=weights[:2]),
        ),
        "mse": (scorer(), (one, scores), F.mse_loss(one[:, 0], scores)),
        "cosine-mse": (
            scorer(head="cosine", loss="cosine-mse", low=-1.0, high=5.0, scale=2.0),
            (one, scores),
            F.mse_loss(one[:, 0] / 2, (scores + 1) / 6),
        ),
        "cosent": (
            scorer(head="cosine", loss="cosent", scale=2.0),
            (one, scores),
            torch.tensor(plain_cosent((one[:, 0] / 2).double().numpy(), scores.double().numpy())).float(),
        ),
        "sigmoid-mse": (
            scorer(loss="sigmoid-mse", low=1.0, high=5.0),
            (one, scores),
            F.mse_loss(1 + 4 * torch.sigmoid(one[:, 0]), scores),
        ),
        "bce-threshold": (
            scorer(loss="bce-threshold", threshold=4.0),
            (one, scores),
            F.binary_cross_entropy_with_logits(one[:, 0], (scores > 4).float()),
        ),
        "masked-lm": (
            guesser(),
            (random(ROWS, 7), classes_of(7)),
            F.cross_entropy(random(ROWS, 7), classes_of(7).long()),
        ),
    }
    assert set(asked) == set(LOSSES) - set(CONTRASTIVE)  # which have a file of their own
    for name, (task, tensors, expected) in asked.items():
        assert task.loss == name
        found = build_loss(task)(*tensors)
        assert found.shape == ()
        torch.testing.assert_close(found, expected, msg=name)


def test_a_threshold_that_is_not_given_is_the_middle_of_the_scale() -> None:
    outputs, scores = random(ROWS, 1), scores_of(1, 4)
    expected = F.binary_cross_entropy_with_logits(outputs[:, 0], (scores > 2.5).float())
    torch.testing.assert_close(build_loss(scorer(loss="bce-threshold", low=1.0, high=4.0))(outputs, scores), expected)


# --- rows that are not there ----------------------------------------------------------------------------------------

WITH_GAPS: dict[str, tuple[Task, int]] = {
    # a task and the number of its outputs
    "cross-entropy": (classifier(3), 3),
    "cross-entropy, weighted and smoothed": (classifier(3, class_weights=(1.0, 2.0, 0.5), label_smoothing=0.2), 3),
    "bce": (classifier(2, loss="bce"), 1),
    "bce, weighted and smoothed": (classifier(2, loss="bce", class_weights=(1.0, 3.0), label_smoothing=0.1), 1),
    "mse": (scorer(), 1),
    "sigmoid-mse": (scorer(loss="sigmoid-mse", low=1.0, high=5.0), 1),
    "cosine-mse": (scorer(head="cosine", loss="cosine-mse", low=-1.0, high=5.0, scale=2.0), 1),
    "cosent": (scorer(head="cosine", loss="cosent", scale=2.0), 1),
    "bce-threshold": (scorer(loss="bce-threshold", threshold=2.0), 1),
    **{name: (scorer(head="cosine", loss=name), 8) for name in CONTRASTIVE},
    "masked-lm": (guesser(), 7),
}


def test_every_loss_is_tried_with_gaps() -> None:
    assert {task.loss for task, _ in WITH_GAPS.values()} == set(LOSSES)


@pytest.mark.parametrize("name", WITH_GAPS)
@pytest.mark.parametrize("missing", [[], [0], [ROWS - 1], [2, 3, 7, 10, 11], list(range(1, ROWS))])
def test_a_row_without_a_label_counts_for_nothing(name: str, missing: list[int]) -> None:
    """Value and gradient are those of the rows that are there; the others' gradient is 0."""
    task, width = WITH_GAPS[name]
    classes = 7 if task.is_masked else len(task.classes)
    labels = classes_of(classes) if classes else scores_of()
    there = torch.ones(ROWS, dtype=torch.bool)
    there[missing] = False
    gaps = labels.masked_fill(~there, math.nan)
    outputs, alone = random(ROWS, width).requires_grad_(), random(ROWS, width)[there].requires_grad_()
    loss = build_loss(task)
    found, expected = loss(outputs, gaps), loss(alone, labels[there])
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert outputs.grad is not None
    torch.testing.assert_close(outputs.grad[there], alone.grad)
    assert not outputs.grad[~there].any()


# --- the losses of several tasks ------------------------------------------------------------------------------------


@pytest.fixture
def tasks() -> list[Task]:
    return [
        check_task(Task("class", "classification", classes=("a", "b"), weight=2.0)),
        check_task(Task("score", "regression", weight=0.5)),
        check_task(Task("idle", "regression")),
    ]


def losses_of(first: float = 3.0, second: float = 8.0) -> dict[str, Tensor]:
    """A step of two tasks out of three."""
    return {"class": torch.tensor(first, requires_grad=True), "score": torch.tensor(second, requires_grad=True)}


def values(losses: dict[str, Tensor]) -> dict[str, float]:
    return {task: loss.item() for task, loss in losses.items()}


def test_every_weighting_that_a_recipe_may_name_is_there() -> None:
    assert set(WEIGHTINGS) == set(get_type_hints(TrainingConfig)["loss_weighting"].__args__)


def test_sum_multiplies_with_the_tasks_weights(tasks: list[Task]) -> None:
    assert values(LossWeighting(tasks)(losses_of())) == {"class": 6, "score": 4}
    assert not list(LossWeighting(tasks).parameters())


def test_mean_divides_by_the_tasks_of_the_step(tasks: list[Task]) -> None:
    weighting = MeanWeighting(tasks)
    assert values(weighting(losses_of())) == {"class": 3, "score": 2}
    assert values(weighting({"class": torch.tensor(3.0)})) == {"class": 6}


def test_uncertainty_starts_with_the_losses_of_kendall(tasks: list[Task]) -> None:
    assert values(UncertaintyWeighting(tasks)(losses_of())) == {"class": 6, "score": 2}


def test_uncertainty_by_formula_with_its_gradients(tasks: list[Task]) -> None:
    weighting = UncertaintyWeighting(tasks)
    with torch.no_grad():
        weighting.log_variances["class"].fill_(0.7)
        weighting.log_variances["score"].fill_(-0.4)
    losses = losses_of()
    weighted = weighting(losses)
    expected = {"class": math.exp(-0.7) * 6 + 0.35, "score": math.exp(0.4) * 4 / 2 - 0.2}
    assert values(weighted) == pytest.approx(expected, rel=1e-6)

    add_gradients(weighted)
    slopes = {name: None if s.grad is None else s.grad.item() for name, s in weighting.log_variances.items()}
    assert slopes["idle"] is None  # not in this step
    assert slopes["class"] == pytest.approx(-math.exp(-0.7) * 6 + 0.5, rel=1e-6)
    assert slopes["score"] == pytest.approx(-math.exp(0.4) * 4 / 2 + 0.5, rel=1e-6)
    assert losses["class"].grad is not None
    assert losses["class"].grad.item() == pytest.approx(2 * math.exp(-0.7), rel=1e-6)
    assert losses["score"].grad is not None
    assert losses["score"].grad.item() == pytest.approx(0.5 * math.exp(0.4) / 2, rel=1e-6)


def test_uncertainty_learns_the_noise(tasks: list[Task]) -> None:
    """Where the derivative is 0: the variance is twice the loss of a class, and the very loss of a score."""
    weighting = UncertaintyWeighting(tasks)
    optimizer = torch.optim.SGD(weighting.parameters(), lr=0.2)
    for _ in range(200):
        optimizer.zero_grad()
        add_gradients(weighting({"class": torch.tensor(0.75), "score": torch.tensor(1.0)}))
        optimizer.step()
    assert weighting.log_variances["class"].exp().item() == pytest.approx(2 * 2.0 * 0.75, rel=1e-3)
    assert weighting.log_variances["score"].exp().item() == pytest.approx(0.5 * 1.0, rel=1e-3)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_task_with_weight_nought_teaches_nothing(name: str) -> None:
    weighting = WEIGHTINGS[name]([check_task(Task("score", "regression", weight=0.0))])
    loss = torch.tensor(5.0, requires_grad=True)
    add_gradients(weighting({"score": loss}))
    assert loss.grad is not None
    assert loss.grad.item() == 0


# --- gradients ------------------------------------------------------------------------------------------------------


def losses_through(layer: nn.Linear) -> dict[str, Tensor]:
    outputs = layer(random(ROWS, 4))
    return {"a": outputs[:, 0].square().mean(), "b": outputs[:, 1].exp().mean(), "c": (outputs.sum(1) - 1).abs().mean()}


def test_add_gradients_is_the_gradient_of_the_sum() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    expected = torch.autograd.grad(torch.stack(list(losses_through(layer).values())).sum(), list(layer.parameters()))
    add_gradients(losses_through(layer))
    for weight, slope in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, slope)


def test_add_gradients_adds_to_what_is_there() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    expected = torch.autograd.grad(losses_through(layer)["b"], list(layer.parameters()))
    for weight in layer.parameters():
        weight.grad = torch.full_like(weight, 3.0)
    add_gradients({"b": losses_through(layer)["b"]})
    for weight, slope in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, slope + 3)


def test_add_gradients_of_what_cannot_learn_does_nothing() -> None:
    """A cosine head on a frozen encoder."""
    add_gradients({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
