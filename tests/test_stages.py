"""Stages: recipes before the recipe. How they are written, what they hand on, and that they can be stopped anywhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from minbert.config import Recipe
from minbert.console import RunWatcher
from minbert.errors import MinbertError
from minbert.evaluation.results import read_results
from minbert.experiment import new_model, train
from minbert.model.saved import load_model
from minbert.recipes import as_dict, differences, parse_recipe, read_recipe, to_toml
from minbert.training import trainer
from tests.runs import CtrlC, Listener, Stopped, left_behind, small_recipe, unlike

TEXT = """
name = "main"
seed = 4

[tasks.sst]

[model]
encoder = "mpnet"
pooling = "mean"
max_tokens = 99

[[stages]]
name = "warm-up"
[stages.tasks.quora]
head = "cosine"
[stages.tasks.sts]
[stages.training]
epochs = 2
best = "last"
[stages.model]
max_tokens = 64

[[stages]]
[stages.tasks.sts]
fraction = 0.5
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "staged.toml"
    path.write_text(TEXT)
    return path


# --- how they are written -------------------------------------------------------------------------------------------


def test_the_recipe_of_the_page_can_be_read(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "stages.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mlm-then-tasks.toml").write_text(block)
    recipe = read_recipe(tmp_path / "mlm-then-tasks.toml", sets=["stages.mlm.training.epochs=30"])
    (stage,) = recipe.stages
    assert [task.kind for task in stage.tasks] == ["masked", "masked"]
    assert (stage.training.epochs, stage.training.best) == (30, "last")


def test_a_stage_is_a_recipe_with_the_models_table_of_the_whole(written: Path) -> None:
    first, second = read_recipe(written).stages
    assert (first.name, second.name) == ("warm-up", "stage-2")
    assert [task.name for task in first.tasks] == ["quora", "sts"]
    assert first.tasks[0].head == "cosine"
    assert (first.training.epochs, first.training.best, second.training.epochs) == (2, "last", 3)
    assert (first.model.encoder, first.model.pooling, first.model.max_tokens) == ("mpnet", "mean", 64)
    assert second.model == read_recipe(written).model
    assert first.seed == second.seed == 4


def test_what_belongs_to_the_whole_reaches_the_stages(written: Path) -> None:
    recipe = read_recipe(written, sets=["model.encoder=minilm"], seed=9)
    assert {(stage.model.encoder, stage.seed) for stage in recipe.stages} == {("minilm", 9)}
    other = replace(recipe, seed=2, data="elsewhere", model=replace(recipe.model, encoder="own"))
    assert {(stage.model.encoder, stage.seed, stage.data) for stage in other.stages} == {("own", 2, "elsewhere")}
    assert other.stages[0].model.max_tokens == 64


def test_a_recipe_with_stages_survives_toml(written: Path, tmp_path: Path) -> None:
    recipe = read_recipe(written)
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert read_recipe(tmp_path / "again.toml") == recipe
    assert parse_recipe(as_dict(recipe)) == recipe
    assert "encoder" not in as_dict(recipe)["stages"][0]["model"]


def test_settings_of_a_stage_go_by_its_name(written: Path) -> None:
    recipe = read_recipe(written, sets=["stages.warm-up.training.epochs=7", "stages.stage-2.tasks.sts.fraction=2"])
    assert recipe.stages[0].training.epochs == 7
    assert recipe.stages[1].task("sts").fraction == 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stages.warmup.training.epochs=7", r'no stage "warmup" \(did you mean "warm-up"\?\); the stages are: warm-up'),
        ("stages.0.training.epochs=7", 'no stage "0"; the stages are: warm-up, stage-2'),
        ("stages.warm-up=7", "warm-up is a stage; expected one of its settings"),
        ("stages.warm-up.name.x=7", "name is not a table"),
        ("stages.warm-up.training.epoch=7", r'stage "warm-up": training: unknown key "epoch"'),
        ("stages.warm-up.training.epochs=0", r'stage "warm-up": training.epochs is 0; expected 1 or more'),
        ("stages.warm-up.tasks.sts.head=conv", r'\[tasks.sts\] head is "conv"'),
        ("stages.warm-up.model.encoder=minilm", "model.encoder is 'minilm'; a stage trains the recipe's own"),
        ("stages.warm-up.seed=3", r'stage "warm-up": unknown key "seed" \(it is the whole recipe\'s\)'),
        ("stages.warm-up.optimiser.lr=3", r'unknown key "optimiser" \(did you mean "optimizer"\?\); a stage has: name'),
        ("stages.stage-2.name=warm-up", 'two stages are named "warm-up"'),
        ("stages.stage-2.name=../x", "a stage is named '../x'; expected letters"),
        ("stages=3", "stages is 3; expected tables"),
        ("stages.stage-2.stages=[]", 'stage "stage-2" has stages of its own'),
        ("stages.stage-2.tasks=3", 'stage "stage-2": no tasks'),
    ],
)
def test_what_is_wrong_with_a_stage_is_said(setting: str, message: str, written: Path) -> None:
    with pytest.raises(MinbertError, match=message):
        read_recipe(written, sets=[setting])


def test_differences_name_the_stage(written: Path) -> None:
    one = read_recipe(written)
    other = read_recipe(written, sets=["stages.warm-up.training.epochs=7"])
    assert differences(one, other) == ["stages.warm-up.training.epochs: 2, was 7"]
    turned = replace(one, stages=one.stages[::-1])
    assert differences(turned, one) == ["order of stages: stage-2, warm-up, was warm-up, stage-2"]
    first = replace(one.stages[0], tasks=one.stages[0].tasks[::-1])
    swapped = replace(one, stages=(first, one.stages[1]))
    assert differences(swapped, one) == ["order of tasks of warm-up: sts, quora, was quora, sts"]
    shorter = replace(one, stages=one.stages[:1])
    assert "stages.stage-2.name: nothing, was stage-2" in differences(shorter, one)


# --- what they hand on ----------------------------------------------------------------------------------------------


STAGE_TRAINING = {"epochs": 1, "batch_size": 12, "best": "last", "train_sample": 0}
MAIN_TRAINING = {"epochs": 1, "batch_size": 12, "train_sample": 8}


def files(stem: str, **more: Any) -> dict[str, Any]:
    return {"train": f"{stem}-train.tsv", "dev": f"{stem}-dev.tsv", "test": [], **more}


def staged_recipe(encoder: Path, *, often: dict[str, Any] | None = None) -> Recipe:
    """4 steps of paraphrase and similarity, 2 of similarity, then 2 of sentiment."""
    training = {**STAGE_TRAINING, **(often or {})}
    stages = [
        {
            "name": "pairs",
            "tasks": {"quora": files("paraphrase"), "sts": files("similarity")},
            "optimizer": {"lr": 1e-3},
            "model": {"pooling": "pooler"},
            "training": training,
        },
        {"name": "sts", "tasks": {"sts": files("similarity", head="cosine")}, "training": training},
    ]
    main = {**MAIN_TRAINING, **(often or {})}
    return small_recipe(encoder, "sst", stages=stages, model={"pooling": "mean"}, training=main)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, small_data: Path) -> tuple[Recipe, Path]:
    recipe = staged_recipe(tiny_encoder)
    run = tmp_path_factory.mktemp("staged") / "run"
    train(recipe, out=run, data=small_data, device="cpu")
    return recipe, run


def test_each_stage_is_a_run_of_its_own(finished: tuple[Recipe, Path]) -> None:
    recipe, run = finished
    stages = [run / "stages" / "1-pairs", run / "stages" / "2-sts"]
    assert sorted((run / "stages").iterdir()) == stages
    for folder, stage in zip(stages, recipe.stages, strict=True):
        assert read_recipe(folder / "recipe.toml") == stage
        assert {path.name for path in folder.iterdir()} >= {"model", "metrics.jsonl", "results.json", "predictions"}
        assert not (folder / "checkpoints").exists(), "a finished stage needs none"
        assert set(read_results(folder)["dev"]) == {task.name for task in stage.tasks}
    assert list((run / "checkpoints").iterdir())


def test_the_results_name_the_stages(finished: tuple[Recipe, Path]) -> None:
    _, run = finished
    results = read_results(run)
    assert list(results["stages"]) == ["pairs", "sts"]
    assert (results["stages"]["pairs"]["steps"], results["stages"]["sts"]["steps"], results["steps"]) == (4, 2, 2)
    pairs = read_results(run / "stages" / "1-pairs")
    for key in ("dev", "overall", "seconds"):
        assert results["stages"]["pairs"][key] == pairs[key]
    assert [stage["name"] for stage in results["recipe"]["stages"]] == ["pairs", "sts"]
    assert pairs["stages"] == {}


def test_the_results_keep_how_the_vectors_of_a_stage_lie(finished: tuple[Recipe, Path]) -> None:
    """A stage's own results go with its folder, and these numbers went with them."""
    _, run = finished
    results = read_results(run)
    for number, name in enumerate(("pairs", "sts"), start=1):
        own = read_results(run / "stages" / f"{number}-{name}")["geometry"]
        assert own and results["stages"][name]["geometry"] == own
    assert set(results["stages"]["pairs"]["geometry"]["sts"]) >= {"alignment", "uniformity"}


def test_a_stage_without_pairs_has_no_vectors_to_tell_of(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    stages = [{"name": "single", "tasks": {"sst": files("sentiment")}, "training": STAGE_TRAINING}]
    recipe = small_recipe(tiny_encoder, "sst", stages=stages, training=MAIN_TRAINING)
    results = train(recipe, out=tmp_path / "run", data=small_data, device="cpu").results
    known = {"overall", "dev", "steps", "planned_steps", "whole_steps", "rows", "seconds", "data"}
    assert set(results["stages"]["single"]) == known


def encoder_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "encoder" / "model.safetensors")


def test_a_stage_begins_with_the_encoder_that_the_one_before_left(
    finished: tuple[Recipe, Path], small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooler included; the heads are those of a run without stages."""
    recipe, run = finished
    begun: list[dict[str, torch.Tensor]] = []
    original = trainer.Trainer.train

    def spy(self: Any, **options: Any) -> None:
        begun.append({name: value.detach().clone() for name, value in self.model.state_dict().items()})
        original(self, **options)

    monkeypatch.setattr(trainer.Trainer, "train", spy)
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    left = [load_model(path / "model")[0] for path in sorted((run / "stages").iterdir())]
    parts = zip((*recipe.stages, recipe), (1, 2, 0), strict=True)
    fresh = [new_model(part, torch.device("cpu"), stage=stage)[1] for part, stage in parts]
    for number, start in enumerate(begun):
        encoder = (left[number - 1] if number else fresh[0]).encoder.state_dict()
        assert "pooler.dense.weight" in encoder
        for name, value in fresh[number].state_dict().items():
            expected = encoder[name.removeprefix("encoder.")] if name.startswith("encoder.") else value
            assert torch.equal(start[name], expected), (number, name)
    assert not torch.equal(begun[1]["encoder.pooler.dense.weight"], begun[0]["encoder.pooler.dense.weight"])


def test_layers_of_two_parts_of_a_run_begin_differently(tiny_encoder: Path) -> None:
    """Else the encoder that a stage hands on would suit the very layer that the next part begins with."""
    recipe = staged_recipe(tiny_encoder)
    recipe = replace(recipe, model=replace(recipe.model, common_layer=True))
    for seed in (1, 2):
        models = [new_model(replace(recipe, seed=seed), torch.device("cpu"), stage=stage)[1] for stage in (0, 1, 2)]
        layers = [model.state_dict()["common.0.weight"] for model in models]
        assert not any(torch.equal(one, other) for one, other in combinations(layers, 2))
        encoders = [model.encoder.state_dict() for model in models]
        assert all(torch.equal(value, one[name]) for name, value in encoders[0].items() for one in encoders[1:])


def test_without_learning_stages_leave_no_trace(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = staged_recipe(tiny_encoder)
    still = tuple(replace(s, optimizer=replace(s.optimizer, lr=0.0, weight_decay=0.0)) for s in recipe.stages)
    train(replace(recipe, stages=still), out=tmp_path / "staged", data=small_data, device="cpu")
    train(replace(recipe, stages=()), out=tmp_path / "plain", data=small_data, device="cpu")
    for name, value in encoder_weights(tmp_path / "plain").items():
        assert torch.equal(encoder_weights(tmp_path / "staged")[name], value), name


def test_the_model_of_the_last_evaluation_is_kept(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """Also where an earlier one was better."""
    training = {"epochs": 2, "batch_size": 12, "best": "last", "evaluate_every": 1, "train_sample": 0}
    listener = Listener()
    train(small_recipe(tiny_encoder, "sst", training=training), out=tmp_path, data=small_data, watcher=listener)
    assert [record["kept"] for record in listener.evaluations] == [["model"]] * 4


def test_a_missing_file_of_the_main_part_is_found_before_the_stages(
    tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe = staged_recipe(tiny_encoder)
    wrong = replace(recipe, tasks=(replace(recipe.tasks[0], dev=("gone.tsv",)),))
    with pytest.raises(MinbertError, match=r"no file .*gone\.tsv"):
        train(wrong, out=tmp_path / "run", data=small_data, device="cpu")
    assert not (tmp_path / "run").exists()


def test_overwrite_clears_the_stages(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = staged_recipe(tiny_encoder)
    run = tmp_path / "run"
    train(recipe, out=run, data=small_data, device="cpu")
    with pytest.raises(MinbertError, match="holds a run already"):
        train(recipe, out=run, data=small_data, device="cpu")
    train(replace(recipe, stages=()), out=run, data=small_data, device="cpu", overwrite=True)
    assert not (run / "stages").exists()


def test_the_watcher_is_told_where_the_run_is(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    listener = Listener()
    train(staged_recipe(tiny_encoder), out=tmp_path / "run", data=small_data, device="cpu", watcher=listener)
    assert listener.parts == [("pairs", 1, 3), ("sts", 2, 3), ("small", 3, 3)]
    assert listener.steps == [1, 2, 3, 4, 1, 2, 1, 2]


def test_the_console_names_the_stage(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    shown = StringIO()
    with RunWatcher(Console(file=shown, width=200)) as watcher:
        train(staged_recipe(tiny_encoder), out=tmp_path / "run", data=small_data, device="cpu", watcher=watcher)
        assert [task.description.split("  ")[0] for task in watcher.progress.tasks] == ["small (3/3)"]
    said = shown.getvalue()
    assert said.index("stage pairs: part 1 of 3") < said.index("stage sts: part 2 of 3")
    assert said.index("stage sts: part 2 of 3") < said.index("main training small: part 3 of 3")


# --- stopped anywhere -----------------------------------------------------------------------------------------------


OFTEN = {"checkpoint_every": 1, "evaluate_every": 2}
STOPS: dict[str, list[dict[str, Any]]] = {
    "in the first stage": [{"at_step": 1, "part": "pairs"}],
    "twice in a stage": [{"at_step": 2, "part": "pairs"}, {"at_step": 3, "part": "pairs"}],
    "after the last step of a stage": [{"at_step": 4, "part": "pairs"}],
    "at the last evaluation of a stage": [{"at_evaluation": 4, "part": "pairs"}],
    "between stages": [{"at_part": "sts"}],
    "in the second stage": [{"at_step": 1, "part": "sts"}],
    "before the main part": [{"at_part": "small"}],
    "in the main part": [{"at_step": 1, "part": "small"}],
    "everywhere": [
        {"at_step": 1, "part": "pairs"},
        {"at_part": "sts"},
        {"at_step": 2, "part": "sts"},
        {"at_part": "small"},
        {"at_step": 1, "part": "small"},
    ],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, small_data: Path) -> Callable[[bool], Path]:
    """The run that went through at once, with checkpoints at every step or at evaluations only."""
    made: dict[bool, Path] = {}

    def run(often: bool) -> Path:
        if often not in made:
            made[often] = tmp_path_factory.mktemp("whole") / "run"
            recipe = staged_recipe(tiny_encoder, often=OFTEN if often else None)
            train(recipe, out=made[often], data=small_data, device="cpu")
        return made[often]

    return run


@pytest.mark.parametrize("often", [True, False], ids=["checkpoints", "no-checkpoint-before-the-stop"])
@pytest.mark.parametrize("where", STOPS)
def test_stopped_and_resumed(
    where: str, often: bool, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Callable[[bool], Path]
) -> None:
    recipe = staged_recipe(tiny_encoder, often=OFTEN if often else None)
    run = tmp_path / "run"
    for stop in STOPS[where]:
        with pytest.raises(Stopped):
            train(recipe, out=run, data=small_data, device="cpu", resume=run.exists(), watcher=Listener(**stop))
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, whole(often)) == []


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("where", STOPS)
def test_ctrl_c_loses_no_step(
    where: str, tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Callable[[bool], Path]
) -> None:
    """Though there are no checkpoints but at the ends of the stages."""
    recipe, run, done = staged_recipe(tiny_encoder), tmp_path / "run", []
    for stop in STOPS[where]:
        listener = CtrlC(**stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=run, data=small_data, device="cpu", resume=run.exists(), watcher=listener)
        done += listener.steps
    last = Listener()
    train(recipe, out=run, data=small_data, device="cpu", resume=True, watcher=last)
    assert done + last.steps == [1, 2, 3, 4, 1, 2, 1, 2]
    assert unlike(run, whole(False)) == []


def test_stopped_before_a_stages_checkpoints_are_gone(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, whole: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = staged_recipe(tiny_encoder, often=OFTEN), tmp_path / "run"
    from minbert import experiment

    with monkeypatch.context() as patch:
        original = experiment.shutil.rmtree

        def stop(path: Path, **options: Any) -> None:
            if "stages" in Path(path).parts and Path(path).name == "checkpoints" and Path(path).exists():
                raise Stopped
            original(path, **options)

        patch.setattr(experiment.shutil, "rmtree", stop)
        with pytest.raises(Stopped):
            train(recipe, out=run, data=small_data, device="cpu")
    assert (run / "stages" / "1-pairs" / "checkpoints").exists()
    listener = Listener()
    train(recipe, out=run, data=small_data, device="cpu", resume=True, watcher=listener)
    assert [name for name, _, _ in listener.parts] == ["sts", "small"]
    assert unlike(run, whole(True)) == []


def test_resuming_a_finished_run_trains_nothing(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe, run = staged_recipe(tiny_encoder), tmp_path / "run"
    train(recipe, out=run, data=small_data, device="cpu")
    before, listener = left_behind(run), Listener()
    train(recipe, out=run, data=small_data, device="cpu", resume=True, watcher=listener)
    assert listener.steps == []
    assert listener.parts == [("small", 3, 3)]
    assert left_behind(run) == before


def test_resume_refuses_a_stage_that_is_done_with_other_files(
    tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe, run = staged_recipe(tiny_encoder), tmp_path / "run"
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    with pytest.raises(Stopped):
        train(recipe, out=run, data=data, device="cpu", watcher=Listener(at_part="sts"))
    path = data / "paraphrase-dev.tsv"  # of the first stage
    path.write_text(path.read_text() + "\n")
    with pytest.raises(MinbertError, match=r"stages/1-pairs: paraphrase-dev\.tsv is another file than when the stage"):
        train(recipe, out=run, data=data, device="cpu", resume=True)


def test_resume_refuses_other_stages(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe, run = staged_recipe(tiny_encoder), tmp_path / "run"
    with pytest.raises(Stopped):
        train(recipe, out=run, data=small_data, device="cpu", watcher=Listener(at_part="sts"))
    other = staged_recipe(tiny_encoder, often={"epochs": 2})
    with pytest.raises(MinbertError, match=r"stages\.pairs\.training\.epochs: 2, was 1"):
        train(other, out=run, data=small_data, device="cpu", resume=True)
