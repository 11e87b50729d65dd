"""From a recipe to a run's folder: what is in it, what is refused, and tasks that people bring themselves."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minbert import experiment, finishing
from minbert.config import SAMPLE, EnsembleConfig, Recipe
from minbert.data.raw import fingerprint
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from minbert.evaluating import evaluate_model
from minbert.evaluation.evaluate import Evaluation
from minbert.experiment import Run, train
from minbert.locks import held
from minbert.machine import choose_device
from minbert.model.answers import Decision
from minbert.model.manifest import read_manifest
from minbert.model.saved import load_model
from minbert.recipe_checks import idle_settings
from minbert.recipes import as_dict, read_recipe, to_toml
from minbert.training.metrics_log import read_metrics
from tests.runs import FILES, Listener, Stopped, left_behind, small_recipe

BRIEF = {"epochs": 1, "batch_size": 12}


@pytest.fixture
def data(small_data: Path, tmp_path: Path) -> Path:
    """A copy of the small data that a test may change."""
    return Path(shutil.copytree(small_data, tmp_path / "data"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, small_data: Path) -> tuple[Recipe, Run]:
    """A run of three tasks that went well. To be read only."""
    recipe = small_recipe(
        tiny_encoder, about="Three tasks.", training={"evaluate_every": 4, "best": "per-task", "train_sample": 10}
    )
    return recipe, train(recipe, out=tmp_path_factory.mktemp("finished") / "run", data=small_data, device="cpu")


def brief(encoder: Path, *names: str, **tables: Any) -> Recipe:
    return small_recipe(encoder, *names, **{**tables, "training": {**BRIEF, **tables.get("training", {})}})


# --- settings that nobody reads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "told"), [("mixed", True), ("annealed", True), ("weighted", False)])
def test_weights_that_the_sampler_does_not_read_are_told(
    kind: str, told: bool, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe, listener = brief(tiny_encoder, sampler={"kind": kind, "weights": {"quora": 2}}), Listener()
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu", watcher=listener)
    message = f'sampler.weights (quora = 2) has no effect: sampler.kind is "{kind}", not "weighted"'
    assert listener.warnings == [message] * told


@pytest.mark.parametrize("pooling", ["pooler", "cls", "pooler after a stage without"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_pooler_that_nobody_trained_is_told(
    pooling: str, trained: bool, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    encoder = Path(shutil.copytree(tiny_encoder, tmp_path / "encoder"))
    weights = load_file(encoder / "model.safetensors")
    (bias,) = [name for name in weights if name.endswith("pooler.dense.bias")]
    weights[bias] = torch.full_like(weights[bias], 0.01 * trained)
    save_file(weights, encoder / "model.safetensors", {"format": "pt"})
    how, _, staged = pooling.partition(" after ")
    recipe, listener = brief(encoder, "sst", model={"pooling": how}), Listener()
    if staged:
        stage = brief(encoder, "sst", name="first", model={"pooling": "mean"})
        recipe = replace(recipe, stages=(stage,))
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu", watcher=listener)
    assert run.results["untrained_pooler"] == (not trained)
    told = [message.partition(" (")[0] for message in listener.warnings]
    assert told == ["the encoder's pooler was never trained"] * (how == "pooler" and not trained)


def test_weights_that_a_stage_does_not_read_are_told(tiny_encoder: Path) -> None:
    sampler = {"kind": "all", "weights": {"sst": 0.5, "sts": 3}}
    tasks = {task: {"train": "a.tsv", "dev": "a.tsv"} for task in ("sst", "sts")}
    recipe = brief(tiny_encoder, stages=[{"name": "first", "tasks": tasks, "sampler": sampler}])
    assert idle_settings(recipe) == [
        'stage "first": sampler.weights (sst = 0.5, sts = 3) has no effect: sampler.kind is "all", not "weighted"'
    ]
    assert idle_settings(brief(tiny_encoder)) == []


# --- what a run leaves behind ---------------------------------------------------------------------------------------


def test_the_folder(finished: tuple[Recipe, Run]) -> None:
    _, run = finished
    assert {path.name for path in run.folder.iterdir()} == {
        "recipe.toml",
        "begun.json",
        "data.json",
        "metrics.jsonl",
        "results.json",
        "checkpoints",
        "predictions",
        "model",
        "models",
    }
    assert {path.name for path in (run.folder / "predictions").iterdir()} == {f"{task}.jsonl" for task in FILES}
    assert {path.name for path in (run.folder / "models").iterdir()} <= set(FILES)
    assert len(list((run.folder / "checkpoints").iterdir())) == 2
    assert run.model == run.folder / "model"
    assert {path.name for path in run.model.iterdir()} == {"encoder", "heads.safetensors", "minbert.json"}


def test_the_recipe_can_be_read_again(finished: tuple[Recipe, Run]) -> None:
    recipe, run = finished
    assert read_recipe(run.folder / "recipe.toml") == recipe
    assert run.results["recipe"] == as_dict(recipe)


def test_results_are_valid_json_and_what_train_returns(finished: tuple[Recipe, Run]) -> None:
    _, run = finished

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = (run.folder / "results.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=refuse) == run.results


def test_dev_and_train_scores_and_their_gap(finished: tuple[Recipe, Run]) -> None:
    _, run = finished
    results = run.results
    for task, metric in (("sst", "accuracy"), ("quora", "accuracy"), ("sts", "pearson")):
        dev, seen = results["dev"][task], results["train"][task]
        assert (dev["rows"], seen["rows"]) == (12, 10)
        assert dev["metric"] == metric
        value = dev["metrics"][metric]
        assert value["low"] <= value["value"] <= value["high"]
        assert results["gap"][task] == pytest.approx(seen["metrics"][metric]["value"] - value["value"])
    assert np.sum(results["dev"]["sst"]["confusion"]) == 12


def test_the_chosen_models_scores_are_those_of_its_evaluation(finished: tuple[Recipe, Run]) -> None:
    _, run = finished
    kept = [line for line in read_metrics(run.folder / "metrics.jsonl") if "model" in line.get("kept", ())][-1]
    for split in ("dev", "train"):
        found = {task: one["metrics"][one["metric"]]["value"] for task, one in run.results[split].items()}
        assert found == pytest.approx(kept["scores"][split])


def test_both_overall_rules(finished: tuple[Recipe, Run]) -> None:
    _, run = finished
    score = {task: found["metrics"][found["metric"]]["value"] for task, found in run.results["dev"].items()}
    assert run.results["overall"] == pytest.approx(
        {
            "2023": (score["sst"] + score["quora"] + score["sts"]) / 3,
            "2024": (score["sst"] + score["quora"] + (score["sts"] + 1) / 2) / 3,
        }
    )


def test_counts_and_surroundings(finished: tuple[Recipe, Run]) -> None:
    recipe, run = finished
    results = run.results
    assert (results["name"], results["about"], results["seed"]) == ("small", "Three tasks.", 1)
    assert (results["steps"], results["planned_steps"], results["rows"]) == (18, 18, 2 * 3 * 24)
    assert results["kinds"] == {task.name: task.kind for task in recipe.tasks}
    assert results["seconds"] > 0
    assert results["environment"]["device"] == "cpu"
    assert results["environment"]["torch"] == torch.__version__


def test_files_are_named_with_their_sha256(finished: tuple[Recipe, Run], small_data: Path) -> None:
    _, run = finished
    note = run.results["data"]["train"]["sst"]
    assert note["rows"] == 24
    assert note["skipped"] == {}
    assert list(note["files"].values()) == [fingerprint(small_data / "sentiment-train.tsv")]
    assert json.loads((run.folder / "data.json").read_text()) == run.results["data"]


def test_predictions_are_those_of_the_chosen_model(finished: tuple[Recipe, Run], small_data: Path) -> None:
    """Before any tuning, so that runs compare on what they learnt; with texts and labels, to be read by people."""
    _, run = finished
    lines = (run.folder / "predictions" / "quora.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    source = [line.split("\t") for line in (small_data / "paraphrase-dev.tsv").read_text().splitlines()[1:]]
    assert [[row["id"], row["text"], row["text2"], str(int(row["label"]))] for row in rows] == source
    assert all(row["prediction"] == (row["probabilities"][1] >= 0.5) for row in rows)
    right = np.mean([row["prediction"] == row["label"] for row in rows])
    assert right == run.results["dev"]["quora"]["metrics"]["accuracy"]["value"]


def test_decisions_are_in_the_manifest(finished: tuple[Recipe, Run]) -> None:
    _, run = finished
    manifest = read_manifest(run.model)
    tuned = run.results["tuned_on_dev"]
    assert set(tuned) == {"sst", "quora"}
    assert {name: found["temperature"] for name, found in tuned.items()} == {
        name: manifest.decisions[name].temperature for name in tuned
    }
    assert tuned["quora"]["threshold"] == manifest.decisions["quora"].threshold
    assert tuned["sst"]["threshold"] is None  # five classes: the most probable is the answer
    assert manifest.decisions["sts"] == Decision()
    assert manifest.decisions["sst"].threshold == 0.5
    assert manifest.decisions["quora"] != Decision()
    assert manifest.scores == {"overall": run.results["overall"], "dev": run.results["dev"]}
    better = tuned["quora"]["metrics"]["accuracy"]["value"]
    assert better >= run.results["dev"]["quora"]["metrics"]["accuracy"]["value"]


def test_each_tasks_own_best_model(finished: tuple[Recipe, Run], small_data: Path) -> None:
    """models/TASK scores on its task what the log says was best there."""
    _, run = finished
    lines = [line for line in read_metrics(run.folder / "metrics.jsonl") if line["kind"] == "evaluation"]
    for folder in (run.folder / "models").iterdir():
        best = max(line["scores"]["dev"][folder.name] or -1 for line in lines)
        assert evaluate_model(folder, data=small_data, device="cpu")[folder.name].score == pytest.approx(best)


def test_evaluate_gives_the_runs_own_figures(finished: tuple[Recipe, Run], small_data: Path) -> None:
    """A model folder answers as it was tuned."""
    _, run = finished
    found = evaluate_model(run.model, data=small_data, device="cpu")
    expected = {name: one["metrics"] for name, one in run.results["tuned_on_dev"].items()}
    expected["sts"] = run.results["dev"]["sts"]["metrics"]
    for name, metrics in expected.items():
        values = {metric: one["value"] for metric, one in metrics.items()}
        assert {metric: one.value for metric, one in found[name].metrics.items()} == pytest.approx(values)


def test_evaluate_and_predict_agree(finished: tuple[Recipe, Run], small_data: Path) -> None:
    _, run = finished
    found: dict[str, Evaluation] = evaluate_model(run.model, data=small_data, device="cpu")
    rows = [line.split("\t") for line in (small_data / "paraphrase-dev.tsv").read_text().splitlines()[1:]]
    answers = Predictor.load(run.model).answers([row[1] for row in rows], [row[2] for row in rows])
    for name in ("quora",):
        assert answers[name].predictions.tolist() == found[name].answers.predictions.tolist()


def test_evaluate_on_other_files(finished: tuple[Recipe, Run], tiny_encoder: Path, small_data: Path) -> None:
    _, run = finished
    other = small_recipe(tiny_encoder, "sst", tasks={"sst": {"dev": "sentiment-train.tsv"}})
    found = evaluate_model(run.model, other, data=small_data, device="cpu")
    assert list(found) == ["sst"]
    assert len(found["sst"].labels) == 24


def test_evaluate_a_task_that_the_model_has_not(finished: tuple[Recipe, Run], tiny_encoder: Path) -> None:
    _, run = finished
    row = {"kind": "classification", "classes": ["a", "b"], "dev": "x.csv"}
    other = experiment.as_recipe({"tasks": {"mood": row}})
    with pytest.raises(MinbertError, match='the model has no task "mood"; it has: sst, quora, sts'):
        evaluate_model(run.model, other, device="cpu")


def test_torchs_generator_is_left_as_it_was(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train(brief(tiny_encoder, "sst"), out=tmp_path / "run", data=small_data, device="cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_a_recipe_in_any_form(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = brief(tiny_encoder, "sst", training={"train_sample": 0})
    (tmp_path / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    forms: dict[str, Any] = {"one": recipe, "two": as_dict(recipe), "three": str(tmp_path / "recipe.toml")}
    runs = [train(form, out=tmp_path / name, data=small_data, device="cpu") for name, form in forms.items()]
    scores = [run.results["dev"] for run in runs]
    assert scores[0] == scores[1] == scores[2]
    assert runs[0].results["train"] == {}
    assert runs[0].results["gap"] == {"sst": None}


def test_training_rows_that_are_scored_beside_change_nothing_on_dev(
    tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    runs = [
        train(
            brief(tiny_encoder, training={"train_sample": rows}),
            out=tmp_path / str(rows),
            data=small_data,
            device="cpu",
        )
        for rows in (0, 10)
    ]
    assert runs[0].results["dev"] == runs[1].results["dev"]  # their intervals too
    assert runs[0].results["tuned_on_dev"] == runs[1].results["tuned_on_dev"]
    assert runs[1].results["train"] and not runs[0].results["train"]


def test_the_default_folder(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(brief(tiny_encoder, "sst", seed=7), data=small_data, device="cpu")
    assert run.folder == Path("runs/small-seed7")
    assert run.model.is_dir()


def test_the_embedded_sample(tiny_encoder: Path, tmp_path: Path) -> None:
    recipe = brief(tiny_encoder, "sst", data="embedded", training={"batch_size": 64})
    run = train(recipe, out=tmp_path / "run", device="cpu")
    assert run.results["data"]["dev"]["sst"]["rows"] == 80
    assert list(run.results["data"]["dev"]["sst"]["files"].values()) == [fingerprint(SAMPLE / "sentiment-dev.tsv")]
    found = evaluate_model(run.model, device="cpu")  # a model knows where its data was
    assert len(found["sst"].labels) == 80


# --- what is refused, and what is not lost --------------------------------------------------------------------------


def test_a_run_that_is_there_is_not_overwritten(finished: tuple[Recipe, Run], small_data: Path) -> None:
    recipe, run = finished
    before = left_behind(run.folder)
    with pytest.raises(MinbertError, match=r"holds a run already; --resume goes on with it, --out names another"):
        train(recipe, out=run.folder, data=small_data, device="cpu")
    assert left_behind(run.folder) == before


def test_two_do_not_train_in_one_folder(finished: tuple[Recipe, Run], small_data: Path, tmp_path: Path) -> None:
    """Such as a run whose terminal is gone, and the same one begun again."""
    recipe, run = finished
    before = left_behind(run.folder)
    for ways in ({"overwrite": True}, {"resume": True}):
        with held(run.folder), pytest.raises(MinbertError, match="another process is training here"):
            train(recipe, out=run.folder, data=small_data, device="cpu", **ways)
    assert left_behind(run.folder) == before
    many = replace(recipe, ensemble=EnsembleConfig(runs=1, models=1))
    with held(tmp_path / "many"), pytest.raises(MinbertError, match="many: another process is training here"):
        train(many, out=tmp_path / "many", data=small_data, device="cpu")
    assert list((tmp_path / "many").iterdir()) == []
    with held(run.folder):  # it was given back each time
        pass


def test_the_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from minbert.locks import held\nwith held(Path(sys.argv[1])): print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(MinbertError, match="another process"), held(tmp_path):
        pass
    process.kill()
    process.communicate()
    with held(tmp_path):
        pass


def test_overwrite_replaces_all_of_it(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    per_task = brief(tiny_encoder, "sst", "sts", training={"best": "per-task", "checkpoint_every": 1})
    train(per_task, out=tmp_path / "run", data=small_data, device="cpu")
    recipe = brief(tiny_encoder, "sst")
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu", overwrite=True)
    train(recipe, out=tmp_path / "fresh", data=small_data, device="cpu")
    assert left_behind(tmp_path / "run") == left_behind(tmp_path / "fresh")


@pytest.mark.parametrize("trouble", ["no data", "a wrong row", "no encoder", "no GPU"])
def test_a_mistake_leaves_no_trace(
    trouble: str, tiny_encoder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that could not begin is not in the way of the next try, nor has it taken an older one's place."""
    recipe, options = brief(tiny_encoder, "sst"), {"out": tmp_path / "run", "data": data, "device": "cpu"}
    wrong, bad = recipe, dict(options)
    if trouble == "no data":
        bad["data"] = tmp_path / "nowhere"
    elif trouble == "a wrong row":
        bad["data"] = shutil.copytree(data, tmp_path / "bad")
        with (tmp_path / "bad" / "sentiment-dev.tsv").open("a") as file:
            file.write("x\tA text.\t9\n")
    elif trouble == "no encoder":
        wrong = brief(tmp_path / "no-such-encoder", "sst")
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        bad["device"] = "cuda"
    with pytest.raises(MinbertError):
        train(wrong, **bad)
    assert not (tmp_path / "run").exists()
    train(recipe, **options)
    before = left_behind(tmp_path / "run")
    with pytest.raises(MinbertError):
        train(wrong, **bad, overwrite=True)
    assert left_behind(tmp_path / "run") == before


def test_resume_with_another_recipe(finished: tuple[Recipe, Run], tiny_encoder: Path, small_data: Path) -> None:
    _, run = finished
    other = small_recipe(
        tiny_encoder,
        about="Three tasks.",
        optimizer={"lr": 0.5},
        training={"evaluate_every": 4, "best": "per-task", "train_sample": 10, "epochs": 7},
    )
    with pytest.raises(
        MinbertError, match=r"was started otherwise: optimizer.lr: 0.5, was 0.001; training.epochs: 7, was 2$"
    ):
        train(other, out=run.folder, data=small_data, device="cpu", resume=True)


def test_resume_with_the_tasks_in_another_order(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """Optimizer state and random streams go by the place of a task: another order would be another run."""
    train(brief(tiny_encoder, "sst", "sts"), out=tmp_path / "run", data=small_data, device="cpu")
    with pytest.raises(MinbertError, match="was started otherwise: order of tasks: sts, sst, was sst, sts"):
        train(brief(tiny_encoder, "sts", "sst"), out=tmp_path / "run", data=small_data, device="cpu", resume=True)


def test_resume_with_other_weights_of_the_encoder(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """What is left of the run would go on from the old ones, under the name of the new."""
    place = Path(shutil.copytree(tiny_encoder, tmp_path / "tiny"))
    recipe = brief(place, "sst")
    with pytest.raises(Stopped):
        train(recipe, out=tmp_path / "run", data=small_data, device="cpu", watcher=Listener(at_step=2))
    before = load_file(place / "model.safetensors")
    save_file({name: value * 1.5 for name, value in before.items()}, place / "model.safetensors")
    with pytest.raises(MinbertError, match=r"was started otherwise: another encoder is called tiny now$"):
        train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)
    with pytest.raises(MinbertError, match=r"was started otherwise: model\.encoder: \S+, was \S+$"):
        train(brief(tiny_encoder, "sst"), out=tmp_path / "run", data=small_data, device="cpu", resume=True)
    save_file(before, place / "model.safetensors")
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)


@pytest.mark.parametrize("file", ["sentiment-train.tsv", "similarity-dev.tsv"])
def test_resume_after_a_file_changed(file: str, tiny_encoder: Path, data: Path, tmp_path: Path) -> None:
    recipe = brief(tiny_encoder, "sst", "sts")
    with pytest.raises(Stopped):
        train(recipe, out=tmp_path / "run", data=data, device="cpu", watcher=Listener(at_step=2))
    before = left_behind(tmp_path / "run")
    lines = (data / file).read_text().splitlines(keepends=True)
    (data / file).write_text("".join(lines[:-1]))
    task, split = ("sst", "train") if "sentiment" in file else ("sts", "dev")
    with pytest.raises(MinbertError, match=rf"{file} \({task}, {split}\) changed since the run was started"):
        train(recipe, out=tmp_path / "run", data=data, device="cpu", resume=True)
    assert left_behind(tmp_path / "run") == before
    (data / file).write_text("".join(lines))  # put back, it goes on
    train(recipe, out=tmp_path / "run", data=data, device="cpu", resume=True)


def test_resume_from_data_that_moved(tiny_encoder: Path, data: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = brief(tiny_encoder, "sst")
    with pytest.raises(Stopped):
        train(recipe, out=tmp_path / "run", data=data, device="cpu", watcher=Listener(at_step=1))
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)


@pytest.mark.parametrize("change", ["other bytes", "gone"])
def test_a_file_that_changes_during_training(change: str, tiny_encoder: Path, data: Path, tmp_path: Path) -> None:
    """The run used what it had read, and says so at its end."""

    class Meddler(Listener):
        def stepped(self, step: int, record: Any) -> None:
            super().stepped(step, record)
            if step == 1:
                path = data / "sentiment-dev.tsv"
                path.unlink() if change == "gone" else path.write_text("id\tsentence\tsentiment\n1\tNew.\t0\n")

    meddler, quiet = Meddler(), Listener()
    recipe = brief(tiny_encoder, "sst")
    calm = train(recipe, out=tmp_path / "calm", data=data, device="cpu", watcher=quiet)
    run = train(recipe, out=tmp_path / "run", data=data, device="cpu", watcher=meddler)
    assert quiet.warnings == []
    (warning,) = meddler.warnings
    assert warning.endswith("sentiment-dev.tsv changed while the run was going; it used what it had read at the start")
    assert run.results["dev"] == calm.results["dev"]


@pytest.mark.parametrize("name", ["tpu9", "gpu", "cuda:x", "", "meta", "mps"])
def test_a_device_that_is_none(name: str) -> None:
    with pytest.raises(MinbertError, match=f'device is "{name}"; expected auto, cpu, cuda or cuda:N'):
        choose_device(name)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(MinbertError, match=f'device is "{name}", but torch sees no GPU here; expected cpu'):
            choose_device(name)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")


def test_auto_takes_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")


def test_a_task_without_dev_files(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = brief(tiny_encoder, "sst", tasks={"sst": {"dev": []}})
    with pytest.raises(MinbertError, match=r"\[tasks.sst\] has no dev files; expected them"):
        train(recipe, out=tmp_path / "run", data=small_data, device="cpu")


def test_a_folder_that_cannot_be(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(MinbertError, match=r"cannot be written \(.+\); expected room for a run"):
            train(brief(tiny_encoder, "sst"), out=out, data=small_data, device="cpu")


def test_the_model_was_never_saved(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every save of the model failed, but not the checkpoints: it ends with what to do, and doing it works."""
    recipe, listener = brief(tiny_encoder, "sst", training={"checkpoint_every": 1}), Listener()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "save_model", full)
        with pytest.raises(MinbertError, match="the chosen model could not be saved; free some space and use --resume"):
            train(recipe, out=tmp_path / "run", data=small_data, device="cpu", watcher=listener)
    assert "the model could not be saved (No space left on device); training goes on" in listener.warnings
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)
    train(recipe, out=tmp_path / "calm", data=small_data, device="cpu")
    assert left_behind(tmp_path / "run") == left_behind(tmp_path / "calm")


def test_the_results_could_not_be_written(
    tiny_encoder: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = brief(tiny_encoder, "sst")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(finishing, "write_predictions", full)
        with pytest.raises(
            MinbertError, match=r"results not written \(No space left on device\); --resume tries again"
        ):
            train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)
    train(recipe, out=tmp_path / "calm", data=small_data, device="cpu")
    assert left_behind(tmp_path / "run") == left_behind(tmp_path / "calm")


def test_scores_that_are_undefined(tiny_encoder: Path, data: Path, tmp_path: Path) -> None:
    """Dev labels that are all the same have no correlation, and no class but one: null, never NaN, and no crash."""
    for name, label in (("similarity", "3.0"), ("paraphrase", "1")):
        path = data / f"{name}-dev.tsv"
        header, *rows = path.read_text().splitlines()
        path.write_text("\n".join([header, *(f"{row.rsplit(chr(9), 1)[0]}\t{label}" for row in rows)]) + "\n")
    run = train(brief(tiny_encoder, "quora", "sts"), out=tmp_path / "run", data=data, device="cpu")
    dev = run.results["dev"]
    assert dev["sts"]["metrics"]["pearson"] == {"value": None, "low": None, "high": None}
    assert dev["quora"]["metrics"]["roc-auc"]["value"] is None
    assert dev["quora"]["class_accuracy"][0] is None
    assert run.results["gap"]["sts"] is None
    assert all(math.isfinite(value) for value in run.results["overall"].values())
    for path in run.folder.rglob("*.json*"):
        assert "NaN" not in path.read_text(encoding="utf-8")


# --- tasks that people bring ----------------------------------------------------------------------------------------

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    (tmp_path / "mine").mkdir()
    return lambda name, text: (tmp_path / "mine" / name).write_text(text, encoding="utf-8") and None


def recipe_of(encoder: Path, tasks: dict[str, Any], **training: Any) -> Recipe:
    raw = {"tasks": tasks, "model": {"encoder": str(encoder)}, "training": {**BRIEF, **training}}
    return experiment.as_recipe({"name": "mine", **raw})


def test_own_pairs_of_three_classes_from_csv(tiny_encoder: Path, tmp_path: Path, write: Write) -> None:
    rows = ['"A cat, asleep.","An animal sleeps.",entails', "A cat.,A dog.,contradicts", "It rains.,I read.,neutral"]
    write("nli-train.csv", "premise,hypothesis,verdict\n" + "\n".join(rows * 4))
    write(
        "nli-dev.csv", "premise,hypothesis,verdict\n" + "\n".join([*rows, "No label here.,None.,", ",No text.,neutral"])
    )
    task = {
        "kind": "pair-classification",
        "train": "nli-train.csv",
        "dev": "nli-dev.csv",
        "text": "premise",
        "text2": "hypothesis",
        "label": "verdict",
        "classes": ["entails", "neutral", "contradicts"],
        "head": "interaction",
    }
    run = train(recipe_of(tiny_encoder, {"nli": task}), out=tmp_path / "run", data=tmp_path / "mine", device="cpu")
    assert run.results["dev"]["nli"]["classes"] == ["entails", "neutral", "contradicts"]
    assert run.results["dev"]["nli"]["rows"] == 3
    assert run.results["data"]["dev"]["nli"]["skipped"] == {"no label": 1, "empty text": 1}
    answer = Predictor.load(run.model).predict(["A cat."], ["A dog."])["nli"][0]
    assert answer["label"] in ("entails", "neutral", "contradicts")
    assert sum(answer["probabilities"].values()) == pytest.approx(1)


def test_own_scores_of_one_text_from_jsonl(tiny_encoder: Path, tmp_path: Path, write: Write) -> None:
    rows = [{"body": f"Wine number {number}.", "points": 80 + number} for number in range(12)]
    write("wine.jsonl", "\n".join(map(json.dumps, rows)))
    write("wine-dev.jsonl", "\n".join(map(json.dumps, [*rows[::3], {"body": "No points."}])))
    task = {
        "kind": "regression",
        "train": "wine.jsonl",
        "dev": "wine-dev.jsonl",
        "text": "body",
        "label": "points",
        "low": 80,
        "high": 100,
        "metric": "spearman",
        "head": "mlp",
    }
    run = train(recipe_of(tiny_encoder, {"wine": task}), out=tmp_path / "run", data=tmp_path / "mine", device="cpu")
    assert run.results["dev"]["wine"]["metric"] == "spearman"
    assert run.results["data"]["dev"]["wine"]["skipped"] == {"no label": 1}
    score = Predictor.load(run.model).predict(["A wine."])["wine"][0]["score"]
    assert 80 <= score <= 100


def test_two_tasks_of_one_file_with_labels_for_some_rows(tiny_encoder: Path, tmp_path: Path, write: Write) -> None:
    """Star ratings for all rows, a verdict for every second: each task takes the rows that it has a label for."""
    lines = [f"Text number {number}.\t{number % 5 + 1}\t{'' if number % 2 else 'good'}" for number in range(10)]
    lines += ["A bad one.\t1\tbad", "No stars.\t\tbad"]
    for name in ("train.tsv", "dev.tsv"):
        write(name, "review\tstars\tverdict\n" + "\n".join(lines))
    both = {"train": "train.tsv", "dev": "dev.tsv", "text": "review"}
    tasks = {
        "stars": {"kind": "classification", "label": "stars", "classes": ["1", "2", "3", "4", "5"], **both},
        "verdict": {"kind": "classification", "label": "verdict", "classes": ["bad", "good"], **both},
    }
    run = train(
        recipe_of(tiny_encoder, tasks, batch_size=4), out=tmp_path / "run", data=tmp_path / "mine", device="cpu"
    )
    notes = run.results["data"]["train"]
    assert {name: (note["rows"], note["skipped"]) for name, note in notes.items()} == {
        "stars": (11, {"no label": 1}),
        "verdict": (7, {"no label": 5}),
    }
    assert run.results["dev"]["verdict"]["confusion"][1] is not None
    assert sum(map(sum, run.results["dev"]["verdict"]["confusion"])) == 7
    answers = Predictor.load(run.model).predict(["Fine."])
    assert set(answers) == {"stars", "verdict"}


def test_cut_texts_are_counted(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = brief(tiny_encoder, "sst", model={"max_tokens": 5})
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    cut = run.results["data"]["train"]["sst"]["truncated"]
    assert cut["texts"] == 24
    assert cut["tokens"] > 24


def test_a_task_named_model_has_its_own_folder(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    files = {"train": "sentiment-train.tsv", "dev": "sentiment-dev.tsv", "label": "sentiment"}
    task = {"kind": "classification", "classes": list("abcde"), **files}
    recipe = recipe_of(tiny_encoder, {"model": task}, best="per-task")
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    assert (run.folder / "models" / "model" / "minbert.json").exists()
    assert (run.folder / "model" / "minbert.json").exists()


def test_a_run_without_training_scores_its_first_weights(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """With every rate at 0 the kept encoder is the one that was given."""
    recipe = brief(tiny_encoder, "sst", optimizer={"lr": 0.0})
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    model, _, _ = load_model(run.model)
    from minbert.model.pretrained import load_folder

    given, _ = load_folder(tiny_encoder)
    for name, value in given.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[name], value), name


def test_a_sample_of_dev_to_choose_by(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    seen = []
    watched = experiment.quick_scores

    def noting(model: Any, splits: Any) -> dict[str, float]:
        seen.append({name: len(inputs) for name, inputs in splits.items()})
        return watched(model, splits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "quick_scores", noting)
        recipe = brief(tiny_encoder, training={"dev_sample": 5, "train_sample": 0})
        run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    assert seen and all(sizes == {"sst": 5, "quora": 5, "sts": 5} for sizes in seen)
    assert run.results["dev"]["sst"]["rows"] == run.results["data"]["dev"]["sst"]["rows"] > 5  # the end is of all
