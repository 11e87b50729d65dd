"""Batches of a fixed layout hold every batch and say what is filling; batches made ahead come in order and stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minbert.data.inputs import Batch
from minbert.model.encoder import EncoderConfig
from minbert.model.packed import BLOCK
from minbert.training import graphs
from minbert.training.graphs import LEAST, SLOTS, Layout, Staging, ahead, lay_out, layout_of, rounded
from tests.interpreter import NO_TRITON
from tests.laid_out import batch_of, masked_batch_of

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=40)
SHORT = st.lists(st.integers(1, 20), min_size=1, max_size=60)
BERT, MPNET = EncoderConfig(), EncoderConfig(kind="mpnet", pad_id=1, positions=514, segments=0)


# --- layouts --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200_000))
@settings(deadline=None)
def test_tokens_are_rounded_up_by_a_sixteenth_at_most(tokens: int) -> None:
    found = rounded(tokens)
    assert found >= tokens
    assert found == LEAST if tokens <= LEAST else found - tokens < tokens / 16
    assert rounded(found) == found


def test_layouts_are_few() -> None:
    """Sixteen sizes for each doubling, so that a run records a few dozens at most."""
    assert len({rounded(tokens) for tokens in range(LEAST + 1, 2 * LEAST + 1)}) == 16
    assert len({rounded(tokens) for tokens in range(1, 65_537)}) == 1 + 16 * 8


def written(batch: Batch, config: EncoderConfig) -> tuple[Layout, np.ndarray]:
    layout = layout_of(batch, rates=3)
    block = np.full(layout.size + 5, -7, np.int32)  # what another batch left there
    lay_out(batch, layout, config, block[: layout.size])
    assert (block[layout.size :] == -7).all(), "nothing is written behind the end"
    return layout, block[: layout.size]


def arrays(layout: Layout, block: np.ndarray) -> dict[str, np.ndarray]:
    return {name: block[start:end] for name, (start, end) in layout.places.items()}


@given(LENGTHS | SHORT, st.lists(st.integers(1, 200), max_size=20), st.sampled_from([BERT, MPNET]))
@settings(deadline=None, max_examples=60)
def test_every_batch_fits_its_layout(one: list[int], two: list[int], config: EncoderConfig) -> None:
    batch = batch_of(one, two)
    layout, block = written(batch, config)
    found = arrays(layout, block)
    used, sequences = len(batch.tokens.ids), len(batch.tokens)
    assert layout.tokens == rounded(used)

    assert found["ids"].tolist() == [*batch.tokens.ids, *[config.pad_id] * (layout.tokens - used)]
    assert found["segments"].tolist() == [*batch.tokens.segments, *[0] * (layout.tokens - used)]
    offsets = found["offsets"]
    assert offsets[: sequences + 1].tolist() == batch.tokens.offsets.tolist()
    assert offsets[-1] == layout.tokens, "the tail's sequences hold the rest"
    lengths = np.diff(offsets)
    assert (lengths >= 0).all()
    assert lengths[sequences:].max(initial=0) <= layout.block
    assert found["positions"].tolist() == [config.first_position + place for n in lengths for place in range(n)]

    blocks = found["blocks"].reshape(-1, 3)
    assert len(blocks) == layout.blocks
    starts = {int(start): int(length) for start, length in zip(offsets, lengths, strict=False) if length}
    size = BLOCK if not layout.short else layout.block
    held = []
    for start, length, first in blocks.tolist():
        if length:
            assert starts[start] == length
            held += range(start + first, start + min(first + size, length))
        else:
            assert (start, first) == (0, 0)
    assert sorted(held) == list(range(layout.tokens)), "each token in one block"
    assert layout.short == (max(batch.tokens.lengths) <= BLOCK)


@given(LENGTHS, st.lists(st.integers(1, 50), max_size=40))
@settings(deadline=None, max_examples=40)
def test_rows_that_are_not_there_have_no_label(one: list[int], two: list[int]) -> None:
    batch = batch_of(one, two)
    layout, block = written(batch, BERT)
    found = arrays(layout, block)
    assert [(task, views) for task, views, _ in layout.parts] == [(p.task, p.index.shape[0]) for p in batch.parts]
    for part, (task, views, rows) in zip(batch.parts, layout.parts, strict=True):
        assert rows % 8 == 0
        assert 0 <= rows - part.rows < 8
        index = found[f"index {task}"].reshape(views, rows)
        assert index[:, : part.rows].tolist() == part.index.tolist()
        assert not index[:, part.rows :].any(), "they read the first sequence, which is there"
        labels = found[f"labels {task}"].view(np.float32)
        assert labels[: part.rows].tolist() == part.labels.tolist()
        assert np.isnan(labels[part.rows :]).all()


@given(SHORT | LENGTHS, st.lists(st.integers(1, 50), max_size=20), st.floats(0.05, 1.0))
@settings(deadline=None, max_examples=60)
def test_tokens_to_guess_that_are_not_there_have_no_label(texts: list[int], one: list[int], rate: float) -> None:
    batch = masked_batch_of(texts, one, rate=rate)
    layout, block = written(batch, BERT)
    found = arrays(layout, block)
    part, (task, views, rows) = batch.parts[-1], layout.parts[-1]
    assert (task, views) == ("mlm", 1)
    assert rows % (layout.tokens // 16) == 0
    assert 0 <= rows - part.rows < layout.tokens // 16
    index = found["index mlm"]
    assert index[: part.rows].tolist() == part.index[0].tolist()
    assert not index[part.rows :].any(), "they read the first token, which is there"
    labels = found["labels mlm"].view(np.float32)
    assert labels[: part.rows].tolist() == part.labels.tolist()
    assert np.isnan(labels[part.rows :]).all()
    assert found["offsets"][: len(batch.tokens) + 1].tolist() == batch.tokens.offsets.tolist()
    assert found["offsets"][-1] == layout.tokens, "there is room for every sequence"


def test_layouts_of_masked_batches_are_few() -> None:
    """At the usual rate the number of tokens to guess adds no layouts to those of the batches' sizes."""
    rng = np.random.default_rng(0)
    batches = [masked_batch_of(rng.integers(8, 40, 32).tolist(), seed=seed) for seed in range(60)]
    layouts = {layout_of(batch, 2) for batch in batches}
    assert len(layouts) == len({layout.tokens for layout in layouts})


@pytest.mark.parametrize(("positions", "longest"), [(16, 9), (24, 20), (40, 35)])  # fewer are not run by graphs
def test_no_position_is_beyond_the_table(positions: int, longest: int) -> None:
    layout, block = written(batch_of([longest, 3]), EncoderConfig(positions=positions))
    assert arrays(layout, block)["positions"].max() < positions


def test_a_layouts_arrays_do_not_touch() -> None:
    layout = layout_of(batch_of([3, 70, 5], [2, 9]), rates=3)
    spans = sorted(layout.places.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(start % 4 == 0 for start, _ in spans), "kernels read four numbers at once"
    assert layout.size == max(end for _, end in spans)


def test_a_block_becomes_a_batch_and_its_rates() -> None:
    batch = batch_of([3, 9, 1], [2, 4])
    layout, block = written(batch, BERT)
    start, end = layout.places["rates"]
    block[start:end].view(np.float32)[:] = [0.5, 0.25, 0.125]
    tensor = torch.from_numpy(block)
    assert layout.rate_tensor(tensor).tolist() == [0.5, 0.25, 0.125]
    found = layout.batch(tensor)
    assert found.packed.ids[: len(batch.tokens.ids)].tolist() == batch.tokens.ids.tolist()
    assert found.packed.blocks.shape == (layout.blocks, 3)
    assert (found.packed.block, found.packed.short, found.packed.runs) == (16, True, ())
    assert [part.task for part in found.parts] == ["sst", "sts"]
    assert [tuple(part.index.shape) for part in found.parts] == [(1, 8), (2, 8)]
    assert found.parts[0].labels.dtype == torch.float32
    assert found.parts[0].labels.data_ptr() == tensor.data_ptr() + 4 * layout.places["labels sst"][0], "no copy"


def test_equal_sizes_share_a_layout() -> None:
    """A layout is what a graph is kept under."""
    one, same = layout_of(batch_of([3, 9, 1]), 2), layout_of(batch_of([4, 8, 2], seed=5), 2)
    assert one == same
    assert hash(one) == hash(same)
    others = [layout_of(batch_of(lengths), rates) for lengths, rates in (([3, 9, 17], 2), ([9] * 9, 2), ([3, 9, 1], 3))]
    assert one not in others


# --- steps, with our kernels ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    from tests.step_checks import checks

    return checks.run(checks.interpreted)


CHECKS = [
    "a_laid_out_batch_is_the_batch",
    "a_laid_out_batch_of_long_sequences",
    "a_laid_out_contrastive_batch",
    "copies_of_a_text_are_dropped_out_differently",
    "chunks_are_dropped_out_the_same_way_twice",
    "a_laid_out_batch_of_masked_tokens",
    "unrecorded_graphs_are_steps",
    "tasks_by_themselves_are_surgery",
]


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
@pytest.mark.parametrize("name", CHECKS)
def test_a_step_over_a_layout(name: str, outcomes: dict[str, str | None]) -> None:
    mine = {key: outcome for key, outcome in outcomes.items() if key.split("-")[0] == name}
    assert mine
    assert {key.split("-")[0] for key in outcomes} == set(CHECKS), "each is asked for here"
    failed = [f"{key}: {outcome}" for key, outcome in mine.items() if outcome is not None]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)


# --- pinned blocks --------------------------------------------------------------------------------------------------


class Event:
    """A device's event that is waited for at most once after it was recorded."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.recorded = self.waited = 0
        self.blocking = blocking

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Staging:
    """Without CUDA: memory that is not pinned, and events that are counted."""
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **{**options, "pin_memory": False}))
    return Staging(BERT, rates=2)


def test_whoever_waits_for_a_block_sleeps(staging: Staging) -> None:
    assert all(event.blocking for _, event in staging.slots)  # type: ignore[attr-defined]


def test_a_staged_batch_is_the_batch_laid_out(staging: Staging) -> None:
    batch = batch_of([3, 70, 1], [2, 4])
    staged = staging.stage(batch)
    assert staged.layout == layout_of(batch, 2)
    assert staged.rows == batch.rows == 4
    assert len(staged.block) == staged.layout.size
    found, (_, expected) = staged.layout.batch(staged.block), written(batch, BERT)
    assert found.packed.ids.tolist() == expected[: staged.layout.tokens].tolist()
    assert [part.labels.isfinite().sum().item() for part in found.parts] == [3, 1]


def test_blocks_are_used_in_turn_and_only_when_they_have_arrived(staging: Staging) -> None:
    batches = [batch_of([number + 1, 3], seed=number) for number in range(2 * SLOTS)]
    staged = []
    for number, batch in enumerate(batches):
        event = staging.slots[number % SLOTS][1]
        waited = event.waited  # type: ignore[attr-defined]
        staged.append(staging.stage(batch))
        assert event.waited == waited + 1, "for the batch that was there"  # type: ignore[attr-defined]
        assert staged[-1].copied is event
    pointers = [each.block.data_ptr() for each in staged]
    assert len(set(pointers[:SLOTS])) == SLOTS
    assert pointers[SLOTS:] == pointers[:SLOTS], "memory that is large enough stays"
    for batch, each in zip(batches[SLOTS:], staged[SLOTS:], strict=True):
        assert each.block[: len(batch.tokens.ids)].tolist() == batch.tokens.ids.tolist()


def test_a_block_grows_with_its_batch(staging: Staging) -> None:
    for _ in range(SLOTS):
        staging.stage(batch_of([3]))
    large = batch_of([100] * 40)
    staged = staging.stage(large)
    assert staged.block[:4000].tolist() == large.tokens.ids.tolist()
    assert len(staging.slots[0][0]) >= staged.layout.size > len(staging.slots[1][0])


def test_more_blocks_than_batches_on_their_way() -> None:
    """One that is run, those in the queue, one in the making: none of them may share its memory with another."""
    assert graphs.SLOTS - 3 + 2 < graphs.SLOTS


# --- made ahead -----------------------------------------------------------------------------------------------------


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "batches"]


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.005)


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_ahead_keeps_the_order(depth: int) -> None:
    assert list(ahead(range(50), lambda number: number * number, depth)) == [number * number for number in range(50)]
    assert threads() == []
    assert list(ahead([], str, depth)) == []


def test_ahead_works_on_another_thread() -> None:
    (name,) = ahead([0], lambda _: threading.current_thread().name, 1)
    assert name == "batches" != threading.current_thread().name


def test_ahead_is_bounded() -> None:
    """While one is being used, `depth` wait and one more is held in hand."""
    made: list[int] = []
    taken = ahead(range(100), lambda number: made.append(number) or number, 3)
    assert made == [], "nothing before somebody asks"
    for number in range(5):
        assert next(taken) == number
        wait_until(lambda number=number: len(made) == number + 5)
        time.sleep(0.02)
        assert len(made) == number + 5
    taken.close()


def numbers_then(error: BaseException) -> Iterator[int]:
    yield 1
    yield 2
    raise error


@pytest.mark.parametrize("error", [ValueError("no such row"), KeyboardInterrupt()])
def test_an_error_of_the_source_comes_after_what_was_good(error: BaseException) -> None:
    found = []
    with pytest.raises(type(error)) as caught:
        for number in ahead(numbers_then(error), str, 5):
            found.append(number)
    assert caught.value is error
    assert found == ["1", "2"]
    assert threads() == []


def test_an_error_while_preparing_comes_through() -> None:
    found = []
    with pytest.raises(ZeroDivisionError):
        for number in ahead([1, 2, 0, 4], lambda number: 4 // number, 1):
            found.append(number)
    assert found == [4, 2]
    assert threads() == []


def test_the_thread_ends_when_nobody_takes_any_more() -> None:
    made: list[int] = []
    for number in ahead(range(1000), lambda number: made.append(number) or number, 2):
        if number == 3:
            break
    wait_until(lambda: threads() == [])
    assert len(made) <= 3 + 1 + 2 + 1 + 1


def test_an_error_of_the_taker_ends_the_thread() -> None:
    taken = ahead(range(1000), str, 2)
    with pytest.raises(KeyError):
        for number in taken:
            raise KeyError(number)
    taken.close()
    assert threads() == []
