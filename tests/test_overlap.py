"""Sentence BLEU by hand and against nltk where it is installed; the figure's points, means and picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from minbert.evaluation.charts import overlap_chart
from minbert.evaluation.overlap import bleu, by_overlap, overlap_points, words
from minbert.evaluation.report import write_report
from tests.made_up_runs import make_run


def test_a_pair_worked_by_hand() -> None:
    """The candidate has "a" twice and the reference once; in common are also "man slices", "slices a", "man slices a"."""
    reference, candidate = "the man slices a big onion", "a man slices a bun"
    precisions = [3 / 5, (2 + 1) / (4 + 1), (1 + 1) / (3 + 1), (0 + 1) / (2 + 1)]
    brevity = math.exp(1 - 6 / 5)
    assert bleu(reference, candidate) == pytest.approx(brevity * math.prod(precisions) ** 0.25)


def test_a_word_counts_no_more_often_than_the_reference_has_it() -> None:
    # Papineni's example: seven times "the" is right twice; no longer run is there at all
    expected = (2 / 7 * 1 / 7 * 1 / 6 * 1 / 5) ** 0.25
    assert bleu("The cat is on the mat", "the the the the the the the") == pytest.approx(expected)


def test_the_ends_of_the_scale() -> None:
    for text in ("yes", "two words", "A man, a plan, a canal: Panama!"):
        assert bleu(text, text.upper()) == pytest.approx(1)
    assert bleu("one two three", "four five six") == 0
    assert bleu("", "") == 1 and bleu("", "a") == bleu("a", "") == 0
    assert words("Don't stop!") == ["don", "'", "t", "stop", "!"]


@pytest.mark.parity
def test_it_is_nltks_with_one_added() -> None:
    from nltk.translate import bleu_score as theirs

    smooth = theirs.SmoothingFunction().method2
    rng = np.random.default_rng(2)
    for _ in range(50):
        one, other = (list(rng.choice(list("abcdefgh"), size=int(rng.integers(4, 15)))) for _ in range(2))
        expected = theirs.sentence_bleu([one], other, smoothing_function=smooth)
        assert bleu(" ".join(one), " ".join(other)) == pytest.approx(expected, abs=1e-9)


def test_points_and_means() -> None:
    rows = [
        {"text": "a b c d", "text2": "a b c d", "label": 5.0, "prediction": 4.0},
        {"text": "a b c d", "text2": "e f g h", "label": 1.0, "prediction": 0.5},
        {"text": "a b", "text2": "c d", "label": 0.0, "prediction": 1.5},
        {"text": "a b", "text2": "c d", "label": 0.0, "prediction": math.nan},
    ]
    points = overlap_points(rows)
    assert points.tolist() == [[1, 5, 4], [0, 1, 0.5], [0, 0, 1.5]]
    low, high = by_overlap(points)
    assert (low.low, low.rows, low.bleu, low.label, low.prediction) == (0, 2, 0, 0.5, 1)
    assert (high.high, high.rows, high.bleu, high.label, high.prediction) == (1, 1, 1, 5, 4)
    two = overlap_points([{"text": "a", "text2": "a", "label": 1, "prediction": 0, "probabilities": [0.6, 0.4]}])
    assert two.tolist() == [[1, 1, 0.4]]
    drawn = overlap_chart(points, [low, high], label="l", y_label="y")
    assert drawn.count("<circle") == 3 and drawn.count('class="line"') == 2 and "2 pairs with an overlap" in drawn


def test_the_report_shows_it_for_pairs_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("Similarity against word overlap") == 2  # not for sentiment
    assert "probability of duplicate" in page and "Correlation with the overlap: labels" in page
    rows = [json.loads(line) for line in (run / "predictions" / "sts.jsonl").read_text().splitlines()]
    expected = np.corrcoef(overlap_points(rows)[:, :2].T)[0, 1]
    assert f"labels {expected:.2f}".replace("-", "&minus;") in page
