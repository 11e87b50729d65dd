"""A run that is stopped, anywhere, and resumed ends with the same bytes as one that never was. On the CPU, in process;
real kills are in test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minbert.config import Recipe
from minbert.experiment import train
from minbert.model import saved
from minbert.training import checkpoint, trainer
from minbert.training.checkpoint import list_checkpoints
from minbert.training.metrics_log import read_metrics
from tests.runs import Listener, Stopped, left_behind, small_recipe, unlike

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
