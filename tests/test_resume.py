"""A run that is stopped, anywhere, and resumed ends with the same bytes as one that never was. On the CPU, in process;
real kills are in test_faults.py.
"""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minbert import experiment
from minbert.config import Recipe
from minbert.errors import MinbertError
from minbert.experiment import train
from minbert.model import saved
from minbert.training import checkpoint, trainer
from minbert.training.checkpoint import list_checkpoints
from minbert.training.metrics_log import read_metrics
from minbert.training.step import TrainStep
from tests.runs import CtrlC, Listener, Stopped, left_behind, small_recipe, small_trainer, unlike

Whole = Callable[[Recipe], Path]

# 12 steps unless the sampler or the epochs say otherwise. The checkpoint at step 3 falls between two batches whose
# gradients are added.
OFTEN = {"checkpoint_every": 3, "evaluate_every": 4, "epochs": 2, "batch_size": 12, "train_sample": 8}
UNCERTAIN = {"loss_weighting": "uncertainty", "accumulate": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoints-at-evaluations-only": {"training": {"checkpoint_every": 0, "evaluate_every": 0}},
    "accumulate": {"training": {"accumulate": 4}, "model": {"common_layer": True, "common_dropout": 0.2}},
    "pretrain": {"training": {"mode": "pretrain", "accumulate": 2, "ema": 0.9}},
    "unfreeze": {"training": {"mode": "unfreeze", "accumulate": 2, "epochs": 4, "batch_size": 24}},
    "patience": {"training": {"evaluate_every": 2, "patience": 3}, "optimizer": {"lr": 0.0}},
    "radam": {
        "optimizer": {"kind": "radam", "layer_decay": 0.8, "head_lr": 3e-3, "bias_correction": "course"},
        "sampler": {"kind": "weighted", "weights": {"sst": 3.0}, "steps_per_epoch": 7},
    },
    "per-task": {
        "training": {"best": "per-task"},
        "sampler": {"kind": "round-robin", "unit": "batch", "order": ["sts", "sst", "quora"]},
    },
    "sequential": {"sampler": {"kind": "sequential"}, "training": {"epochs": 1, "batch_size": 8}},
    "annealed": {"sampler": {"kind": "annealed"}, "training": UNCERTAIN},
    "all": {"sampler": {"kind": "all"}, "training": {**UNCERTAIN, "checkpoint_every": 1, "batch_size": 6}},
    "thinned": {"sampler": {"kind": "round-robin"}, "training": {"max_steps": 9}},
    "one-trained": {"tasks": {name: {"trained": False} for name in ("quora", "sts")}, "training": {"batch_size": 4}},
    "mixed": {"sampler": {"kind": "mixed"}, "training": {**UNCERTAIN, "ema": 0.5, "batch_tokens": 300}},
}
EVERYTHING: dict[str, Any] = {
    "sampler": {"kind": "uniform"},
    "model": {"common_layer": True},
    "training": {**UNCERTAIN, "mode": "unfreeze", "ema": 0.9, "patience": 50, "best": "any-improves"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_data: Path) -> Whole:
    """`whole(recipe)` is the folder of the run that went through at once; made once for each recipe."""
    made: dict[str, Path] = {}

    def run(recipe: Recipe) -> Path:
        key = repr(recipe)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("whole") / "run"
            train(recipe, out=made[key], data=small_data, device="cpu")
        return made[key]

    return run


def variant(encoder: Path, changes: dict[str, Any]) -> Recipe:
    return small_recipe(encoder, **{**changes, "training": {**OFTEN, **changes.get("training", {})}})


def stop_and_go(recipe: Recipe, data: Path, out: Path, stops: Iterable[int]) -> None:
    """Stop at each of the steps, resuming in between, and then go to the end."""
    for stop in stops:
        with pytest.raises(Stopped):
            train(recipe, out=out, data=data, device="cpu", resume=out.exists(), watcher=Listener(at_step=stop))
    train(recipe, out=out, data=data, device="cpu", resume=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_resumed_several_times(name: str, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole) -> None:
    recipe = variant(tiny_encoder, VARIANTS[name])
    expected = whole(recipe)
    stops = [2, 4, 5] if name in ("patience", "all") else [2, 4, 8]  # before the first checkpoint, after it, later
    stop_and_go(recipe, small_data, tmp_path / "run", stops)
    assert unlike(tmp_path / "run", expected) == []


@pytest.mark.parametrize("stop", range(1, 13))
def test_stopped_at_any_step(stop: int, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole) -> None:
    recipe = variant(tiny_encoder, EVERYTHING)
    stop_and_go(recipe, small_data, tmp_path / "run", [stop])
    assert unlike(tmp_path / "run", whole(recipe)) == []


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stops=st.lists(st.integers(1, 12), unique=True, max_size=4).map(sorted),
    accumulate=st.integers(1, 4),
    every=st.integers(0, 5),
    mode=st.sampled_from(["finetune", "pretrain", "unfreeze"]),
    weighting=st.sampled_from(["sum", "mean", "uncertainty"]),
    kind=st.sampled_from(["proportional", "uniform", "round-robin"]),
)
def test_any_stops_of_any_recipe(
    stops: list[int],
    accumulate: int,
    every: int,
    mode: str,
    weighting: str,
    kind: str,
    tiny_encoder: Path,
    small_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
    whole: Whole,
) -> None:
    training = {"accumulate": accumulate, "checkpoint_every": every, "mode": mode, "loss_weighting": weighting}
    recipe = variant(tiny_encoder, {"training": training, "sampler": {"kind": kind}})
    run = tmp_path_factory.mktemp("stopped") / "run"
    stop_and_go(recipe, small_data, run, stops)
    assert unlike(run, whole(recipe)) == []


def test_stopped_between_the_kept_model_and_its_checkpoint(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole
) -> None:
    recipe = variant(tiny_encoder, EVERYTHING)
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        train(recipe, out=run, data=small_data, device="cpu", watcher=Listener(at_evaluation=4))
    assert (run / "model").exists()
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(recipe)) == []


@pytest.mark.parametrize("where", ["checkpoint", "model", "after the checkpoint"])
def test_stopped_while_saving(
    where: str, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = variant(tiny_encoder, EVERYTHING)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        module: Any = {"checkpoint": checkpoint, "model": saved, "after the checkpoint": trainer}[where]
        name = "save_checkpoint" if module is trainer else "save_file"
        original, calls = getattr(module, name), iter(range(100))

        def save_and_stop(*arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            if next(calls) == (0 if module is saved else 1):
                raise KeyboardInterrupt

        patch.setattr(module, name, save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=run, data=small_data, device="cpu")
    assert not list(run.rglob(".*.part")), "an interrupted save cleans up behind itself"
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(recipe)) == []


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


def checkpoints_of(run: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run / "checkpoints")]


def pressing(original: Callable[..., Any], at_call: int, times: int = 1) -> Callable[..., Any]:
    """The original, with Ctrl-C pressed within its call of this number, counted from 1."""
    calls = iter(range(1, 10_000))

    def pressed(*arguments: Any, **options: Any) -> Any:
        if next(calls) == at_call:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return original(*arguments, **options)

    return pressed


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("name", VARIANTS)
def test_ctrl_c_loses_no_step(name: str, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole) -> None:
    """Where no checkpoint is due, where an evaluation is, between batches whose gradients are added: each session goes on
    where the one before was stopped, and in the end it does not show."""
    changes = VARIANTS[name]
    training = {**changes.get("training", {}), "checkpoint_every": 0}
    recipe = variant(tiny_encoder, {**changes, "training": training})
    run, done = tmp_path / "run", []
    for stop in (1, 3, 4, 5):
        listener = CtrlC(at_step=stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=run, data=small_data, device="cpu", resume=run.exists(), watcher=listener)
        done += listener.steps
        assert checkpoints_of(run)[-1] == f"step-{stop:08d}-stopped"
        assert len([one for one in checkpoints_of(run) if one.endswith("stopped")]) == 1
    last = Listener()
    steps = train(recipe, out=run, data=small_data, device="cpu", resume=True, watcher=last).results["steps"]
    assert done + last.steps == list(range(1, steps + 1))
    assert unlike(run, whole(recipe)) == []


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("stop", range(1, 13))
def test_ctrl_c_at_any_step(stop: int, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole) -> None:
    recipe, run = variant(tiny_encoder, EVERYTHING), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out=run, data=small_data, device="cpu", watcher=CtrlC(at_step=stop))
    unfinished = stop % 3 or stop % 12 in (0, 4, 6, 8)  # no checkpoint is due, or one after an evaluation
    assert checkpoints_of(run)[-1] == f"step-{stop:08d}{'-stopped' if unfinished else ''}"
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(recipe)) == []


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("method", ["gradient", "update"])
def test_ctrl_c_within_a_step_waits_for_its_end(
    method: str, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = variant(tiny_encoder, EVERYTHING), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, method, pressing(getattr(TrainStep, method), at_call=5))
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=run, data=small_data, device="cpu")
    assert checkpoints_of(run)[-1] == {"gradient": "step-00000005-stopped", "update": "step-00000010-stopped"}[method]
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(recipe)) == []


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("stop", [4, 6, 12])
def test_ctrl_c_breaks_off_an_evaluation(
    stop: int, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes. The step before it is kept, with its own weights and not their average, and the resumed run
    begins with the evaluation. Stopped there again, it is still to be done."""
    recipe, run = variant(tiny_encoder, EVERYTHING), tmp_path / "run"
    call = 2 * [4, 6, 8, 12].index(stop) + 2  # dev and train are scored each time
    for resume, at_call in ((False, call), (True, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(experiment, "quick_scores", pressing(experiment.quick_scores, at_call))
            with pytest.raises(KeyboardInterrupt):
                train(recipe, out=run, data=small_data, device="cpu", resume=resume)
        assert checkpoints_of(run)[-1] == f"step-{stop:08d}-stopped"
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(recipe)) == []


def test_killed_before_the_checkpoint_of_a_stop_was_removed(
    tiny_encoder: Path,
    small_data: Path,
    tmp_path: Path,
    whole: Whole,
    monkeypatch: pytest.MonkeyPatch,
    ctrl_c_is_heard: None,
) -> None:
    """Then there are two of that step, and what came of its evaluation is there already: it is not there twice."""
    recipe, run = variant(tiny_encoder, EVERYTHING), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out=run, data=small_data, device="cpu", watcher=CtrlC(at_step=4))
    original = checkpoint.shutil.rmtree

    def remove(path: Path, **options: Any) -> None:
        if Path(path).name == "step-00000004-stopped":
            raise Stopped
        original(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", remove)
        with pytest.raises(Stopped):
            train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert checkpoints_of(run)[-2:] == ["step-00000004", "step-00000004-stopped"]
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(recipe)) == []


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_a_second_ctrl_c_ends_at_once(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step: nothing is saved of it."""
    recipe, run = variant(tiny_encoder, EVERYTHING), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "gradient", pressing(TrainStep.gradient, at_call=5, times=2))
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=run, data=small_data, device="cpu")
    assert checkpoints_of(run) == ["step-00000003", "step-00000004"]
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(recipe)) == []


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_with_a_full_disk(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    listener = CtrlC(at_step=2)
    with pytest.raises(KeyboardInterrupt):
        train(variant(tiny_encoder, {}), out=tmp_path / "run", data=small_data, device="cpu", watcher=listener)
    assert listener.warnings == [
        "checkpoint not saved at step 2 (No space left on device); there is none yet; the run ends"
    ]


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_keeps_no_state_that_is_good_for_nothing(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = small_recipe(tiny_encoder, "sst", training={"log_every": 99})
    stopped = small_trainer(recipe, tmp_path / "run", small_data, watcher=CtrlC(at_step=2))
    stopped.losses["sst"] = lambda outputs, _: outputs.sum() * math.nan
    with pytest.raises(MinbertError, match=r"^the loss of sst is nan at step 2$"):
        stopped.train()
    assert checkpoints_of(tmp_path / "run") == []


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_a_damaged_checkpoint_of_a_stop_can_be_removed(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole
) -> None:
    """As the message says: the run goes on from the one before it."""
    recipe, run = variant(tiny_encoder, EVERYTHING), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out=run, data=small_data, device="cpu", watcher=CtrlC(at_step=7))
    assert checkpoints_of(run) == ["step-00000004", "step-00000006", "step-00000007-stopped"]
    (run / "checkpoints" / "step-00000007-stopped" / "state.safetensors").write_bytes(b"")
    with pytest.raises(MinbertError, match=r"step-00000007-stopped: damaged checkpoint"):
        train(recipe, out=run, data=small_data, device="cpu", resume=True)
    shutil.rmtree(run / "checkpoints" / "step-00000007-stopped")
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(recipe)) == []


# --- what else resuming does ----------------------------------------------------------------------------------------


def test_resuming_a_finished_run_changes_nothing(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = variant(tiny_encoder, EVERYTHING)
    run = tmp_path / "run"
    train(recipe, out=run, data=small_data, device="cpu")
    before = left_behind(run)
    listener = Listener()
    train(recipe, out=run, data=small_data, device="cpu", resume=True, watcher=listener)
    assert listener.steps == []
    assert left_behind(run) == before


def test_resuming_an_early_stopped_run_does_not_train_on(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = variant(tiny_encoder, VARIANTS["patience"])
    run = tmp_path / "run"
    steps = train(recipe, out=run, data=small_data, device="cpu").results["steps"]
    listener = Listener()
    again = train(recipe, out=run, data=small_data, device="cpu", resume=True, watcher=listener)
    assert listener.steps == []
    assert again.results["steps"] == steps == 8


def test_resume_without_a_run_begins_one(tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole) -> None:
    recipe = variant(tiny_encoder, EVERYTHING)
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)
    assert unlike(tmp_path / "run", whole(recipe)) == []


def test_seconds_add_up_over_the_sessions(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = variant(tiny_encoder, {"training": {"log_every": 1}})
    run = tmp_path / "run"
    stop_and_go(recipe, small_data, run, [7])
    seconds = [record["seconds"] for record in read_metrics(run / "metrics.jsonl")]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


# --- more epochs than were asked for ----------------------------------------------------------------------------------

STEADY: dict[str, Any] = {"optimizer": {"schedule": "constant", "warmup": 0.0}, "training": {"epochs": 3}}
FIRST = {"train": "sentiment-train.tsv", "dev": "sentiment-dev.tsv", "test": []}
LONGER: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"sampler": {"kind": "all"}},
    "everything": {
        "sampler": {"kind": "uniform"},
        "training": {
            "loss_weighting": "uncertainty",
            "mode": "unfreeze",
            "ema": 0.9,
            "best": "any-improves",
            "snapshots": 2,
        },
    },
    "stage": {"stages": [{"name": "first", "tasks": {"sst": FIRST}, "training": {"epochs": 1, "batch_size": 12}}]},
}


def steady(encoder: Path, changes: dict[str, Any], **training: Any) -> Recipe:
    return variant(
        encoder, {**STEADY, **changes, "training": {**STEADY["training"], **changes.get("training", {}), **training}}
    )


@pytest.mark.parametrize("name", LONGER)
def test_a_finished_run_goes_on_with_more_epochs(
    name: str, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole
) -> None:
    longer = replace(steady(tiny_encoder, LONGER[name]), name="longer", about="three instead of two")
    run = tmp_path / "run"
    before = train(steady(tiny_encoder, LONGER[name], epochs=2), out=run, data=small_data, device="cpu")
    listener = Listener()
    after = train(longer, out=run, data=small_data, device="cpu", resume=True, watcher=listener)
    assert listener.steps[0] == before.results["steps"] + 1
    assert after.results["steps"] > before.results["steps"]
    assert unlike(run, whole(longer)) == []


def test_going_on_with_more_epochs_can_be_stopped(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Whole
) -> None:
    longer, run = steady(tiny_encoder, {}), tmp_path / "run"
    steps = train(steady(tiny_encoder, {}, epochs=2), out=run, data=small_data, device="cpu").results["steps"]
    with pytest.raises(Stopped):
        train(longer, out=run, data=small_data, device="cpu", resume=True, watcher=Listener(at_step=steps + 2))
    assert not (run / "results.json").exists()  # those of two epochs are not this recipe's
    train(longer, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(longer)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"epochs": 1}},
        {"training": {"accumulate": 2}},
        {"training": {"max_steps": 30}},
        {"training": {"batch_size": 6}},
        {"optimizer": {"schedule": "linear"}},
        {"optimizer": {"schedule": "constant", "warmup": 0.1}},
        {"sampler": {"kind": "annealed"}},
        {"sampler": {"kind": "sequential"}},
    ],
    ids=repr,
)
def test_what_more_epochs_would_have_done_otherwise_is_refused(
    changes: dict[str, Any], tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    """Both runs have what is changed, but for the epochs and the size of a batch."""
    only = {key: value for key, value in changes.get("training", {}).items() if key in ("epochs", "batch_size")}
    before = steady(tiny_encoder, {} if only else changes, epochs=2)
    run = tmp_path / "run"
    train(before, out=run, data=small_data, device="cpu")
    untouched = left_behind(run)
    with pytest.raises(MinbertError, match=r"was started otherwise: .*training.epochs: \d, was 2"):
        train(steady(tiny_encoder, changes), out=run, data=small_data, device="cpu", resume=True)
    assert left_behind(run) == untouched
