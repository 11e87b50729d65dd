"""Samplers: what each promises about rows and order, checked on random tasks and on examples worked by hand."""

from __future__ import annotations

import math
import pickle
import time
from collections import Counter
from itertools import chain, islice, pairwise
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minbert.config import SamplerConfig
from minbert.data.plan import plan
from minbert.data.samplers import SAMPLERS, Sampler, make_sampler
from minbert.data.streams import Part, Step
from minbert.errors import MinbertError
from minbert.recipes import LOOK_AHEAD

quick = settings(max_examples=50, deadline=None)

# Every kind, and every way that its settings change what it does.
VARIANTS: dict[str, dict[str, Any]] = {
    "sequential": {"kind": "sequential"},
    "round-robin": {"kind": "round-robin"},
    "round-robin-batch": {"kind": "round-robin", "unit": "batch"},
    "proportional": {"kind": "proportional"},
    "proportional-largest": {"kind": "proportional", "epoch": "largest"},
    "proportional-steps": {"kind": "proportional", "steps_per_epoch": 7},
    "uniform": {"kind": "uniform"},
    "uniform-largest": {"kind": "uniform", "epoch": "largest"},
    "power": {"kind": "power", "alpha": 0.5},
    "annealed": {"kind": "annealed"},
    "annealed-steps": {"kind": "annealed", "steps_per_epoch": 7},
    "weighted": {"kind": "weighted", "weights": {"a": 2.0}},
    "all": {"kind": "all"},
    "all-steps": {"kind": "all", "steps_per_epoch": 7},
    "mixed": {"kind": "mixed"},
}
ONE_PASS_AN_EPOCH = ["round-robin", "proportional", "mixed"]
STREAMING = ["uniform", "uniform-largest", "power", "annealed", "annealed-steps", "weighted", "all", "all-steps"]
STREAMING += ["proportional-largest", "proportional-steps", "round-robin-batch"]

Tasks = dict[str, np.ndarray]


@st.composite
def several_tasks(draw: st.DrawFn) -> Tasks:
    """One to four tasks, "a" among them, of 1 to 60 rows of 1 to 40 tokens."""
    names = draw(st.permutations(["a", "b", "c", "d"][: draw(st.integers(1, 4))]))
    row = st.lists(st.integers(1, 40), min_size=1, max_size=60)
    return {name: np.array(draw(row)) for name in names}


budgets = st.fixed_dictionaries({"batch_size": st.integers(1, 9), "batch_tokens": st.sampled_from([0, 40, 100])})
seeds = st.integers(0, 2**31)


def make(variant: str, tasks: Tasks, *, epochs: int = 3, batch_size: int = 4, seed: int = 0, **rest: Any) -> Sampler:
    config = SamplerConfig(**(VARIANTS[variant] | rest.pop("config", {})))
    return make_sampler(config, tasks, epochs=epochs, batch_size=batch_size, seed=seed, **rest)


def sized(**rows: int) -> Tasks:
    """Tasks of so many rows, of random lengths."""
    return {task: np.random.default_rng(number).integers(3, 30, number) for task, number in rows.items()}


def run(sampler: Sampler) -> list[list[Step]]:
    return [list(epoch) for epoch in sampler.epochs()]


def plain(steps: Any) -> list[Any]:
    """Steps as lists, to compare."""
    return [[(part.task, part.rows.tolist()) for part in step] for step in steps]


def names(steps: list[Step]) -> list[str]:
    return [part.task for step in steps for part in step]


def rows_of(steps: Any, task: str) -> list[int]:
    return [row for step in steps for part in step if part.task == task for row in part.rows.tolist()]


def batches_of(sampler: Sampler, task: str, epoch: int = 0) -> int:
    return len(sampler.streams[task].one_pass(epoch))


# --- what holds for every kind --------------------------------------------------------------------------------------


def test_every_kind_of_the_config_has_a_class_and_is_tested() -> None:
    kinds = set(get_args(get_type_hints(SamplerConfig)["kind"]))
    assert set(SAMPLERS) == kinds == {settings["kind"] for settings in VARIANTS.values()}


@pytest.mark.parametrize("variant", VARIANTS)
@quick
@given(tasks=several_tasks(), budget=budgets, seed=seeds)
def test_parts_are_rows_of_their_task_within_the_budget(
    variant: str, tasks: Tasks, budget: dict[str, int], seed: int
) -> None:
    for step in chain.from_iterable(run(make(variant, tasks, epochs=2, seed=seed, **budget))):
        assert 1 <= len(step) <= len(tasks)
        assert len({part.task for part in step}) == len(step)
        groups = [list(step)] if variant == "mixed" else [[part] for part in step]  # what is one batch
        for batch in groups:
            lengths = np.concatenate([tasks[part.task][part.rows] for part in batch])
            assert 1 <= len(lengths) <= budget["batch_size"]
            if budget["batch_tokens"] and len(lengths) > 1:  # a row longer than the budget is a batch of its own
                assert len(lengths) * lengths.max() <= budget["batch_tokens"]
        for part in step:
            assert part.rows.dtype == np.int64
            assert len(set(part.rows.tolist())) == len(part.rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_seed_same_steps_other_seed_other_steps(variant: str) -> None:
    tasks = sized(a=50, b=31, c=9)
    sampler = make(variant, tasks, seed=5)
    first = [plain(epoch) for epoch in sampler.epochs()]
    assert [plain(epoch) for epoch in sampler.epochs()] == first  # called again
    assert [plain(epoch) for epoch in make(variant, tasks, seed=5).epochs()] == first
    assert [plain(epoch) for epoch in pickle.loads(pickle.dumps(sampler)).epochs()] == first
    assert [plain(epoch) for epoch in make(variant, tasks, seed=6).epochs()] != first


@pytest.mark.parametrize("variant", VARIANTS)
def test_epochs_differ(variant: str) -> None:
    epochs = [plain(epoch) for epoch in make(variant, sized(a=50, b=31)).epochs()]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("variant", VARIANTS)
@quick
@given(tasks=several_tasks(), budget=budgets, done=st.integers(0, 60))
def test_resuming_is_skipping(variant: str, tasks: Tasks, budget: dict[str, int], done: int) -> None:
    sampler = make(variant, tasks, **budget)
    full = plain(chain.from_iterable(sampler.epochs()))
    assert plain(islice(chain.from_iterable(sampler.epochs()), done, None)) == full[done:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_epoch_left_early_does_not_move_the_next(variant: str) -> None:
    sampler = make(variant, sized(a=50, b=31, c=9))
    full = [plain(epoch) for epoch in sampler.epochs()]
    left_early = sampler.epochs()
    assert plain(islice(next(left_early), 2)) == full[0][:2]
    assert plain(next(left_early)) == full[1]
    assert [plain(epoch) for epoch in list(sampler.epochs())] == full  # collected first, read afterwards


@pytest.mark.parametrize("variant", VARIANTS)
@quick
@given(tasks=several_tasks(), budget=budgets, seed=seeds)
def test_more_epochs_begin_with_the_same_ones(variant: str, tasks: Tasks, budget: dict[str, int], seed: int) -> None:
    if VARIANTS[variant]["kind"] in LOOK_AHEAD:
        few, many = (run(make(variant, sized(a=500, b=31), epochs=epochs)) for epochs in (2, 3))
        assert list(map(plain, many[: len(few)])) != list(map(plain, few))
        return
    few, many = (run(make(variant, tasks, epochs=epochs, seed=seed, **budget)) for epochs in (2, 3))
    assert list(map(plain, many[:2])) == list(map(plain, few))


def test_only_the_asked_for_epoch_is_planned() -> None:
    start = time.perf_counter()
    epochs = make("uniform", sized(a=200), epochs=10**9, config={"steps_per_epoch": 5}).epochs()
    assert len(list(next(epochs))) == 5
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("variant", VARIANTS)
@quick
@given(tasks=several_tasks(), budget=budgets, fraction=st.sampled_from([0.3, 1.0]), seed=seeds)
def test_plan_is_what_is_yielded(
    variant: str, tasks: Tasks, budget: dict[str, int], fraction: float, seed: int
) -> None:
    sampler = make(variant, tasks, seed=seed, fractions={"a": fraction}, **budget)
    counted, epochs = plan(sampler), run(sampler)
    steps = list(chain.from_iterable(epochs))
    assert counted.epochs == tuple(map(len, epochs))
    assert counted.steps == len(steps)
    assert list(counted.tasks) == list(tasks)
    for task, row in counted.tasks.items():
        assert row.size == len(tasks[task])
        assert row.batches == names(steps).count(task)
        assert row.rows == len(rows_of(steps, task))
        assert row.share == row.batches / len(steps)
        assert row.passes == row.rows / row.size


@pytest.mark.parametrize("variant", ["proportional", "annealed", "round-robin-batch", "mixed"])
def test_a_plan_of_the_real_size_is_quick(variant: str) -> None:
    tasks = sized(sst=8_500, quora=141_000, sts=6_000)
    start = time.perf_counter()
    counted = plan(make(variant, tasks, epochs=2, batch_size=32, config={"weights": {}}))
    assert time.perf_counter() - start < 5  # measured 0.2 to 0.6
    assert counted.tasks["quora"].passes > 1


# --- rows: none left out, none repeated -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ONE_PASS_AN_EPOCH)
@quick
@given(tasks=several_tasks(), budget=budgets, seed=seeds)
def test_each_row_exactly_once_an_epoch(variant: str, tasks: Tasks, budget: dict[str, int], seed: int) -> None:
    epochs = run(make(variant, tasks, seed=seed, **budget))
    assert len(epochs) == 3
    for steps in epochs:
        for task, lengths in tasks.items():
            assert sorted(rows_of(steps, task)) == list(range(len(lengths)))


@pytest.mark.parametrize("variant", STREAMING)
@quick
@given(tasks=several_tasks(), budget=budgets, seed=seeds)
def test_streams_go_on_across_epochs_pass_by_pass(
    variant: str, tasks: Tasks, budget: dict[str, int], seed: int
) -> None:
    """All rows that a task got, in order, cut into passes: each pass has every row once, the last a part of them."""
    steps = list(chain.from_iterable(run(make(variant, tasks, seed=seed, **budget))))
    for task, lengths in tasks.items():
        rows = rows_of(steps, task)
        for start in range(0, len(rows), len(lengths)):
            one_pass = rows[start : start + len(lengths)]
            assert len(set(one_pass)) == len(one_pass)
            assert len(one_pass) == len(lengths) or start + len(lengths) > len(rows)


@pytest.mark.parametrize("variant", ["all", "round-robin-batch"])
@quick
@given(tasks=several_tasks(), budget=budgets, seed=seeds)
def test_an_epoch_is_exactly_one_pass_over_the_largest(
    variant: str, tasks: Tasks, budget: dict[str, int], seed: int
) -> None:
    sampler = make(variant, tasks, seed=seed, **budget)
    largest = max(tasks, key=lambda task: batches_of(sampler, task))
    for epoch, steps in enumerate(run(sampler)):
        assert sorted(rows_of(steps, largest)) == list(range(len(tasks[largest])))
        assert names(steps).count(largest) == batches_of(sampler, largest, epoch)


@pytest.mark.parametrize("variant", ["all", "round-robin-batch"])
def test_an_epoch_is_one_pass_though_passes_have_differing_numbers_of_batches(variant: str) -> None:
    tasks = {"a": np.random.default_rng(0).integers(3, 60, 3000), "b": np.full(500, 8)}
    order = ("a", "a", "b") if variant == "round-robin-batch" else ()
    epochs = run(make(variant, tasks, epochs=6, batch_size=8, batch_tokens=256, config={"order": order}))
    assert len({names(steps).count("a") for steps in epochs}) > 1
    for steps in epochs:
        assert sorted(rows_of(steps, "a")) == list(range(3000))


def test_tasks_of_equal_lengths_are_shuffled_apart() -> None:
    steps = run(make("all", {"a": np.full(80, 8), "b": np.full(80, 8)}, epochs=1))[0]
    assert rows_of(steps, "a") != rows_of(steps, "b")


def test_a_small_task_cycles_with_fresh_shuffles() -> None:
    tasks = {"large": np.full(300, 8), "small": np.full(10, 8)}  # of one length, so that only the shuffle orders them
    steps = list(chain.from_iterable(run(make("all", tasks, epochs=2, batch_size=5))))
    small = rows_of(steps, "small")
    assert len(small) == 2 * 60 * 5
    passes = [tuple(small[start : start + 10]) for start in range(0, len(small), 10)]
    assert len(set(passes)) > 50


# --- a part of the rows each pass -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ONE_PASS_AN_EPOCH)
@quick
@given(tasks=several_tasks(), fraction=st.floats(0.01, 1), seed=seeds)
def test_fraction_takes_a_part_of_the_rows(variant: str, tasks: Tasks, fraction: float, seed: int) -> None:
    for steps in run(make(variant, tasks, seed=seed, fractions={"a": fraction})):
        for task, lengths in tasks.items():
            rows = rows_of(steps, task)
            expected = math.ceil(round(fraction * len(lengths), 6)) if task == "a" else len(lengths)
            assert len(rows) == len(set(rows)) == expected


def test_fraction_above_one_repeats_rows() -> None:
    (steps,) = run(make("round-robin", sized(a=10), epochs=1, fractions={"a": 2.3}))
    seen = Counter(int(row) for step in steps for part in step for row in part.rows)
    assert sorted(seen.values()) == [2] * 7 + [3] * 3


@pytest.mark.parametrize(("rows", "fraction", "expected"), [(100, 0.07, 7), (10, 0.25, 3), (1, 0.01, 1), (8, 0.25, 2)])
def test_fraction_rounds_up_what_is_meant(rows: int, fraction: float, expected: int) -> None:
    sampler = make("round-robin", sized(a=rows), epochs=1, fractions={"a": fraction})
    assert plan(sampler).tasks["a"].rows == expected


@pytest.mark.parametrize("variant", ["sequential", "proportional", "mixed", "all"])
def test_each_pass_takes_a_fresh_part(variant: str) -> None:
    epochs = run(make(variant, sized(a=400), epochs=40, batch_size=32, fractions={"a": 0.25}))
    parts = [frozenset(rows_of(steps, "a")) for steps in epochs]
    assert {len(part) for part in parts} == {100}
    assert len(set(parts)) == 40
    counts = Counter(chain.from_iterable(parts))
    assert len(counts) == 400  # 0.75 ** 40 is 1e-5: nobody is left out for ever
    assert max(counts.values()) < 25  # 10 expected, standard deviation 2.7


def test_fraction_counts_in_shares_and_steps() -> None:
    tasks = {"a": np.full(4000, 8), "b": np.full(1000, 8)}
    counted = plan(make("power", tasks, batch_size=10, epochs=10, fractions={"a": 0.25}, config={"alpha": 1.0}))
    assert counted.epochs == (200,) * 10
    assert counted.tasks["a"].share == pytest.approx(0.5, abs=0.04)


# --- orders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "expected"),
    [((), "aabbcc"), (("c", "a", "b"), "ccaabb"), (("c", "a", "b", "c"), "ccaabbcc")],
)
def test_sequential_is_one_task_after_another_for_all_epochs(order: tuple[str, ...], expected: str) -> None:
    tasks = sized(a=100, b=200, c=50)
    epochs = run(make("sequential", tasks, epochs=2, config={"order": order}))
    assert len(epochs) == len(expected)
    for steps, task in zip(epochs, expected, strict=True):
        assert set(names(steps)) == {task}
        assert sorted(rows_of(steps, task)) == list(range(len(tasks[task])))
    by_round = [plain(steps) for steps in epochs]
    assert all(one != other for index, one in enumerate(by_round) for other in by_round[:index])


@pytest.mark.parametrize(
    ("order", "expected"),
    [((), "AABBBC"), (("B", "C", "A"), "BBBCAA"), (("C", "A", "C", "A", "B"), "CAACAABBB")],  # exp 3's pattern
)
def test_round_robin_by_dataset(order: tuple[str, ...], expected: str) -> None:
    tasks = sized(A=8, B=11, C=2)  # 2, 3 and 1 batches of 4
    for steps in run(make("round-robin", tasks, config={"order": order})):
        assert "".join(names(steps)) == expected
        for task, lengths in tasks.items():
            times = (order or tuple(tasks)).count(task)
            assert Counter(rows_of(steps, task)) == dict.fromkeys(range(len(lengths)), times)


def test_a_task_named_twice_is_shuffled_twice() -> None:
    steps = run(make("round-robin", sized(A=40, B=4), epochs=1, config={"order": ("A", "B", "A")}))[0]
    rows = rows_of(steps, "A")
    assert rows[:40] != rows[40:]
    assert sorted(rows[:40]) == sorted(rows[40:]) == list(range(40))


@pytest.mark.parametrize(
    ("rows", "order", "expected"),
    [
        ({"A": 8, "B": 12, "C": 4}, (), "ABC" * 3),  # B needs three turns
        ({"A": 8, "B": 12, "C": 4}, ("C", "B", "A"), "CBA" * 3),
        ({"A": 8, "B": 16, "C": 4}, ("B", "A", "B", "C"), "BABC" * 2),  # B needs 4 / 2, as many as A
        ({"A": 4, "B": 20}, ("B", "A", "B"), "BABBABBA"),  # 5 / 2 is 3 turns; the sixth of B goes by
        ({"A": 4, "B": 20}, ("B", "B", "A"), "BBABBABA"),
        ({"A": 12, "B": 16}, ("A", "B", "B"), "ABB" * 3),  # A decides: 3 against 4 / 2; B cycles
        ({"A": 7}, (), "AA"),
    ],
)
def test_round_robin_by_batch(rows: dict[str, int], order: tuple[str, ...], expected: str) -> None:
    for steps in run(make("round-robin-batch", sized(**rows), config={"order": order})):
        assert "".join(names(steps)) == expected


def test_all_has_every_task_in_each_step_in_task_order() -> None:
    tasks = sized(c=7, a=50, b=12)
    for steps in run(make("all", tasks)):
        assert len(steps) == 13
        assert all([part.task for part in step] == ["c", "a", "b"] for step in steps)
    assert [len(steps) for steps in run(make("all-steps", tasks))] == [7, 7, 7]
    assert [len(steps) for steps in run(make("all", tasks, config={"epoch": "all"}))] == [13] * 3


def test_mixed_has_parts_of_differing_sizes_in_task_order() -> None:
    tasks = sized(c=300, a=100, b=2)
    steps = run(make("mixed", tasks, epochs=1, batch_size=16))[0]
    assert len({tuple(len(part.rows) for part in step) for step in steps}) > 5
    for step in steps:
        present = [part.task for part in step]
        assert present == [task for task in tasks if task in present]
        assert all(len(part.rows) for part in step)
    assert sum(len(step) > 1 for step in steps) > len(steps) / 2


def test_mixed_batches_have_their_share_of_each_task_whatever_the_lengths() -> None:
    tasks = {"short": np.full(800, 5), "long": np.full(7200, 40)}
    steps = run(make("mixed", tasks, epochs=1, batch_size=64))[0]
    short = [sum(len(part.rows) for part in step if part.task == "short") for step in steps]
    assert 1.8 < np.std(short) < 3.0  # drawn at random it is 2.4; sorted by length, near 20


# --- shares ---------------------------------------------------------------------------------------------------------

THREE = {"sst": np.full(2000, 8), "quora": np.full(16000, 8), "sts": np.full(1000, 8)}  # 2 : 16 : 1


def shares(sampler: Sampler) -> dict[str, float]:
    return {task: row.share for task, row in plan(sampler).tasks.items()}


def close(found: dict[str, float], *expected: float) -> None:
    assert list(found.values()) == pytest.approx([part / sum(expected) for part in expected], abs=0.02)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"kind": "uniform"}, (1, 1, 1)),
        ({"kind": "power", "alpha": 0.0}, (1, 1, 1)),
        ({"kind": "power", "alpha": 0.5}, (2**0.5, 4, 1)),
        ({"kind": "power", "alpha": 1.0}, (2, 16, 1)),
        ({"kind": "proportional", "epoch": "largest"}, (2, 16, 1)),
        ({"kind": "proportional", "steps_per_epoch": 3000}, (2, 16, 1)),
        ({"kind": "weighted"}, (1, 1, 1)),
        ({"kind": "weighted", "weights": {"quora": 2.0}}, (1, 2, 1)),
        ({"kind": "weighted", "weights": {"sst": 0.0, "quora": 3.0}}, (0, 3, 1)),
    ],
)
def test_drawn_shares(config: dict[str, Any], expected: tuple[float, ...]) -> None:
    close(shares(make_sampler(SamplerConfig(**config), THREE, epochs=4, batch_size=8, seed=3)), *expected)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_weight_of_zero_is_never_drawn(silent: int) -> None:
    weights = {list(THREE)[silent]: 0.0}
    sampler = make_sampler(SamplerConfig(kind="weighted", weights=weights), THREE, epochs=2, batch_size=8, seed=3)
    assert plan(sampler).tasks[list(THREE)[silent]].batches == 0


def test_annealed_goes_from_proportional_to_uniform() -> None:
    config = SamplerConfig(kind="annealed", steps_per_epoch=5000)
    epochs = run(make_sampler(config, THREE, epochs=41, batch_size=8, seed=2))
    by_epoch = [{task: names(steps).count(task) / len(steps) for task in THREE} for steps in epochs]
    close(by_epoch[0], 2, 16, 1)
    close(by_epoch[20], 2**0.5, 4, 1)  # half-way alpha is a half
    close(by_epoch[40], 1, 1, 1)
    quora = [share["quora"] for share in by_epoch]
    assert quora[0] > quora[10] > quora[20] > quora[30] > quora[40]


def test_annealed_starts_at_1_and_ends_at_0_with_the_run() -> None:
    sampler = make_sampler(SamplerConfig(kind="annealed", steps_per_epoch=5), THREE, epochs=2, batch_size=8, seed=2)
    progress = np.array([[0.0], [0.5], [1.0]])
    assert isinstance(sampler, SAMPLERS["annealed"])
    assert sampler.weights(progress) == pytest.approx(
        np.array([[2e3, 16e3, 1e3], [2e3**0.5, 16e3**0.5, 1e3**0.5], [1] * 3])
    )
    seen: list[float] = []
    weights = type(sampler).weights

    class Watched(type(sampler)):  # type: ignore[misc]
        def weights(self, progress: np.ndarray, /) -> np.ndarray:
            seen.extend(progress[:, 0])
            return weights(self, progress)

    list(Watched(sampler.config, sampler.streams, 2, sampler.budget, 2).epochs())
    assert seen == pytest.approx(np.arange(10) / 9)


def test_proportional_is_in_random_order() -> None:
    order = names(run(make("proportional", sized(a=400, b=400), epochs=1))[0])
    changes = sum(one != other for one, other in pairwise(order))
    assert 70 < changes < 130  # 100 of 199 expected


def test_steps_of_an_epoch() -> None:
    tasks = sized(a=50, b=31, c=9)  # 13, 8 and 3 batches of 4
    for kind in ("uniform", "power", "annealed", "weighted", "proportional"):
        for config, steps in (({}, 24), ({"epoch": "largest"}, 13), ({"steps_per_epoch": 5, "epoch": "largest"}, 5)):
            sampler = make_sampler(SamplerConfig(kind=kind, **config), tasks, epochs=2, batch_size=4, seed=1)
            assert plan(sampler).epochs == (steps, steps)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "tasks", "rest", "message"),
    [
        ({}, {"a": 5, "b": 0}, {}, 'task "b" has 0 training rows'),
        ({}, {}, {}, "no tasks"),
        (
            {"kind": "weighted", "weights": {"a": 0.0, "b": 0.0}},
            {},
            {},
            "weights are a = 0, b = 0; expected none below",
        ),
        ({"kind": "weighted", "weights": {"a": -1.0}}, {}, {}, "weights are a = -1, b = 1"),
        ({"kind": "weighted", "weights": {"a": math.nan}}, {}, {}, "weights are a = nan"),
        ({"kind": "power", "alpha": -0.5}, {}, {}, "alpha is -0.5; expected 0"),
        ({"steps_per_epoch": -1}, {}, {}, "steps_per_epoch is -1"),
        ({"order": ("a", "bb")}, {}, {}, 'names "bb" .did you mean "b"'),
        ({"order": ("a",)}, {}, {}, "leaves out b"),
        ({}, {}, {"fractions": {"a": 0.0}}, 'fraction of "a" is 0; expected more than 0'),
        ({}, {}, {"fractions": {"z": 0.5}}, 'names "z"'),
        ({}, {}, {"seed": -1}, "seed is -1"),
    ],
)
def test_bad_input_is_told_in_one_line(
    config: dict[str, Any], tasks: dict[str, int], rest: dict[str, Any], message: str
) -> None:
    chosen = {} if message == "no tasks" else sized(**(tasks or {"a": 5, "b": 5}))
    with pytest.raises(MinbertError, match=message) as caught:
        make_sampler(SamplerConfig(**config), chosen, epochs=1, batch_size=4, **({"seed": 0} | rest))
    assert "\n" not in str(caught.value)


def test_what_a_kind_does_not_use_is_not_its_concern() -> None:
    for variant in set(VARIANTS) - {"power", "weighted"}:
        assert plan(make(variant, sized(a=5), config={"alpha": -1.0, "weights": {"a": -1.0}})).steps > 0


def test_tasks_of_one_row() -> None:
    tasks = {"a": np.array([500]), "b": np.array([1])}
    for variant in VARIANTS:
        steps = list(chain.from_iterable(run(make(variant, tasks, epochs=1, batch_tokens=64))))
        assert all(isinstance(part, Part) and part.rows.tolist() == [0] for step in steps for part in step)


# --- a run with fewer steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_thinned_run_has_so_many_steps_of_the_whole_one_in_its_order(variant: str) -> None:
    tasks = sized(a=40, b=23, c=100)
    every = run(make(variant, tasks))
    steps = sum(map(len, every))
    sampler = make(variant, tasks, max_steps=steps // 3)
    found = run(sampler)
    assert sum(map(len, found)) == steps // 3
    assert (plan(sampler).steps, plan(sampler).whole) == (steps // 3, steps)
    for whole, kept in zip(every, found, strict=True):
        assert abs(len(kept) - len(whole) / 3) < 1.1  # each epoch keeps its share
        rest = iter(plain(whole))
        assert all(step in rest for step in plain(kept))  # a subsequence
    assert [plain(epoch) for epoch in run(sampler)] == [plain(epoch) for epoch in found]


@pytest.mark.parametrize("variant", ["sequential", "round-robin", "round-robin-batch", "proportional"])
def test_a_thinned_run_keeps_the_share_of_every_task(variant: str) -> None:
    """Every third step of three tasks in turn would be the same task's each time."""
    tasks = sized(a=400, b=400, c=400)
    shares = plan(make(variant, tasks, epochs=2, max_steps=200)).tasks
    assert {name: task.batches for name, task in shares.items()} == pytest.approx(dict.fromkeys("abc", 200 / 3), abs=20)


def test_a_run_that_is_short_enough_is_left_alone() -> None:
    tasks = sized(a=40, b=23)
    every = run(make("proportional", tasks))
    for most in (0, sum(map(len, every)), 10_000):
        assert [plain(epoch) for epoch in run(make("proportional", tasks, max_steps=most))] == [plain(e) for e in every]


def test_fewer_steps_than_epochs() -> None:
    sampler = make("round-robin", sized(a=8, b=8), epochs=5, max_steps=2)
    assert sum(plan(sampler).epochs) == 2
    assert len(plan(sampler).epochs) == 5
