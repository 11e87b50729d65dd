"""Contrastive tasks: losses against plain loops and sentence-transformers, views, files, heads, and GradCache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from minbert.config import SAMPLE
from minbert.data.check import check_data
from minbert.data.inputs import Inputs, collate, tokenize
from minbert.data.raw import EMPTY_TEXT, Examples, read_split
from minbert.data.streams import Part
from minbert.delivery.files import predict_file
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from minbert.evaluating import evaluate_model
from minbert.evaluation.evaluate import overall
from minbert.evaluation.report import write_report
from minbert.evaluation.results import compare_runs, read_predictions
from minbert.experiment import train
from minbert.model.heads import build_head
from minbert.model.multitask import MultitaskModel, encode_pooled, outputs_of, ready
from minbert.recipes import parse_recipe, to_toml
from minbert.task_checks import check_task
from minbert.tasks import CONTRASTIVE, HEADS, LOSSES, Task
from minbert.training.contrastive import anchors_of, build_contrastive
from minbert.training.feeding import InChunks, OneByOne
from minbert.training.losses import UncertaintyWeighting, build_loss
from tests.models import PAIRS, TEXTS, make, shake
from tests.runs import Listener, Stopped, small_recipe, small_trainer, unlike

ROWS, DIM = 6, 5
COMPARING = [name for name, row in HEADS.items() if row.compares]
NAMES = list(CONTRASTIVE)


def contrastive(columns: int = 2, **row: Any) -> Task:
    texts = {"text2": "b" if columns > 1 else "", "text3": "c" if columns > 2 else ""}
    return check_task(Task("t", "contrastive", head=row.pop("head", "cosine"), **texts, **row))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- the losses once more, in plain Python --------------------------------------------------------------------------


def cosine(u: Sequence[float], v: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(u, v, strict=True)) / (math.hypot(*u) * math.hypot(*v))


def plain_loss(name: str, views: list[list[list[float]]], anchors: list[int], there: list[int], heat: float) -> float:
    """views[v][i] is the vector of row i's text v."""
    costs = []
    for i in anchors:
        anchor, partner = views[0][i], views[1][i]
        positive = math.exp(cosine(anchor, partner) / heat)
        if name in ("simcse", "mnr"):  # the second texts of all rows, and all thirds
            below = sum(math.exp(cosine(anchor, view[j]) / heat) for view in views[1:] for j in there)
        else:  # all texts but the anchor itself and its partner
            others = [(v, j) for v in range(len(views)) for j in there if (v, j) not in ((0, i), (1, i))]
            below = sum(math.exp(cosine(anchor, views[v][j]) / heat) for v, j in others)
            if name == "info-nce":
                below += positive
        costs.append(-math.log(positive / below))
    return sum(costs) / len(costs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("heat", [0.05, 0.5])
def test_a_loss_is_its_formula(name: str, columns: int, heat: float) -> None:
    count = max(2, columns)
    vectors = random(ROWS, count * DIM, seed=columns, dtype=torch.float64)
    labels = torch.tensor([0.0, math.nan, 0.0, 0.0, math.nan, 0.0])
    there = [0, 2, 3, 5]
    views = [[row[v * DIM : (v + 1) * DIM] for row in vectors.tolist()] for v in range(count)]
    found = build_loss(contrastive(columns, loss=name, temperature=heat))(vectors, labels)
    assert found.shape == ()
    assert found.item() == pytest.approx(plain_loss(name, views, there, there, heat), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pair-classification", "pair-regression"])
def test_of_labelled_pairs_the_positive_ones_are_anchors_and_all_are_candidates(name: str, kind: Any) -> None:
    classes = ("different", "duplicate") if kind == "pair-classification" else ()
    labels = torch.tensor([1.0, 0.0, 1.0, math.nan, 0.0, 1.0] if classes else [3.1, 3.0, 5.0, math.nan, 0.0, 4.0])
    task = Task("t", kind, text2="b", classes=classes, head="cosine", loss=name, temperature=0.3, threshold=3.0)
    vectors = random(ROWS, 2 * DIM, dtype=torch.float64)
    views = [[row[:DIM] for row in vectors.tolist()], [row[DIM:] for row in vectors.tolist()]]
    expected = plain_loss(name, views, [0, 2, 5], [0, 1, 2, 4, 5], 0.3)
    assert build_loss(check_task(task))(vectors, labels).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["mnr", "simcse"])
@pytest.mark.parametrize("columns", [2, 3])
def test_the_ranking_loss_is_that_of_sentence_transformers(name: str, columns: int) -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    vectors = random(12, columns * 8).requires_grad_()
    peers = vectors.detach().clone().requires_grad_()
    theirs = MultipleNegativesRankingLoss(None)  # type: ignore[arg-type]
    expected = theirs.compute_loss_from_embeddings(list(peers.chunk(columns, dim=1)), torch.zeros(0))
    found = build_loss(contrastive(columns, loss=name))(vectors, torch.zeros(12))
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(vectors.grad, peers.grad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_gradients_are_those_of_the_formula(name: str, columns: int) -> None:
    labels = torch.tensor([0.0, 0.0, math.nan, 0.0])
    loss = build_loss(contrastive(columns, loss=name, temperature=0.4))
    vectors = random(4, max(2, columns) * 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), vectors)


# --- cases worked by hand -------------------------------------------------------------------------------------------

TWO_ROWS = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
"""Each first text is its second, and at a right angle to the other row."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mnr", math.log(math.e + 1) - 1),  # the other second
        ("simcse", math.log(math.e + 1) - 1),
        ("info-nce", math.log(math.e + 2) - 1),  # the other row's both texts
        ("info-nce-printed", math.log(2) - 1),
    ],
)
def test_two_rows_at_a_right_angle(name: str, expected: float) -> None:
    found = build_loss(contrastive(loss=name, temperature=1.0))(TWO_ROWS, torch.zeros(2))
    assert found.item() == pytest.approx(expected)
    assert (found < 0) == (name == "info-nce-printed")


def test_a_hard_negative_of_any_row_is_a_candidate() -> None:
    vectors = torch.cat([TWO_ROWS, torch.tensor([[0.0, 1.0], [1.0, 0.0]])], dim=1)  # each third is the other's first
    found = build_loss(contrastive(3, temperature=1.0))(vectors, torch.zeros(2))
    assert found.item() == pytest.approx(math.log(2 * math.e + 2) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_anchors_costs_nothing_and_teaches_nothing(name: str) -> None:
    task = check_task(Task("t", "pair-regression", text2="b", head="cosine", loss=name))
    for labels in (torch.zeros(ROWS), torch.full((ROWS,), math.nan)):
        vectors = random(ROWS, 2 * DIM).requires_grad_()
        loss = build_loss(task)(vectors, labels)
        loss.backward()
        assert loss.item() == 0
        assert vectors.grad is not None
        assert not vectors.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_an_anchor_alone_in_its_batch_costs_nothing(name: str) -> None:
    vectors = random(3, 2 * DIM).requires_grad_()
    loss = build_loss(contrastive(loss=name))(vectors, torch.tensor([math.nan, 0.0, math.nan]))
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert vectors.grad is not None
    assert vectors.grad.abs().max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [2, 3])
def test_filling_rows_are_neither_anchors_nor_candidates(name: str, columns: int) -> None:
    """Even where they are the very texts of a row that is there, as those of a fixed layout are."""
    loss = build_loss(contrastive(columns, loss=name))
    alone = random(ROWS, columns * DIM).requires_grad_()
    filled = torch.cat([alone.detach(), alone.detach()[:1].expand(4, -1)]).requires_grad_()
    labels = torch.tensor([0.0] * ROWS + [math.nan] * 4)
    found, expected = loss(filled, labels), loss(alone, labels[:ROWS])
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert filled.grad is not None
    torch.testing.assert_close(filled.grad[:ROWS], alone.grad)
    assert not filled.grad[ROWS:].any()


def test_the_same_sentence_in_two_rows_is_not_left_out() -> None:
    """Neither partner can win: both rows cost log 2 at least."""
    same = torch.tensor([[1.0, 0.0, 0.0, 1.0]]).expand(2, -1)
    assert build_loss(contrastive())(same, torch.zeros(2)).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", NAMES)
def test_a_low_temperature_overflows_nothing(name: str) -> None:
    vectors = torch.cat([TWO_ROWS, TWO_ROWS, -TWO_ROWS]).requires_grad_()
    loss = build_loss(contrastive(loss=name, temperature=1e-4))(vectors, torch.zeros(6))
    loss.backward()
    assert loss.isfinite()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()


def test_a_loss_has_its_papers_temperature_unless_the_task_says_otherwise() -> None:
    found = {name: contrastive(loss=name).temperature for name in NAMES}
    assert found == {"simcse": 0.05, "mnr": 0.05, "info-nce": 0.007, "info-nce-printed": 0.007}
    assert contrastive(loss="info-nce", temperature=0.2).temperature == 0.2
    vectors = random(ROWS, 2 * DIM)
    loss = [build_loss(contrastive(temperature=heat))(vectors, torch.zeros(ROWS)).item() for heat in (0.0, 0.05, 0.2)]
    assert loss[0] == loss[1] != loss[2]


def test_uncertainty_weighs_a_contrastive_loss_as_an_entropy() -> None:
    assert UncertaintyWeighting([contrastive()]).factors == {"t": 1.0}


# --- the table ------------------------------------------------------------------------------------------------------


def parse(tasks: dict[str, Any], **tables: Any) -> Any:
    return parse_recipe({"tasks": tasks, **tables})


def test_the_columns_say_how_a_row_is_read() -> None:
    assert contrastive(1).views == ("first", "first")
    assert contrastive(2).views == ("first", "second")
    assert contrastive(3).views == ("first", "second", "third")
    assert {contrastive(count).answer_views for count in (1, 2, 3)} == {("first", "second")}


def test_a_built_in_task_without_its_labels() -> None:
    recipe = parse(
        {
            "pairs": {"like": "quora", "kind": "contrastive", "loss": "mnr"},
            "quora": {"kind": "contrastive"},
            "texts": {"like": "sst", "kind": "contrastive", "head": "simcse"},
        }
    )
    pairs, quora, texts = recipe.tasks
    assert (pairs.text, pairs.text2, pairs.classes, pairs.label) == ("sentence1", "sentence2", (), "label")
    assert (pairs.head, pairs.loss, pairs.scale, pairs.metric_name) == ("cosine", "mnr", 1.0, "retrieval")
    assert (quora.loss, quora.views) == ("simcse", ("first", "second"))
    assert (texts.head, texts.views) == ("simcse", ("first", "first"))


def test_a_contrastive_recipe_is_written_and_read_again(tmp_path: Path) -> None:
    from minbert.recipes import read_recipe

    row = {"kind": "contrastive", "text": "a", "text2": "b", "text3": "c", "train": "t.tsv", "dev": "d.tsv"}
    recipe = parse({"triplets": row | {"temperature": 0.1}}, name="r", training={"cache_rows": 4})
    (tmp_path / "r.toml").write_text(to_toml(recipe))
    assert read_recipe(tmp_path / "r.toml") == recipe


STS_ROW = {"kind": "pair-regression", "text2": "b", "train": "t", "dev": "d"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"head": "linear"},
            'head is "linear" and loss "simcse"; expected a head that gives vectors to compare: cosine,',
        ),
        ({"loss": "mse"}, 'loss is "mse", which is not for contrastive; expected simcse, mnr, info-nce'),
        ({"text3": "c"}, 'text3 is "c"; a contrastive task with text2 has a third'),
        ({"classes": ["a", "b"]}, "classes has 2 names; a contrastive task has none"),
        ({"metric": "accuracy"}, 'metric is "accuracy"; expected one of: retrieval'),
        ({"temperature": -1.0}, 'temperature is -1.0 with loss "simcse"; expected more than 0'),
        (
            STS_ROW | {"temperature": 0.1},
            'temperature is 0.1 with loss "mse"; expected it with a contrastive loss: sim',
        ),
        (STS_ROW | {"text3": "c"}, 'text3 is "c"; only a contrastive task has one'),
        (STS_ROW | {"loss": "mnr"}, 'head is "linear" and loss "mnr"; expected a head that gives vectors'),
        (STS_ROW | {"head": "simcse"}, 'head is "simcse" and loss "mse"; expected a contrastive loss: simcse, mnr'),
        (STS_ROW | {"head": "cosine", "loss": "mnr", "threshold": 6.0}, "threshold is 6.0; expected it between"),
        (
            {"kind": "pair-classification", "text2": "b", "classes": ["a", "b", "c"], "head": "cosine", "loss": "mnr"},
            'loss is "mnr" with 3 classes; expected 2, the second of which says that a pair belongs together',
        ),
        (
            {"kind": "pair-classification", "text2": "b", "classes": ["a", "b"], "head": "cosine", "loss": "mnr"}
            | {"label_smoothing": 0.1},
            'loss "mnr" has no use for label_smoothing and class_weights',
        ),
        (
            {"kind": "classification", "classes": ["a", "b"], "loss": "simcse"},
            'loss is "simcse", which is not for class',
        ),
    ],
)
def test_nonsense_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(MinbertError) as caught:
        parse({"t": {"kind": "contrastive", "train": "t.tsv", "dev": "d.tsv"} | row})
    assert message in str(caught.value)
    assert "[tasks.t]" in str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "training", "message"),
    [
        ({"sst": {}}, {"cache_rows": 4}, "no task has a contrastive loss"),
        (
            {"sst": {}, "quora": {"kind": "contrastive"}},
            {"cache_rows": 4, "gradients": "pcgrad"},
            'training.cache_rows is 4 with training.gradients "pcgrad"',
        ),
        ({"quora": {"kind": "contrastive"}}, {"cache_rows": -1}, "training.cache_rows is -1; expected 0 or more"),
        (
            {"quora": {"kind": "contrastive", "loss": "info-nce-printed"}},
            {"loss_weighting": "uncertainty"},
            '"info-nce-printed", can be negative, where a learned weight has no bound',
        ),
    ],
)
def test_what_a_recipe_cannot_have_together(tasks: dict[str, Any], training: dict[str, Any], message: str) -> None:
    with pytest.raises(MinbertError) as caught:
        parse(tasks, training=training, sampler={"kind": "all"})
    assert message in str(caught.value)


def test_every_combination_that_passes_has_a_loss_that_can_be_computed() -> None:
    found = 0
    for kind in LOSSES["simcse"]:
        for head in HEADS:
            for loss in NAMES:
                row = {"text2": "b", "classes": ("a", "b") if kind == "pair-classification" else ()}
                try:
                    task = check_task(Task("t", kind, head=head, loss=loss, **row))  # type: ignore[arg-type]
                except MinbertError:
                    continue
                found += 1
                assert head in COMPARING
                assert hasattr(build_head(task, 4, 0.0), "vector")
                assert build_contrastive(task)(random(3, 2 * 4), torch.ones(3)).isfinite()
    assert found == (3 * len(COMPARING) - 1) * len(NAMES)  # projected-cosine is no logit of a class


# --- files ----------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_a_row_has_no_label_and_three_texts(tmp_path: Path) -> None:
    write(tmp_path, "t.tsv", "a\tb\tc", "one\ttwo\tthree", "four\tfive\t", "six\tseven\teight")
    found = read_split(contrastive(3, text="a", train=("t.tsv",)), "train", tmp_path)
    assert (found.texts, found.pairs, found.thirds) == (["one", "six"], ["two", "seven"], ["three", "eight"])
    assert found.labels is not None
    assert found.labels.tolist() == [0.0, 0.0]
    assert found.skipped == {EMPTY_TEXT: 1}


def test_a_third_column_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, "t.tsv", "a\tb\tcc", "one\ttwo\tthree")
    with pytest.raises(MinbertError, match=r't\.tsv: no column "c" \(did you mean "cc"\?\); found: a, b, cc'):
        read_split(contrastive(3, text="a", train=("t.tsv",)), "train", tmp_path)


def test_plain_text_is_a_sentence_a_line(tmp_path: Path) -> None:
    """No header, quotes and tabs as they are."""
    write(tmp_path, "s.txt", 'He said "no, never', "", "a\tb", "  last ")
    found = read_split(contrastive(1, train=("s.txt",)), "train", tmp_path)
    assert found.texts == ['He said "no, never', "a\tb", "last"]
    assert found.ids == ["s:1", "s:3", "s:4"]
    assert (found.pairs, found.thirds, found.skipped) == (None, None, {EMPTY_TEXT: 1})


def test_a_txt_file_of_pairs_or_labels_has_a_header(tmp_path: Path) -> None:
    write(tmp_path, "s.txt", "a\tb\tlabel", "one\ttwo\t1")
    assert read_split(contrastive(2, text="a", train=("s.txt",)), "train", tmp_path).pairs == ["two"]
    scores = check_task(Task("t", "regression", ("s.txt",), text="a"))
    assert read_split(scores, "train", tmp_path).texts == ["one"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MinbertError, match=r"no file .*s\.txt; say where the data is"):
        read_split(contrastive(1, train=("s.txt",)), "train", tmp_path)


def test_data_check_counts_texts_without_labels(tmp_path: Path) -> None:
    write(tmp_path, "s.txt", "one two", "three", "one  TWO")
    write(tmp_path, "d.txt", "three")
    recipe = parse({"t": {"kind": "contrastive", "train": "s.txt", "dev": "d.txt"}})
    train_split, dev = check_data(recipe, tmp_path).splits
    assert (train_split.rows, train_split.repeated.count, train_split.contradicting.count) == (3, 1, 0)
    assert (train_split.balance, dev.leaked.count) == ({}, 1)


# --- the model ------------------------------------------------------------------------------------------------------

TASKS: dict[str, dict[str, Any]] = {
    "texts": {"like": "sst", "kind": "contrastive"},
    "pairs": {"like": "quora", "kind": "contrastive", "head": "projected-cosine", "hidden": 7},
    "triplets": {"like": "quora", "kind": "contrastive", "text3": "c", "head": "projected-dot", "pooling": "mean"},
    "mlp": {"like": "quora", "kind": "contrastive", "head": "simcse"},
    "sts": {"head": "cosine", "loss": "info-nce"},
    "quora": {},
}
THIRDS = ["the sun", "nice", "a nice bonus", "Why?", "the lake"]


def inputs_for(tokenizer: Any, model: MultitaskModel) -> dict[str, Inputs]:
    found = {}
    for name, task in model.tasks.items():
        labels = np.zeros(5) if task.is_contrastive else np.array([1.0, 0.0, 1.0, 0.0, 1.0])
        pairs, thirds = PAIRS if task.is_pair else None, THIRDS if task.text3 else None
        found[name] = tokenize(task, Examples([], TEXTS, pairs, labels, thirds=thirds), tokenizer, 64)
    return found


@pytest.fixture
def made(tiny_encoder: Path) -> tuple[MultitaskModel, dict[str, Inputs]]:
    tokenizer, model, _ = make(tiny_encoder, TASKS)
    return model, inputs_for(tokenizer, model)


def say(model: MultitaskModel, data: dict[str, Inputs], *names: str) -> dict[str, Tensor]:
    batch = collate(tuple(Part(name, np.arange(5)) for name in names), data)
    return dict(model(ready(batch, model.encoder)))


def test_a_contrastive_loss_is_given_the_vectors_that_the_head_compares(
    made: tuple[MultitaskModel, dict[str, Inputs]],
) -> None:
    model, data = made
    found = say(model, data, *TASKS)
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    assert shapes == {
        **{"texts": (5, 64), "pairs": (5, 14), "triplets": (5, 96), "mlp": (5, 64), "sts": (5, 64)},
        "quora": (5, 1),
    }
    for name in ("texts", "pairs", "triplets", "mlp", "sts"):
        how = model.poolings[name]
        pooled = [torch.from_numpy(encode_pooled(model.runner, view, [how])[how]) for view in data[name].views]
        head = model.heads[name]
        expected = [head.projection(view) if hasattr(head, "projection") else view for view in pooled]
        torch.testing.assert_close(found[name], torch.cat(expected, dim=1), atol=1e-5, rtol=1e-5)


def test_two_copies_of_a_text_are_dropped_out_differently_in_training_only(
    made: tuple[MultitaskModel, dict[str, Inputs]],
) -> None:
    model, data = made
    first, second = say(model, data, "texts")["texts"].chunk(2, dim=1)
    torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)
    model.train()
    torch.manual_seed(0)
    first, second = say(model, data, "texts")["texts"].chunk(2, dim=1)
    assert (first - second).abs().amax(dim=1).min() > 0.1  # of every row
    assert F.cosine_similarity(first, second).mean() > F.cosine_similarity(first, second.roll(1, 0)).mean()


def test_simcses_layer_is_there_in_training_only() -> None:
    head = build_head(contrastive(head="simcse", scale=3.0), DIM, 0.5)
    shake(head)
    u, v = random(4, DIM), random(4, DIM, seed=1)
    layer = head.layer
    expected = torch.tanh(u @ layer.weight.T + layer.bias)  # type: ignore[operator]
    torch.testing.assert_close(head.train().vector(u), expected)  # type: ignore[operator]
    assert torch.equal(head.eval().vector(u), u)  # type: ignore[operator]
    torch.testing.assert_close(head(u, v)[:, 0], 3 * F.cosine_similarity(u, v))
    head.train()
    head.vector(u).square().sum().backward()  # type: ignore[operator]
    assert all(weight.grad is not None and weight.grad.abs().sum() > 1e-3 for weight in head.parameters())


def test_the_common_layer_is_first_of_all(tiny_encoder: Path) -> None:
    tokenizer, model, _ = make(tiny_encoder, {"texts": TASKS["texts"]}, common_layer=True)
    data = inputs_for(tokenizer, model)
    pooled = torch.from_numpy(encode_pooled(model.runner, data["texts"].views[0], ["cls"])["cls"])
    assert model.common is not None
    expected = model.common(pooled)
    torch.testing.assert_close(say(model, data, "texts")["texts"][:, :32], expected, atol=1e-5, rtol=1e-5)


def test_a_split_is_judged_by_the_vectors_of_both_texts(made: tuple[MultitaskModel, dict[str, Inputs]]) -> None:
    """The third text has no part in it, and a text that is read twice is encoded once."""
    model, data = made
    for name in ("texts", "pairs", "triplets"):
        found, expected = outputs_of(model, data[name]), say(model, data, name)[name].detach().numpy()
        np.testing.assert_allclose(found, expected[:, : found.shape[1]], atol=1e-5)
    assert outputs_of(model, data["triplets"]).shape == (5, 64)
    calls: list[int] = []

    def encode(tokens: Any, poolings: Any) -> Any:
        calls.append(len(tokens))
        return encode_pooled(model.runner, tokens, poolings)

    outputs_of(model, data["texts"], encode)
    assert calls == [5]
    assert outputs_of(model, data["sts"]).shape == (5, 1)  # a labelled task has its usual answer


def test_a_prediction_is_a_similarity(tiny_encoder: Path, tmp_path: Path) -> None:
    tokenizer, model, manifest = make(tiny_encoder, TASKS)
    predictor = Predictor(model, tokenizer, manifest)
    found = predictor.predict(TEXTS, PAIRS)
    for name in ("texts", "mlp", "sts"):  # also of the task that learnt from single texts
        u, v = (torch.from_numpy(predictor.embed(texts)) for texts in (TEXTS, PAIRS))
        expected = (5.0 if name == "sts" else 1.0) * F.cosine_similarity(u, v)
        assert [row["score"] for row in found[name]] == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(MinbertError, match='the task "texts" reads two texts; found one'):
        predictor.predict(TEXTS, tasks=["texts"])
    write(tmp_path, "in.tsv", "sentence\tsentence1\tsentence2", "nice\tnice\tthe sun")
    assert "texts" not in predict_file(predictor, tmp_path / "in.tsv", tmp_path / "out.jsonl").tasks
    with pytest.raises(MinbertError, match="texts compares two texts, and learnt from one column; say --text2"):
        predict_file(predictor, tmp_path / "in.tsv", tmp_path / "out.jsonl", tasks=["texts"])
    report = predict_file(predictor, tmp_path / "in.tsv", tmp_path / "out.jsonl", tasks=["texts"], text2="sentence2")
    assert report.rows == 1


# --- whole runs -----------------------------------------------------------------------------------------------------

PLAIN = {
    "like": "sst",
    "kind": "contrastive",
    "head": "simcse",
    "train": "plain.txt",
    "dev": "plain-dev.txt",
    "test": [],
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, small_data: Path) -> Path:
    """`small_data`, and its sentences as plain text."""
    folder = tmp_path_factory.mktemp("texts")
    for path in small_data.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name, source in (("plain.txt", "similarity-train.tsv"), ("plain-dev.txt", "similarity-dev.tsv")):
        rows = (small_data / source).read_text(encoding="utf-8").splitlines()[1:]
        write(folder, name, *(row.split("\t")[1] for row in rows))
    return folder


def recipe_for(encoder: Path, **tables: Any) -> Any:
    tasks = {"quora": {"kind": "contrastive", "loss": "mnr"}, "sts": {"head": "cosine", "loss": "info-nce"}}
    recipe = small_recipe(encoder, "quora", "sts", tasks=tasks, **tables)
    from dataclasses import replace

    return replace(recipe, tasks=(*recipe.tasks, *parse({"plain": PLAIN}).tasks))


def test_a_contrastive_run_from_files_to_a_report(tiny_encoder: Path, texts: Path, tmp_path: Path) -> None:
    recipe = recipe_for(tiny_encoder)
    run = train(recipe, out=tmp_path / "run", data=texts, device="cpu")
    results = run.results
    assert {name: found["metric"] for name, found in results["dev"].items()} == {
        **{"quora": "retrieval", "sts": "pearson", "plain": "retrieval"},
    }
    assert results["dev"]["plain"]["metrics"]["retrieval"]["value"] == 1.0  # by construction
    assert set(results["geometry"]) == {"quora", "sts", "plain"}
    assert results["geometry"]["plain"]["alignment"] == pytest.approx(0, abs=1e-6)
    rows = read_predictions(run.folder, "quora").column("prediction")
    assert 0 <= rows.min() < rows.max() <= 1
    assert results["dev"]["quora"]["metrics"]["retrieval"]["value"] == pytest.approx(rows.mean())
    assert results["overall"]["2023"] == pytest.approx(
        max(0.0, results["dev"]["sts"]["metrics"]["pearson"]["value"] or 0)
    )
    again = evaluate_model(run.model, data=texts, device="cpu", samples=10)
    assert again["quora"].score == results["dev"]["quora"]["metrics"]["retrieval"]["value"]
    other = train(recipe, out=tmp_path / "other", data=texts, device="cpu")
    assert unlike(run.folder, other.folder) == []
    same = compare_runs(run.folder, other.folder, rng=np.random.default_rng(0), samples=20)
    assert same["quora"].difference.value == 0
    write_report([run.folder, other.folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Sentence vectors" in page
    assert "not the nearest of all second texts" in page


def test_the_recipe_of_the_page_can_be_read(tmp_path: Path) -> None:
    from minbert.recipes import read_recipe

    page = (Path(__file__).parent.parent / "docs" / "contrastive.md").read_text(encoding="utf-8")
    (tmp_path / "page.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    recipe = read_recipe(tmp_path / "page.toml")
    assert [len(task.views) for task in recipe.tasks] == [2, 3, 2, 2]
    assert {task.loss for task in recipe.tasks} == {"simcse", "mnr", "info-nce"}
    for task in recipe.tasks:  # rows that do not belong together are no partners
        assert task.is_contrastive or task.threshold or task.only == "duplicate"


def test_overall_leaves_out_what_is_only_a_means() -> None:
    tasks = {"t": contrastive(), "sts": check_task(Task("sts", "pair-regression", text2="b"))}
    assert overall({"t": 0.9, "sts": 0.5}, tasks) == {"2023": 0.5, "2024": 0.75}
    assert overall({"t": 0.9}, tasks) == {"2023": 0.9, "2024": 0.9}


@pytest.mark.parametrize("loss", NAMES)
def test_training_brings_partners_together(tiny_encoder: Path, tmp_path: Path, loss: str) -> None:
    """Nonsense pairs, learnt by heart: of 24 texts of the sample, each of the first half with one of the second."""
    rows = (SAMPLE / "sentiment-train.tsv").read_text(encoding="utf-8").splitlines()[1:25]
    sentences = [row.split("\t")[1] for row in rows]
    write(
        tmp_path, "p.tsv", "a\tb", *(f"{one}\t{two}" for one, two in zip(sentences[:12], sentences[12:], strict=True))
    )
    row = {"kind": "contrastive", "text": "a", "text2": "b", "train": "p.tsv", "dev": "p.tsv", "loss": loss}
    recipe = parse(
        {"t": row | {"temperature": 0.1}},
        model={"encoder": str(tiny_encoder), "pooling": "mean", "encoder_dropout": 0.0},
        optimizer={"lr": 3e-3},
        training={"epochs": 12, "batch_size": 12, "train_sample": 0},
    )
    heard = Listener()
    train(recipe, out=tmp_path / "run", data=tmp_path, device="cpu", watcher=heard)
    assert heard.evaluations[-1]["scores"]["dev"]["t"] > 0.9  # 12 candidates: 0.08 by chance


# --- GradCache ------------------------------------------------------------------------------------------------------

STILL = {"dropout": 0.0, "encoder_dropout": 0.0}


def steps_of(encoder: Path, data: Path, folder: Path, **tables: Any) -> Any:
    """A trainer, and its first epoch."""
    trainer = small_trainer(recipe_for(encoder, **tables), folder, data)
    shake(trainer.model, by=0.3)  # else all vectors are nearly the same, and so their gradients nearly rounding alone
    return trainer, next(trainer.sampler.epochs())


def gradients_of(trainer: Any, step: Any) -> dict[str, Tensor]:
    """Of one step, the weights left as they are."""
    torch.manual_seed(3)
    (batch,) = trainer.feeder.batches([step])
    trainer.feeder.run(batch, update=False)
    found = {name: value.grad.clone() for name, value in trainer._parameters() if value.grad is not None}
    for _, value in trainer._parameters():
        value.grad = None
    return found


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
@pytest.mark.parametrize(
    "training", [{}, {"loss_weighting": "mean"}, {"loss_weighting": "uncertainty", "accumulate": 2}]
)
@pytest.mark.parametrize("sampler", ["all", "mixed"])
def test_chunks_have_the_gradient_of_the_whole_batch(
    tiny_encoder: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    training: dict[str, Any],
    sampler: str,
) -> None:
    """In float64: in float32 a product of one row rounds otherwise than one of many, and how is the CPU's own."""
    shared: dict[str, Any] = {"model": {**STILL, "common_layer": True}, "sampler": {"kind": sampler}}
    size = {"batch_size": 8 if sampler == "all" else 24}
    whole, steps = steps_of(tiny_encoder, texts, tmp_path / "a", training=training | size, **shared)
    chunked, _ = steps_of(
        tiny_encoder, texts, tmp_path / "b", training=training | size | {"cache_rows": rows}, **shared
    )
    assert isinstance(whole.feeder, OneByOne)
    assert isinstance(chunked.feeder, InChunks)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    for trainer in (whole, chunked):
        trainer.model.double()
        trainer.weighting.double()
        trainer.work.totals = trainer.work.totals.double()
    step = next(steps)
    expected, found = gradients_of(whole, step), gradients_of(chunked, step)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-12 * max(1.0, 4 * value.abs().max().item()), name
    torch.testing.assert_close(chunked.work.totals, whole.work.totals, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_each_chunk_is_dropped_out_the_same_way_twice(
    tiny_encoder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, pooling: str
) -> None:
    """The vectors of both passes are the same bits, and the gradient is that of one graph over chunks whose dropout is
    drawn from the same random states."""
    trainer, steps = steps_of(
        tiny_encoder,
        texts,
        tmp_path / "a",
        model={"pooling": pooling},
        training={"cache_rows": 3, "kernels": kernels},
        sampler={"kind": "sequential"},
    )
    model, step = trainer.model, next(steps)
    (batch,) = trainer.feeder.batches([step])
    assert [chunk.rows for chunk in batch.chunks[0]] == [3, 3, 2]
    vectors: dict[bool, list[Tensor]] = {False: [], True: []}
    forward = model.forward

    def note(given: Any) -> Any:
        found = forward(given)
        vectors[torch.is_grad_enabled()].append(found["quora"].detach().clone())
        return found

    monkeypatch.setattr(model, "forward", note)
    found = gradients_of(trainer, step)
    assert len(vectors[False]) == len(vectors[True]) == 3
    assert all(torch.equal(one, two) for one, two in zip(vectors[False], vectors[True], strict=True))
    monkeypatch.setattr(model, "forward", forward)
    torch.manual_seed(3)
    chunks = [ready(chunk, model.encoder) for chunk in batch.chunks[0]]
    together = torch.cat([model(chunk)["quora"] for chunk in chunks])
    torch.testing.assert_close(together, torch.cat(vectors[True]))
    trainer.losses["quora"](together, torch.zeros(8)).backward()
    for name, value in trainer._parameters():
        if value.grad is not None:
            torch.testing.assert_close(found[name], value.grad, atol=1e-6, rtol=1e-5, msg=name)
    torch.manual_seed(4)
    assert not torch.equal(torch.cat([model(chunk)["quora"] for chunk in chunks]), together)  # dropout is on


def test_no_graph_is_larger_than_a_chunk(
    tiny_encoder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, steps = steps_of(
        tiny_encoder,
        texts,
        tmp_path / "a",
        training={"cache_rows": 4, "batch_size": 24},
        sampler={"kind": "sequential"},
    )
    sizes: dict[bool, list[int]] = {False: [], True: []}
    packed = trainer.model.encoder.packed

    def note(batch: Any, **options: Any) -> Tensor:
        sizes[torch.is_grad_enabled()].append(len(batch.offsets) - 1)
        return packed(batch, **options)

    monkeypatch.setattr(trainer.model.encoder, "packed", note)
    gradients_of(trainer, next(steps))
    assert sizes == {False: [8] * 6, True: [8] * 6}  # 24 pairs, 4 at a time


def test_a_frozen_encoder_with_nothing_to_learn_is_left_alone(tiny_encoder: Path, texts: Path, tmp_path: Path) -> None:
    trainer, steps = steps_of(
        tiny_encoder, texts, tmp_path / "a", training={"cache_rows": 3}, sampler={"kind": "sequential"}
    )
    trainer.model.encoder.requires_grad_(False)
    assert gradients_of(trainer, next(steps)) == {}


@pytest.mark.parametrize("at", [4, 7])
def test_a_run_in_chunks_goes_on_bit_for_bit(tiny_encoder: Path, texts: Path, tmp_path: Path, at: int) -> None:
    training = {"cache_rows": 3, "checkpoint_every": 3, "accumulate": 2, "train_sample": 4}
    recipe = recipe_for(tiny_encoder, training=training)
    options: dict[str, Any] = {"data": texts, "device": "cpu"}
    train(recipe, out=tmp_path / "whole", **options)
    with pytest.raises(Stopped):
        train(recipe, out=tmp_path / "stopped", watcher=Listener(at_step=at), **options)
    train(recipe, out=tmp_path / "stopped", resume=True, **options)
    assert unlike(tmp_path / "whole", tmp_path / "stopped") == []


def test_surgery_takes_a_contrastive_task_like_any_other(tiny_encoder: Path, texts: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {"sampler": {"kind": "all"}, "model": STILL}
    plain, steps = steps_of(tiny_encoder, texts, tmp_path / "a", **tables)
    cut, _ = steps_of(tiny_encoder, texts, tmp_path / "b", training={"gradients": "pcgrad"}, **tables)
    step = next(steps)
    expected, found = gradients_of(plain, step), gradients_of(cut, step)
    assert set(found) == set(expected)
    own = "model.heads.plain.layer.weight"  # only one task reaches it
    torch.testing.assert_close(found[own], expected[own], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cut.work.totals, plain.work.totals)


def test_anchors_are_rows_with_a_partner() -> None:
    labels = torch.tensor([0.0, 1.0, math.nan, 3.0])
    assert anchors_of(contrastive(), labels).tolist() == [True, True, False, True]
    scores = check_task(Task("t", "pair-regression", text2="b", threshold=1.0))
    assert anchors_of(scores, labels).tolist() == [False, False, False, True]
    classes = check_task(Task("t", "pair-classification", text2="b", classes=("a", "b")))
    assert anchors_of(classes, labels).tolist() == [False, True, False, False]


def test_the_reference_itself_by_hand() -> None:
    """One cosine of 1 against one of 0, at temperature 1."""
    views = [[[2.0, 0.0], [0.0, 3.0]], [[1.0, 0.0], [0.0, 1.0]]]
    assert plain_loss("mnr", views, [0, 1], [0, 1], 1.0) == pytest.approx(math.log(1 + math.exp(-1)))


def test_rows_of_one_class_of_a_labelled_file(tmp_path: Path) -> None:
    """The label says which rows are read, and nothing else."""
    write(tmp_path, "q.tsv", "sentence1\tsentence2\tis_duplicate", "a\tb\t1", "c\td\t0", "e\tf\t1")
    recipe = parse({"quora": {"kind": "contrastive", "only": "duplicate", "train": "q.tsv", "dev": "q.tsv"}})
    found = read_split(recipe.tasks[0], "train", tmp_path)
    assert (found.texts, found.pairs) == (["a", "e"], ["b", "f"])
    assert found.labels is not None and found.labels.tolist() == [0.0, 0.0]
    assert dict(found.skipped) == {'not of the class "duplicate"': 1}
