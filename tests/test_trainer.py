"""The loop: what learns in which mode, formulas written out, seams, and that it goes on when a disk is full."""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from minbert.config import OptimizerConfig, Recipe, SamplerConfig
from minbert.errors import MinbertError
from minbert.machine import probe
from minbert.training import checkpoint
from minbert.training.checkpoint import list_checkpoints
from minbert.training.gradients import add_gradients
from minbert.training.metrics_log import MetricsLog, read_metrics
from minbert.training.trainer import Trainer, rate_factor
from tests.runs import Listener, Stopped, small_recipe, small_trainer, weights_of

FULL = OSError(errno.ENOSPC, "No space left on device")
STEADY = {"schedule": "constant", "warmup": 0.0}
STILL = {"dropout": 0.0, "encoder_dropout": 0.0}


@pytest.fixture
def make(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> Any:
    """`make("sst", "sts", training={...}, rule=...)` is a trainer; what is no table of a recipe goes to the trainer."""

    def make(*names: str, run: str = "run", **given: Any) -> Trainer:
        tables = ("model", "sampler", "optimizer", "training", "tasks", "seed")
        recipe = small_recipe(tiny_encoder, *names, **{key: given.pop(key) for key in tables if key in given})
        return small_trainer(recipe, tmp_path / run, small_data, **given)

    return make


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def place(name: str) -> str:
    """encoder.layers.1.attention.out.bias is in layers.1."""
    path = name.split(".")
    if path[0] != "encoder":
        return path[0]
    return ".".join(path[1:3]) if path[1] == "layers" else path[1]


# --- what learns ----------------------------------------------------------------------------------------------------


def test_finetune_trains_everything(make: Any) -> None:
    trainer = make(model={"pooling": "pooler", "common_layer": True}, optimizer=STEADY)
    before = weights_of(trainer.model)
    trainer.train()
    assert changed(before, weights_of(trainer.model)) == set(before)


def test_pretrain_leaves_the_encoder_as_it_was(make: Any) -> None:
    trainer = make(model={"pooling": "pooler", "common_layer": True}, training={"mode": "pretrain"}, optimizer=STEADY)
    before = weights_of(trainer.model)
    trainer.train()
    assert changed(before, weights_of(trainer.model)) == {name for name in before if not name.startswith("encoder.")}


def test_unfreeze_adds_a_layer_each_epoch_from_the_top(make: Any) -> None:
    seen: list[dict[str, Tensor]] = []

    def evaluate(model: torch.nn.Module) -> dict[str, dict[str, float]]:
        seen.append(weights_of(model))
        return {"dev": {"sst": 0.5, "sts": 0.5}}

    trainer = make(
        "sst",
        "sts",
        model={"pooling": "pooler"},
        training={"mode": "unfreeze", "epochs": 5},
        optimizer=STEADY,
        evaluate=evaluate,
    )
    seen.append(weights_of(trainer.model))
    trainer.train()
    learnt = [{place(name) for name in changed(*pair)} for pair in pairwise(seen)]
    top = {"heads", "layers.1", "pooler"}
    everything = top | {"layers.0", "embeddings"}
    assert learnt == [{"heads"}, top, top | {"layers.0"}, everything, everything]


@pytest.mark.parametrize(("mode", "times"), [("finetune", 1), ("pretrain", 1), ("unfreeze", 4)])
def test_what_was_recorded_is_forgotten_only_when_what_learns_changes(make: Any, mode: str, times: int) -> None:
    """A recorded step is good for as long as the same parameters learn."""
    trainer, cleared = make("sst", training={"mode": mode, "epochs": 6}), []
    trainer.feeder.clear = lambda: cleared.append(trainer.step)
    trainer.train()
    assert len(cleared) == times


@pytest.mark.parametrize("mode", ["pretrain", "unfreeze"])
def test_a_head_without_weights_on_a_frozen_encoder(make: Any, mode: str) -> None:
    """A cosine has nothing to learn; the run goes on with what has."""
    trainer = make("sst", "sts", tasks={"sts": {"head": "cosine"}}, training={"mode": mode}, optimizer=STEADY)
    before = weights_of(trainer.model)
    trainer.train()
    found = {place(name) for name in changed(before, weights_of(trainer.model))}
    assert found == ({"heads"} if mode == "pretrain" else {"heads", "layers.1"})


def test_it_learns(make: Any) -> None:
    trainer = make(
        "sst", "quora", model=STILL, training={"epochs": 12, "log_every": 6}, optimizer={"lr": 3e-3, "warmup": 0.1}
    )
    trainer.train()
    losses = [line["loss"] for line in read_metrics(trainer.run / "metrics.jsonl") if line["kind"] == "train"]
    assert all(losses[-1][task] < 0.7 * losses[0][task] for task in ("sst", "quora"))


# --- formulas -------------------------------------------------------------------------------------------------------


def test_the_moving_average_is_the_formula(make: Any) -> None:
    decay, evaluated = 0.8, []

    def evaluate(model: torch.nn.Module) -> dict[str, dict[str, float]]:
        evaluated.append(weights_of(model))
        return {"dev": {"sst": 0.5}}

    trainer = make("sst", training={"ema": decay, "accumulate": 2, "epochs": 3}, evaluate=evaluate)
    expected = {name: value.double() for name, value in weights_of(trainer.model).items()}
    history: list[dict[str, Tensor]] = []
    step = trainer.optimizer.step

    def note() -> None:
        step()
        for name, value in weights_of(trainer.model).items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
        history.append(weights_of(trainer.model))

    trainer.optimizer.step = note
    trainer.train()
    assert len(history) == math.ceil(9 / 2)
    for name, value in trainer.average.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-7)
    assert changed(evaluated[-1], trainer.average) == set(), "the average is what is scored and kept"
    assert changed(weights_of(trainer.model), history[-1]) == set(), "and what is trained on is the last weights"


@pytest.mark.parametrize("kind", ["adamw", "radam"])
@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_clipping_bounds_the_norm(make: Any, clip: float, kind: str) -> None:
    """The first moments, in which a gradient shows, are those of gradients that torch clipped."""
    trainer = make(
        "sts", tasks={"sts": {"weight": 30.0}}, optimizer={"clip": clip, "kind": kind}, training={"epochs": 1}
    )
    state, step = trainer.optimizer.state, trainer.optimizer.step
    named = dict(trainer.model.named_parameters())
    moments = {name: torch.zeros_like(value) for name, value in named.items()}
    norms: list[tuple[float, float]] = []  # of the gradient as it came, and as it counted

    def note() -> None:
        learning = {name: p for name, p in named.items() if p.grad is not None}
        copies = [torch.nn.Parameter(torch.zeros_like(p)) for p in learning.values()]
        for each, p in zip(copies, learning.values(), strict=True):
            each.grad = p.grad.clone()
        whole = float(torch.nn.utils.clip_grad_norm_(copies, clip or math.inf))
        step()
        square = 0.0
        for each, (name, p) in zip(copies, learning.items(), strict=True):
            counted = (state[p]["exp_avg"] - 0.9 * moments[name]) / 0.1
            square += float(counted.double().square().sum())
            moments[name].lerp_(each.grad, 0.1)
            torch.testing.assert_close(state[p]["exp_avg"], moments[name], rtol=1e-4, atol=1e-6)
        norms.append((whole, math.sqrt(square)))

    trainer.optimizer.step = note
    trainer.train()
    assert len(norms) == 3
    assert min(whole for whole, _ in norms) > 1
    bounds = [clip if clip == 0.05 else whole for whole, _ in norms]
    assert [counted for _, counted in norms] == pytest.approx(bounds, rel=1e-3)


def test_accumulating_is_a_larger_batch(make: Any) -> None:
    """Two batches of 12 and one of 24 are the same rows: the same update, but for rounding."""
    settings = {"model": STILL, "optimizer": {**STEADY, "clip": 0.0}}
    trainers = [
        make("sts", run="two", training={"epochs": 1, "batch_size": 12, "accumulate": 2}, **settings),
        make("sts", run="one", training={"epochs": 1, "batch_size": 24}, **settings),
    ]
    before = weights_of(trainers[0].model)
    gradients: list[dict[str, Tensor]] = []
    for trainer in trainers:
        step = trainer.optimizer.step

        def note(trainer: Trainer = trainer, step: Any = step) -> None:
            gradients.append(
                {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
            )
            step()

        trainer.optimizer.step = note
        trainer.train()
    assert [trainer.step for trainer in trainers] == [2, 1]
    assert len(gradients) == 2
    assert changed(before, weights_of(trainers[0].model)) != set()
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], rtol=1e-4, atol=1e-6)
    for name, value in weights_of(trainers[0].model).items():
        torch.testing.assert_close(value, weights_of(trainers[1].model)[name], rtol=1e-3, atol=3e-5)


def test_the_last_batches_count_though_they_do_not_fill_the_sum(make: Any) -> None:
    trainer = make("sst", training={"epochs": 1, "accumulate": 2}, optimizer=STEADY)  # 3 batches
    steps: list[int] = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (steps.append(trainer.step), step())
    trainer.train()
    assert steps == [2, 3]


RATES = [
    # schedule, warm-up, progress, factor
    ("constant", 0.0, 0.0, 1.0),
    ("constant", 0.1, 0.05, 0.5),
    ("constant", 0.1, 0.1, 1.0),
    ("constant", 0.1, 1.0, 1.0),
    ("linear", 0.0, 0.25, 0.75),
    ("linear", 0.2, 0.1, 0.5),
    ("linear", 0.2, 0.2, 1.0),
    ("linear", 0.2, 0.6, 0.5),
    ("linear", 0.2, 1.0, 0.0),
    ("cosine", 0.0, 0.0, 1.0),
    ("cosine", 0.0, 0.5, 0.5),
    ("cosine", 0.5, 0.75, 0.5),
    ("cosine", 0.0, 1 / 3, 0.75),
    ("cosine", 0.2, 1.0, 0.0),
    ("linear", 1.0, 0.5, 0.5),
    ("linear", 1.0, 1.0, 0.0),
    ("constant", 1.0, 1.0, 1.0),
]


@pytest.mark.parametrize(("schedule", "warmup", "progress", "factor"), RATES)
def test_rate_factor(schedule: Any, warmup: float, progress: float, factor: float) -> None:
    assert rate_factor(OptimizerConfig(schedule=schedule, warmup=warmup), progress) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.06, 0.5, 1.0])
def test_rate_factor_stays_within_0_and_1(schedule: Any, warmup: float) -> None:
    config = OptimizerConfig(schedule=schedule, warmup=warmup)
    factors = np.array([rate_factor(config, progress) for progress in np.linspace(0, 1, 201)])
    assert factors.min() >= 0
    assert factors.max() <= 1
    falling = factors[int(200 * warmup) + 1 :]
    assert (np.diff(falling) <= 0).all()


def test_every_group_follows_the_schedule(make: Any) -> None:
    trainer = make("sst", optimizer={"lr": 1e-3, "head_lr": 1e-2, "warmup": 0.5, "layer_decay": 0.5})
    seen: list[list[float]] = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (seen.append([g["lr"] for g in trainer.optimizer.param_groups]), step())
    trainer.train()
    factors = [1 / 6, 1 / 2, 5 / 6, 5 / 6, 1 / 2, 1 / 6]  # of 6 steps the first 3 warm up; at each one's middle
    assert seen == [pytest.approx([rate * factor for rate in trainer.rates], abs=1e-15) for factor in factors]


def test_a_rate_that_restarts_falls_in_each_tasks_turn(make: Any) -> None:
    """Three batches of each task in an epoch, two epochs; sst has a second turn."""
    order = {"kind": "sequential", "order": ["sst", "sts", "sst"]}
    for restart, (steps, turns) in {True: (6, 3), False: (18, 1)}.items():
        falling = {"lr": 1e-3, "schedule": "linear", "warmup": 0.0, "restart": restart}
        trainer = make("sst", "sts", run=str(restart), sampler=order, optimizer=falling, training={"log_every": 1})
        trainer.train()
        rates = [line["lr"] for line in read_metrics(trainer.run / "metrics.jsonl") if line["kind"] == "train"]
        assert rates == pytest.approx([1e-3 * (1 - (step + 0.5) / steps) for step in range(steps)] * turns)


def test_rates_of_the_groups(make: Any) -> None:
    trainer = make(
        "sst",
        "sts",
        optimizer={"lr": 1e-3, "head_lr": 5e-3, "layer_decay": 0.5},
        training={"loss_weighting": "uncertainty"},
    )
    rates = {str(group["name"]).removesuffix(" (no decay)"): group["lr"] for group in trainer.optimizer.param_groups}
    assert rates == {
        "embeddings": 1e-3 / 8,
        "layers.0": 1e-3 / 4,
        "layers.1": 1e-3 / 2,
        "encoder top": 1e-3,
        "heads": 5e-3,
        "loss weights": 5e-3,
    }
    decays = {str(group["name"]): group["weight_decay"] for group in trainer.optimizer.param_groups}
    assert {name for name, decay in decays.items() if decay == 0} == {
        name for name in decays if name.endswith("(no decay)") or name == "loss weights"
    }


def test_a_head_rate_of_0_is_0(make: Any) -> None:
    trainer = make("sst", optimizer={"head_lr": 0.0}, training={"loss_weighting": "uncertainty"})
    rates = {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert rates["heads"] == rates["loss weights"] == 0
    before = weights_of(trainer.model)
    trainer.train()
    assert "heads" not in {place(name) for name in changed(before, weights_of(trainer.model))}


def test_the_log_holds_means_over_the_rows_since_the_last_line(make: Any) -> None:
    noted: list[tuple[str, float, int]] = []
    trainer = make("sst", "sts", training={"log_every": 4, "epochs": 1, "batch_size": 7})  # 4 batches each, one of 3
    for task, loss in list(trainer.losses.items()):

        def note(outputs: Tensor, labels: Tensor, task: str = task, loss: Any = loss) -> Tensor:
            value = loss(outputs, labels)
            noted.append((task, value.item(), len(labels)))
            return value

        trainer.losses[task] = note
    trainer.train()
    lines = [line for line in read_metrics(trainer.run / "metrics.jsonl") if line["kind"] == "train"]
    assert [(line["step"], line["epoch"], line["rows"]) for line in lines] == [
        (4, 1, sum(n for *_, n in noted[:4])),
        (8, 1, 48),
    ]
    for line, part in zip(lines, (noted[:4], noted[4:]), strict=True):
        for task in {task for task, *_ in part}:
            rows = [(value, count) for name, value, count in part if name == task]
            expected = sum(value * count for value, count in rows) / sum(count for _, count in rows)
            assert line["loss"][task] == pytest.approx(expected, rel=1e-6)
        assert set(line["loss"]) == {task for task, *_ in part}


# --- seams ----------------------------------------------------------------------------------------------------------


class NotedRule:
    """A gradient rule that adds, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []

    def __call__(self, losses: Mapping[str, Tensor]) -> None:
        assert all(loss.ndim == 0 and loss.requires_grad for loss in losses.values())
        self.calls.append({task: loss.item() for task, loss in losses.items()})
        add_gradients(losses)


def first_call(make: Any, **training: Any) -> dict[str, float]:
    rule = NotedRule()
    make(
        sampler={"kind": "all"},
        tasks={"sst": {"weight": training.pop("weight", 1.0)}},
        training={"epochs": 1, **training},
        rule=rule,
    ).train()
    return rule.calls[0]


def test_the_rule_is_given_each_tasks_loss(make: Any) -> None:
    rule = NotedRule()
    trainer = make(sampler={"kind": "all"}, training={"epochs": 1, "log_every": 1}, rule=rule)
    trainer.train()
    lines = [line for line in read_metrics(trainer.run / "metrics.jsonl") if line["kind"] == "train"]
    assert [set(call) for call in rule.calls] == [{"sst", "quora", "sts"}] * 3
    assert rule.calls == [pytest.approx(line["loss"], rel=1e-6) for line in lines]


def test_the_rule_is_given_weighted_losses(make: Any) -> None:
    plain = first_call(make)
    weighted = first_call(make, weight=3.0)
    assert weighted == pytest.approx({**plain, "sst": 3 * plain["sst"]}, rel=1e-6)
    assert first_call(make, loss_weighting="mean") == pytest.approx({k: v / 3 for k, v in plain.items()}, rel=1e-6)
    assert first_call(make, accumulate=4) == pytest.approx({k: v / 4 for k, v in plain.items()}, rel=1e-6)
    # Uncertainty begins at a variance of 1: classification as it is, squared errors halved
    assert first_call(make, loss_weighting="uncertainty") == pytest.approx({**plain, "sts": plain["sts"] / 2}, rel=1e-6)


def test_another_rule_is_another_gradient(make: Any) -> None:
    """The seam is the only place where gradients are made: a rule that does nothing trains nothing."""
    trainer = make("sst", rule=lambda _: None)
    before = weights_of(trainer.model)
    trainer.train()
    assert changed(before, weights_of(trainer.model)) == set()


def test_uncertainty_learns_its_variances(make: Any) -> None:
    trainer = make(training={"loss_weighting": "uncertainty"}, optimizer={**STEADY, "head_lr": 1e-2})
    trainer.train()
    variances = {name: value.item() for name, value in trainer.weighting.log_variances.items()}
    assert variances["sts"] > 0.01, "a large error is much noise"
    assert len(set(variances.values())) == 3


KINDS = get_args(get_type_hints(SamplerConfig)["kind"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_trains(make: Any, kind: str) -> None:
    rule, listener = NotedRule(), Listener()
    trainer = make("sst", "sts", sampler={"kind": kind}, training={"epochs": 1}, rule=rule, watcher=listener)
    before = weights_of(trainer.model)
    trainer.train()
    assert listener.plan is not None
    assert listener.steps == list(range(1, listener.plan.steps + 1))
    assert len(rule.calls) == trainer.step == listener.plan.steps
    assert trainer.rows == sum(task.rows for task in listener.plan.tasks.values())
    assert {task for call in rule.calls for task in call} <= {"sst", "sts"}
    assert "heads" in {place(name) for name in changed(before, weights_of(trainer.model))}
    assert all(math.isfinite(loss) for call in rule.calls for loss in call.values())
    several = [len(call) for call in rule.calls]
    assert max(several) == (2 if kind in ("all", "mixed") else 1)
    if kind == "all":
        assert min(several) == 2


# --- choosing and stopping ------------------------------------------------------------------------------------------

SCORES = [
    {"sst": 0.5, "sts": 0.5},
    {"sst": 0.9, "sts": 0.0},
    {"sst": 0.6, "sts": 0.6},
]


def scripted(*scores: dict[str, float]) -> Any:
    script = iter(scores)
    return lambda _model: {"dev": next(script)}


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ({"best": "mean"}, [["model"], [], ["model"]]),
        ({"best": "weighted-mean", "best_weights": {"sst": 3.0}}, [["model"], ["model"], []]),
        ({"best": "any-improves"}, [["model"], ["model"], ["model"]]),
        ({"best": "task", "best_task": "sst"}, [["model"], ["model"], []]),
        ({"best": "per-task"}, [["model", "models/sst", "models/sts"], ["models/sst"], ["model", "models/sts"]]),
    ],
)
def test_the_rules_decide_what_is_saved(make: Any, best: dict[str, Any], expected: list[list[str]]) -> None:
    saved: list[tuple[int, str]] = []
    trainer = make(
        "sst",
        "sts",
        training={"epochs": 3, "batch_size": 24, **best},
        evaluate=scripted(*SCORES),
        save=lambda _model, name: saved.append((trainer.step // 2 - 1, name)),
    )
    trainer.train()
    assert saved == [(number, name) for number, names in enumerate(expected) for name in names]
    lines = [line for line in read_metrics(trainer.run / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert [line["kept"] for line in lines] == expected
    assert [line["scores"]["dev"] for line in lines] == SCORES


def test_early_stopping(make: Any) -> None:
    scores = [{"sst": score} for score in (0.1, 0.3, 0.2, 0.3, 0.9)]
    trainer = make("sst", training={"epochs": 9, "patience": 2}, evaluate=scripted(*scores))
    trainer.train()
    assert trainer.step == 4 * 3, "two evaluations without a better one, the last of them only as good"
    assert trainer.plan.steps == 27
    assert list_checkpoints(trainer.run / "checkpoints")[-1].name == "step-00000012"


def test_when_it_evaluates_and_checkpoints(make: Any) -> None:
    listener = Listener()
    trainer = make(
        "sst", training={"evaluate_every": 2, "checkpoint_every": 5, "keep": 9, "log_every": 99}, watcher=listener
    )
    trainer.train()
    assert [record["step"] for record in listener.evaluations] == [2, 3, 4, 6]  # every 2, and the ends of both epochs
    assert [record["epoch"] for record in listener.evaluations] == [1, 1, 2, 2]
    names = [path.name for path in list_checkpoints(trainer.run / "checkpoints")]
    assert names == [f"step-0000000{step}" for step in (2, 3, 4, 5, 6)]


def test_it_scores_in_eval_mode_and_trains_in_train_mode(make: Any) -> None:
    modes: list[tuple[str, bool]] = []

    def evaluate(model: torch.nn.Module) -> dict[str, dict[str, float]]:
        modes.append(("evaluate", model.training))
        return {"dev": {"sst": 0.5}}

    def rule(losses: Mapping[str, Tensor]) -> None:
        modes.append(("train", trainer.model.training))
        add_gradients(losses)

    trainer = make("sst", training={"evaluate_every": 1, "epochs": 1}, evaluate=evaluate, rule=rule)
    trainer.train()
    assert modes == [("train", True), ("evaluate", False)] * 3


# --- randomness -----------------------------------------------------------------------------------------------------


def test_other_peoples_generators_are_left_alone(make: Any) -> None:
    trainer = make("sst")
    torch.manual_seed(123)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    trainer.train()
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_torchs_generator_is_put_back_after_an_error_too(make: Any) -> None:
    trainer = make("sst", watcher=Listener(at_step=2))
    before = torch.get_rng_state()
    with pytest.raises(Stopped):
        trainer.train()
    assert torch.equal(before, torch.get_rng_state())


def test_the_seed_decides_and_nothing_else(make: Any) -> None:
    ends = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)  # what others drew before does not matter
        trainer = make("sst", "sts", run=f"run-{number}", seed=seed)
        trainer.train()
        ends.append(weights_of(trainer.model))
    assert changed(ends[0], ends[1]) == set()
    assert {place(name) for name in changed(ends[0], ends[2])} >= {"heads", "embeddings", "layers.0", "layers.1"}


def test_dropout_is_seeded_too(make: Any) -> None:
    """The same heads and the same order of rows, but other draws of dropout."""
    ends = []
    for number in range(2):
        trainer = make("sst", run=f"run-{number}")
        trainer.recipe = Recipe(**{**vars(trainer.recipe), "seed": number})
        trainer.train()
        ends.append(weights_of(trainer.model))
    assert changed(*ends) != set()


# --- trouble --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number(make: Any, value: float) -> None:
    trainer = make("sst", "sts", training={"log_every": 1, "checkpoint_every": 1, "keep": 99})
    loss, calls = trainer.losses["sts"], iter(range(100))
    trainer.losses["sts"] = lambda *given: loss(*given) * (value if next(calls) == 2 else 1)
    with pytest.raises(MinbertError) as found:
        trainer.train()
    good = trainer.step - 1
    assert str(found.value) == (
        f"the loss of sts is {value} at step {trainer.step}; the last good checkpoint is step-{good:08d}"
    )
    assert list_checkpoints(trainer.run / "checkpoints")[-1].name == f"step-{good:08d}"


def test_a_loss_that_is_no_number_before_the_first_checkpoint(make: Any) -> None:
    trainer = make("sst", training={"log_every": 1})
    trainer.losses["sst"] = lambda outputs, _: outputs.sum() * math.nan
    with pytest.raises(MinbertError, match=r"^the loss of sst is nan at step 1$"):
        trainer.train()


def fails_between(first: int, last: int, original: Any, error: Exception) -> Any:
    """The original, failing at its calls `first` to `last`, counted from 1."""
    calls = iter(range(1, 10_000))

    def sometimes(*arguments: Any, **options: Any) -> Any:
        if first <= next(calls) <= last:
            raise error
        return original(*arguments, **options)

    return sometimes


@pytest.mark.parametrize("error", [FULL, SafetensorError("I/O error: No space left on device (os error 28)")])
def test_a_checkpoint_that_cannot_be_saved(make: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """safetensors says it in its own way; both are heard, and training goes on."""
    listener = Listener()
    trainer = make("sst", training={"checkpoint_every": 1, "evaluate_every": 99}, watcher=listener)
    monkeypatch.setattr(checkpoint, "save_file", fails_between(2, 3, checkpoint.save_file, error))
    trainer.train()
    assert trainer.step == 6
    why = error.strerror if isinstance(error, OSError) else str(error)
    assert listener.warnings == [
        f"checkpoint not saved at step {step} ({why}); the last good one is step-00000001; training goes on"
        for step in (2, 3)
    ]
    folder = trainer.run / "checkpoints"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000005", "step-00000006"]


def test_the_last_good_checkpoint_stays_whole(
    make: Any, monkeypatch: pytest.MonkeyPatch, tiny_encoder: Path, small_data: Path
) -> None:
    """Full from step 3 to the end: what is resumed is step 2, and it ends as if nothing had been."""
    settings = {"training": {"checkpoint_every": 1, "keep": 1, "train_sample": 0}}
    listener = Listener()
    trainer = make("sst", watcher=listener, **settings)
    with monkeypatch.context() as patch:
        patch.setattr("minbert.atomic.os.fsync", fails_between(1 + 2 * 5, 999, lambda _: None, FULL))
        trainer.train()
    assert [path.name for path in list_checkpoints(trainer.run / "checkpoints")] == ["step-00000002"]
    assert len(listener.warnings) == 4
    expected = weights_of(trainer.model)
    again = make("sst", **settings)
    again.train(resume=True)
    assert changed(expected, weights_of(again.model)) == set()


def test_no_checkpoint_could_be_saved_yet(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    trainer = make("sst", training={"epochs": 1}, watcher=listener)
    monkeypatch.setattr(checkpoint, "save_file", fails_between(1, 99, None, FULL))
    trainer.train()
    (warning,) = listener.warnings
    assert warning == ("checkpoint not saved at step 3 (No space left on device); there is none yet; training goes on")


@pytest.mark.parametrize("error", [FULL, SafetensorError("I/O error")])
def test_a_best_model_that_could_not_be_saved_is_not_the_one_to_beat(make: Any, error: Exception) -> None:
    """0.9 is lost to a full disk; then 0.6, better than the 0.5 that is kept, is kept."""
    scores = [{"sst": score} for score in (0.5, 0.9, 0.4, 0.6, 0.5)]
    saved: list[float] = []
    listener = Listener()
    trainer = make(
        "sst",
        training={"epochs": 5, "patience": 3},
        evaluate=scripted(*scores),
        save=fails_between(2, 2, lambda _model, _name: saved.append(trainer.selection.best["*"]), error),
        watcher=listener,
    )
    trainer.train()
    assert saved == [0.5, 0.6]
    assert [record["kept"] for record in listener.evaluations] == [["model"], [], [], ["model"], []]
    assert len(listener.warnings) == 1
    assert listener.warnings[0].startswith("the model could not be saved (")
    assert trainer.step == 15, "the 0.9 was progress: patience does not run out over it"


def test_a_log_that_cannot_be_written(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    trainer = make("sst", training={"epochs": 1, "log_every": 1}, watcher=listener)
    monkeypatch.setattr(MetricsLog, "write", fails_between(2, 2, MetricsLog.write, FULL))
    trainer.train()
    assert listener.warnings == [
        "metrics.jsonl not written at step 2 (No space left on device); training goes on",
    ]
    assert [line["step"] for line in read_metrics(trainer.run / "metrics.jsonl")] == [1, 3, 3]


def test_an_error_that_is_not_the_disks_is_not_hidden(make: Any) -> None:
    def save(_model: Any, _name: str) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        make("sst", save=save).train()


def test_bf16_on_a_cpu(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "home"))  # where the answer of the probe is kept
    if not (found := probe("bf16", "cpu")).works:
        pytest.skip(f"no bf16 on this CPU: {found.reason}")
    trainer = make("sst", "sts", training={"precision": "bf16", "epochs": 1}, optimizer=STEADY)
    seen: list[torch.dtype] = []
    loss = trainer.losses["sst"]
    trainer.losses["sst"] = lambda outputs, labels: (seen.append(outputs.dtype), loss(outputs, labels))[1]
    before = weights_of(trainer.model)
    trainer.train()
    assert set(seen) == {torch.float32}, "losses are computed in full precision"
    assert all(value.dtype == torch.float32 for value in trainer.model.parameters())
    assert changed(before, weights_of(trainer.model)) != set()
    exact = make("sst", "sts", run="exact", training={"precision": "fp32", "epochs": 1}, optimizer=STEADY)
    exact.train()
    assert changed(weights_of(exact.model), weights_of(trainer.model)) != set()
    assert (trainer.precision, make("sst", run="auto").precision) == ("bf16", "fp32")


def test_the_schedule_spans_what_is_left_of_a_thinned_run(tmp_path: Path, tiny_encoder: Path, small_data: Path) -> None:
    recipe = small_recipe(
        tiny_encoder,
        optimizer={"lr": 1e-3, "schedule": "linear", "warmup": 0.0},
        training={"epochs": 2, "batch_size": 8, "max_steps": 4, "log_every": 1},
    )
    trainer = small_trainer(recipe, tmp_path / "run", small_data)
    trainer.train()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rates = [record["lr"] for record in records if record["kind"] == "train"]
    assert rates == pytest.approx([1e-3 * share for share in (0.875, 0.625, 0.375, 0.125)])
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [2, 4]
    assert (trainer.plan.steps, trainer.plan.whole) == (4, 18)
