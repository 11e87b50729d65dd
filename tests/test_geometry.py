"""How vectors lie to each other: Wang & Isola's own lines in torch, cases worked by hand, and what a run writes of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minbert.errors import MinbertError
from minbert.evaluation import geometry
from minbert.evaluation.evaluate import evaluate_task, judge
from minbert.evaluation.geometry import alignment, measure, positives, retrieved, sample, uniformity
from minbert.evaluation.report import write_report
from minbert.experiment import train
from minbert.task_checks import check_task
from minbert.tasks import Task
from tests.made_up_runs import make_run
from tests.runs import small_recipe

TWO = np.array([[3.0, 0.0], [0.0, 2.0]])


def vectors(rows: int, dim: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, dim)) * 3


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parity
def test_alignment_and_uniformity_are_those_of_the_paper() -> None:
    """The paper's figure 5, line by line."""
    x, y = (torch.nn.functional.normalize(torch.from_numpy(vectors(40, seed=seed)), dim=1) for seed in (0, 1))
    align = (x - y).norm(dim=1).pow(2).mean()
    uniform = torch.pdist(x, p=2).pow(2).mul(-2).exp().mean().log()
    assert alignment(vectors(40), vectors(40, seed=1)) == pytest.approx(align.item(), rel=1e-12)
    assert uniformity(vectors(40)) == pytest.approx(uniform.item(), rel=1e-12)


def test_the_length_of_a_vector_does_not_matter() -> None:
    assert alignment(TWO, 7 * TWO) == pytest.approx(0, abs=1e-15)
    assert alignment(TWO, -TWO) == pytest.approx(4)
    assert alignment(TWO, TWO[::-1]) == pytest.approx(2)  # a right angle


def test_uniformity_by_hand() -> None:
    assert uniformity(TWO) == pytest.approx(-4)  # one pair, at a squared distance of 2
    assert uniformity(np.ones((5, 3))) == pytest.approx(0)
    three = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])  # squared distances 0, 4, 4
    assert uniformity(three) == pytest.approx(math.log((1 + 2 * math.exp(-8)) / 3))
    with pytest.raises(MinbertError, match="uniformity of 1 vectors asked for; expected two or more"):
        uniformity(TWO[:1])


def test_a_partner_is_found_where_no_other_is_nearer() -> None:
    first = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    second = np.array([[9.0, 0.1], [1.0, 0.0], [1.0, 1.0]])  # row 1's partner lies along row 0
    assert retrieved(first, second).tolist() == [0, 0, 1]
    assert retrieved(second, second).all()


@pytest.mark.parametrize("block", [1, 7, 100])
def test_retrieval_is_that_of_plain_loops_in_blocks_of_any_size(block: int) -> None:
    first = vectors(30)
    second = first + vectors(30, seed=1) * 0.7
    expected = []
    for row in range(30):
        cosines = [float(first[row] @ v / np.linalg.norm(first[row]) / np.linalg.norm(v)) for v in second]
        expected.append(max(range(30), key=cosines.__getitem__) == row)
    with patch.object(geometry, "BLOCK", block):
        assert retrieved(first, second).tolist() == expected
    assert 0 < sum(expected) < 30


def test_those_that_tie_share_the_place() -> None:
    """Two rows with the same second text; and vectors that are all the same, which find no more than chance."""
    second = np.array([[1.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
    assert retrieved(np.array([[1.0, 1.0], [1.0, 0.9], [-1.0, 1.0]]), second).tolist() == [0.5, 0.5, 1]
    assert retrieved(np.ones((4, 2)), np.ones((4, 2)) + 1e-9 * vectors(4, 2)).tolist() == [0.25] * 4


def test_no_vector_is_too_short() -> None:
    """One of length 0 has no direction: it is at a squared distance of 1 from all others, and nothing is not a number."""
    assert alignment(np.zeros((1, 2)), TWO[:1]) == pytest.approx(1)
    assert math.isfinite(uniformity(np.zeros((2, 2))))
    assert retrieved(TWO, np.zeros((2, 2))).tolist() == [0.5, 0.5]


# --- which rows -----------------------------------------------------------------------------------------------------


def test_pairs_that_mean_the_same() -> None:
    scores = check_task(Task("t", "pair-regression", text2="b"))
    assert positives(scores, np.array([3.9, 4.0, 5.0, 0.0])).tolist() == [False, True, True, False]  # type: ignore[union-attr]
    ten = check_task(Task("t", "pair-regression", text2="b", low=1.0, high=11.0))
    assert positives(ten, np.array([8.9, 9.0])).tolist() == [False, True]  # type: ignore[union-attr]
    two = check_task(Task("t", "pair-classification", text2="b", classes=("no", "yes")))
    assert positives(two, np.array([0.0, 1.0])).tolist() == [False, True]  # type: ignore[union-attr]
    none = check_task(Task("t", "contrastive", text2="b", head="cosine"))
    assert positives(none, np.zeros(2)).tolist() == [True, True]  # type: ignore[union-attr]
    three = check_task(Task("t", "pair-classification", text2="b", classes=("no", "perhaps", "yes")))
    assert positives(three, np.array([0.0, 1.0])) is None
    assert positives(scores, None) is None


def test_a_sample_is_without_replacement_and_in_order() -> None:
    found = sample(100, rng(), most=30)
    assert len(set(found.tolist())) == 30
    assert found.tolist() == sorted(found.tolist())
    assert sample(100, rng(), most=30).tolist() == found.tolist()
    assert sample(5, rng(), most=30).tolist() == [0, 1, 2, 3, 4]


def test_what_is_measured_of_pairs_and_of_single_texts() -> None:
    first, second = vectors(20), vectors(20, seed=1)
    same = np.arange(20) < 6
    found = measure([first, second], same, rng(), of="cosine")
    assert found.alignment == alignment(first[:6], second[:6])
    assert found.uniformity == uniformity(np.concatenate([first, second]))
    assert (found.positives, found.texts, found.vectors) == (6, 40, "cosine")
    alone = measure([first], np.ones(20, dtype=bool), rng(), of="mean")
    assert (alone.alignment, alone.texts) == (0.0, 20)
    assert measure([first, second], None, rng(), of="mean").alignment is None
    assert measure([first, second], np.zeros(20, dtype=bool), rng(), of="mean").alignment is None
    assert measure([first[:1]], None, rng(), of="mean").summary()["uniformity"] is None


def test_texts_beyond_the_most_are_a_sample() -> None:
    big = measure([vectors(1500), vectors(1500, seed=1)], None, rng(), of="mean")
    assert big.texts == 2000
    assert big.uniformity == pytest.approx(uniformity(np.concatenate([vectors(1500), vectors(1500, seed=1)])), abs=0.05)


# --- as a metric ----------------------------------------------------------------------------------------------------


def test_a_contrastive_tasks_answer_is_whether_the_partner_was_found() -> None:
    task = check_task(Task("t", "contrastive", text2="b", head="cosine"))
    outputs = np.hstack([np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 0.0], [3.0, -1.0]])])
    assert judge(task, outputs).predictions.tolist() == [1.0, 0.0]
    found = evaluate_task(task, np.zeros(2), outputs, rng=rng(), samples=50)
    assert found.score == 0.5
    assert found.summary()["metrics"]["retrieval"] == {"value": 0.5, "low": 0.0, "high": 1.0}


# --- of a run -------------------------------------------------------------------------------------------------------


def test_a_run_says_it_of_every_task_of_two_texts(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """Of a head that compares texts its own vectors; of one that reads both as one input the pooled ones."""
    recipe = small_recipe(
        tiny_encoder, tasks={"sts": {"head": "projected-cosine", "hidden": 3}}, model={"pooling": "mean"}
    )
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    found: dict[str, Any] = run.results["geometry"]
    assert set(found) == {"quora", "sts"}
    assert (found["quora"]["vectors"], found["sts"]["vectors"]) == ("mean", "projected-cosine")
    labels = [float(row.split("\t")[3]) for row in (small_data / "similarity-dev.tsv").read_text().splitlines()[1:]]
    assert found["sts"]["positives"] == sum(label >= 4 for label in labels)
    assert found["sts"]["texts"] == 2 * len(labels)
    again = train(recipe, out=tmp_path / "again", data=small_data, device="cpu")
    assert again.results["geometry"] == found


def test_the_report_shows_it_where_a_run_has_it(tmp_path: Path) -> None:
    row = {"alignment": 0.1234, "uniformity": -2.3456, "positives": 17, "texts": 1234, "vectors": "<cosine>"}
    nothing = {"alignment": None, "uniformity": None, "positives": 0, "texts": 1, "vectors": "mean"}
    run = make_run(tmp_path / "run", change=lambda results: results.update(geometry={"sts": row, "quora": nothing}))
    write_report([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'href="#run1-vectors"' in page
    assert '<td class="n">0.123</td><td class="n">&minus;2.346</td>' in page
    assert "&lt;cosine&gt;" in page
    older = make_run(tmp_path / "older")
    write_report([older], tmp_path / "page.html")
    assert "Sentence vectors" not in (tmp_path / "page.html").read_text(encoding="utf-8")
