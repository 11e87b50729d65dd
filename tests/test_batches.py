"""Plans hold every row once and stay within their budget; padding equals the obvious loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minbert.data.batches import pad, plan_batches
from minbert.data.tokenizer import Tokens
from minbert.errors import MinbertError

LENGTHS = st.lists(st.integers(0, 512), max_size=200).map(np.array)
SIZES = st.fixed_dictionaries({"rows": st.integers(1, 40)}, optional={"tokens": st.integers(1, 3000)}) | (
    st.fixed_dictionaries({"tokens": st.integers(1, 3000)})
)
SEEDS = st.none() | st.integers(0, 99)
BUCKETS = st.integers(1, 5)


def rng(seed: int | None) -> np.random.Generator | None:
    return None if seed is None else np.random.default_rng(seed)


@given(lengths=LENGTHS, sizes=SIZES, seed=SEEDS, bucket=BUCKETS)
def test_every_row_once_and_budgets_respected(
    lengths: np.ndarray, sizes: dict[str, int], seed: int | None, bucket: int
) -> None:
    lengths = lengths.astype(np.int64)
    plan = plan_batches(lengths, **sizes, rng=rng(seed), bucket=bucket)
    assert sorted(np.concatenate([*plan, []]).astype(int).tolist()) == list(range(len(lengths)))
    for batch in plan:
        assert 1 <= len(batch) <= sizes.get("rows", len(lengths))
        padded = len(batch) * int(lengths[batch].max())
        assert padded <= sizes.get("tokens", padded) or len(batch) == 1


@given(lengths=LENGTHS, sizes=SIZES)
def test_without_a_generator_from_long_to_short(lengths: np.ndarray, sizes: dict[str, int]) -> None:
    lengths = lengths.astype(np.int64)
    order = np.concatenate([*plan_batches(lengths, **sizes), []]).astype(int)
    assert (np.diff(lengths[order]) <= 0).all()
    equal = np.diff(lengths[order]) == 0
    assert (np.diff(order)[equal] > 0).all()  # rows of equal length keep their order


@given(lengths=LENGTHS, tokens=st.integers(1, 3000))
def test_a_batch_is_as_large_as_the_budget_allows(lengths: np.ndarray, tokens: int) -> None:
    lengths = lengths.astype(np.int64)
    plan = plan_batches(lengths, tokens=tokens)
    for batch in plan[:-1]:
        assert (len(batch) + 1) * max(1, lengths[batch].max()) > tokens


@given(lengths=LENGTHS, sizes=SIZES, seed=st.integers(0, 99), bucket=BUCKETS)
def test_a_seed_fixes_the_plan(lengths: np.ndarray, sizes: dict[str, int], seed: int, bucket: int) -> None:
    one, same = (plan_batches(lengths, **sizes, rng=rng(seed), bucket=bucket) for _ in range(2))
    assert [batch.tolist() for batch in one] == [batch.tolist() for batch in same]


def test_another_seed_is_another_plan() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 500)
    plans = [np.concatenate(plan_batches(lengths, tokens=500, rng=rng(seed))).tolist() for seed in (1, 2)]
    assert plans[0] != plans[1]


def test_buckets_save_padding_and_stay_random() -> None:
    lengths = np.random.default_rng(0).integers(3, 100, 2000)
    plan = plan_batches(lengths, rows=16, rng=rng(1))
    padded = sum(len(batch) * lengths[batch].max() for batch in plan)
    assert padded < 1.05 * lengths.sum()  # rows drawn blindly would need about 1.8 times as much
    means = [lengths[batch].mean() for batch in plan]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.int64])
def test_any_whole_numbers_are_lengths(kind: Any) -> None:
    lengths = np.array([0, 200, 3, 0, 100], dtype=kind)
    assert [batch.tolist() for batch in plan_batches(lengths, tokens=300)] == [[1], [4, 2, 0], [3]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", [None, 0])
def test_no_rows_are_no_batches(seed: int | None) -> None:
    assert plan_batches(np.array([], dtype=np.int64), tokens=10, rng=rng(seed)) == []


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"tokens": 0}, {"rows": 4, "tokens": -1}])
def test_batches_of_nothing_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(MinbertError, match=r"^a batch of .* rows and .* tokens; expected at least 1$"):
        plan_batches(np.array([1, 2]), **sizes)


def test_a_size_is_needed() -> None:
    with pytest.raises(ValueError, match="rows, tokens or both"):
        plan_batches(np.array([1, 2]))


@given(
    rows=st.lists(st.lists(st.tuples(st.integers(2, 30000), st.integers(0, 1)), max_size=12), min_size=1, max_size=12),
    pad_id=st.integers(0, 1),
    data=st.data(),
)
def test_padding_equals_the_obvious_loop(rows: list[list[tuple[int, int]]], pad_id: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    flat = [token for row in rows for token in row]
    tokens = Tokens(
        np.array([id for id, _ in flat], dtype=np.int32),
        np.array([segment for _, segment in flat], dtype=np.uint8),
        np.cumsum([0, *(len(row) for row in rows)]),
    )
    width = max((len(rows[row]) for row in chosen), default=0)
    ids, mask, segments = [], [], []
    for row in chosen:
        missing = width - len(rows[row])
        ids.append([id for id, _ in rows[row]] + [pad_id] * missing)
        segments.append([segment for _, segment in rows[row]] + [0] * missing)
        mask.append([True] * len(rows[row]) + [False] * missing)
    batch = pad(tokens, np.array(chosen, dtype=np.int64), pad_id)
    assert batch.ids.shape == batch.mask.shape == batch.segments.shape == (len(chosen), width)
    assert (batch.ids.dtype, batch.mask.dtype, batch.segments.dtype) == (np.int64, np.bool_, np.int64)
    assert (batch.ids.tolist(), batch.mask.tolist(), batch.segments.tolist()) == (ids, mask, segments)
