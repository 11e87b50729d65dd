"""Batches without a text that comes twice: for contrastive tasks, on made-up rows and in a real training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minbert.config import SamplerConfig
from minbert.data.batches import plan_batches
from minbert.data.repeats import number_texts, part_repeats
from minbert.data.samplers import make_sampler
from minbert.data.tokenizer import Tokens
from minbert.errors import MinbertError
from minbert.recipes import parse_recipe
from minbert.task_checks import check_task
from minbert.tasks import Task
from tests.runs import small_trainer

Batches = list[np.ndarray]


def repeats(batches: Batches, texts: np.ndarray) -> int:
    """Rows that have a text in common with an earlier one of their batch."""
    found = 0
    for batch in batches:
        seen: set[int] = set()
        for row in batch:
            found += bool(seen & set(texts[row].tolist()))
            seen |= set(texts[row].tolist())
    return found


def planned(lengths: np.ndarray, seed: int = 0, **sizes: int) -> Batches:
    return plan_batches(lengths, rng=np.random.default_rng(seed), **sizes)


@given(
    data=st.data(),
    count=st.integers(1, 60),
    views=st.integers(1, 3),
    vocabulary=st.integers(1, 200),
    size=st.integers(1, 9),
    budget=st.sampled_from([0, 40, 200]),
)
def test_nothing_is_lost_and_nothing_grows(
    data: st.DataObject, count: int, views: int, vocabulary: int, size: int, budget: int
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    lengths, texts = rng.integers(2, 20, count), rng.integers(0, vocabulary, (count, views))
    before = planned(lengths, rows=size, **({"tokens": budget} if budget else {}))
    after = part_repeats(before, texts, lengths, tokens=budget)
    assert [len(batch) for batch in after] == [len(batch) for batch in before]
    assert sorted(np.concatenate(after)) == list(range(count))
    assert repeats(after, texts) <= repeats(before, texts)
    if budget:
        assert all(len(batch) == 1 or len(batch) * lengths[batch].max() <= budget for batch in after)
    again = part_repeats(before, texts, lengths, tokens=budget)
    assert all((one == other).all() for one, other in zip(after, again, strict=True))


def test_equal_texts_meet_by_length_and_are_parted() -> None:
    """As in data on entailment, where a premise stands in several rows."""
    rng = np.random.default_rng(0)
    texts = np.stack([np.arange(4000) // 4, 5000 + np.arange(4000)], axis=1)
    lengths = np.repeat(rng.integers(5, 30, 1000), 4)
    before = planned(lengths, rows=64)
    assert repeats(before, texts) > 60
    after = part_repeats(before, texts, lengths)
    assert repeats(after, texts) == 0
    wasted = [
        sum(len(batch) * lengths[batch].max() for batch in batches) / lengths.sum() for batches in (before, after)
    ]
    assert wasted[1] < wasted[0] + 0.03


def test_batches_without_repeats_stay_as_they_are() -> None:
    lengths = np.random.default_rng(0).integers(5, 30, 500)
    before = planned(lengths, rows=16)
    after = part_repeats(before, np.arange(1000).reshape(500, 2), lengths)
    assert all((one == other).all() for one, other in zip(before, after, strict=True))


def test_a_rows_own_texts_may_be_the_same() -> None:
    """Single sentences are read twice."""
    lengths, texts = np.full(8, 5), np.repeat(np.arange(8)[:, None], 2, axis=1)
    before = planned(lengths, rows=4)
    assert all((one == other).all() for one, other in zip(before, part_repeats(before, texts, lengths), strict=True))


def test_what_cannot_be_parted_stays() -> None:
    lengths = np.full(90, 5)
    before = planned(lengths, rows=30)
    after = part_repeats(before, np.zeros((90, 1), np.int64), lengths)
    assert repeats(after, np.zeros((90, 1), np.int64)) == 87


def test_texts_are_known_by_their_tokens() -> None:
    def tokens(*rows: list[int]) -> Tokens:
        ids = np.concatenate([np.array(row, np.int32) for row in rows])
        return Tokens(ids, np.zeros(len(ids), np.uint8), np.cumsum([0, *map(len, rows)]))

    first, second = tokens([1, 2], [3], [1, 2]), tokens([3], [1, 2, 3], [4])
    assert number_texts([first, second]).tolist() == [[0, 1], [1, 2], [0, 3]]


def test_each_pass_of_a_sampler() -> None:
    texts = np.repeat(np.arange(50), 4)[:, None]
    for part, expected in ((None, False), ({"t": texts}, True)):
        sampler = make_sampler(
            SamplerConfig(), {"t": np.repeat(np.arange(5, 55), 4)}, epochs=3, batch_size=8, seed=1, texts=part
        )
        found = [repeats([step[0].rows for step in epoch], texts) == 0 for epoch in sampler.epochs()]
        assert found == [expected] * 3


def test_a_recipe_asks_for_it(tiny_encoder: Path, tmp_path: Path) -> None:
    lines = [f"{'so ' * (number % 16)}good\t{'very ' * number}good" for number in range(32)]
    (tmp_path / "pairs.tsv").write_text("a\tb\n" + "\n".join(lines), encoding="utf-8")
    table = {"kind": "contrastive", "train": "pairs.tsv", "dev": "pairs.tsv", "text": "a", "text2": "b"}
    numbers = np.arange(32)[:, None] % 16
    for asked in (False, True):
        tasks = {"t": {**table, "distinct_batches": asked}}
        training = {"batch_size": 4, "epochs": 2}
        recipe = parse_recipe({"tasks": tasks, "model": {"encoder": str(tiny_encoder)}, "training": training})
        trainer = small_trainer(recipe, tmp_path / "run", tmp_path)
        found = [repeats([step[0].rows for step in epoch], numbers) for epoch in trainer.sampler.epochs()]
        assert (sum(found) == 0) == asked


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        (
            {"tasks": {"sst": {"distinct_batches": True}}},
            'distinct_batches with loss "cross-entropy"; expected it with',
        ),
        (
            {
                "tasks": {"sts": {"head": "cosine", "loss": "mnr", "distinct_batches": True}},
                "sampler": {"kind": "mixed"},
            },
            '[tasks.sts] distinct_batches with sampler.kind "mixed", whose batches are of all tasks; expected another',
        ),
    ],
)
def test_where_it_cannot_be(tables: dict[str, Any], expected: str) -> None:
    with pytest.raises(MinbertError) as found:
        parse_recipe(tables)
    assert expected in str(found.value)


def test_not_unless_asked_for() -> None:
    assert not check_task(Task("t", "contrastive", head="cosine")).distinct_batches
