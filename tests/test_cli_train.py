"""`minbert train` and what follows it, as a person types it: what is printed, what is written, how it exits."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minbert import cli, console, experiment
from minbert.errors import MinbertError
from minbert.experiment import Run, train
from minbert.recipes import read_recipe, to_toml
from tests.runs import left_behind, small_recipe


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def minbert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`minbert("train", "recipe.toml")`, in this process."""
    monkeypatch.delenv("MINBERT_DATA", raising=False)
    for screen in (console.out, console.err):
        monkeypatch.setattr(screen, "_width", 200)

    def command(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["minbert", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return command


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "small.toml"
    path.write_text(to_toml(small_recipe(tiny_encoder, training={"epochs": 1, "batch_size": 12})), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, recipe_path: Path, small_data: Path) -> Run:
    """A finished run. To be read only."""
    return train(recipe_path, out=tmp_path_factory.mktemp("cli") / "run", data=small_data, device="cpu")


# --- train ----------------------------------------------------------------------------------------------------------


def test_train_with_every_option(minbert: Command, recipe_path: Path, small_data: Path, tmp_path: Path) -> None:
    out, copy = tmp_path / "mine", tmp_path / "results" / "copy.json"
    ended = minbert(
        *("train", recipe_path, "--set", "training.epochs=2", "--set", "tasks.sts.head=cosine", "--seed", "5"),
        *("--out", out, "--data", small_data, "--device", "cpu", "--results", copy),
    )
    assert ended.code == 0
    recipe = read_recipe(out / "recipe.toml")
    assert (recipe.training.epochs, recipe.task("sts").head, recipe.seed) == (2, "cosine", 5)
    assert json.loads(copy.read_text()) == json.loads((out / "results.json").read_text())
    assert "small:" in ended.out
    assert "overall:" in ended.out
    assert f"model: {out / 'model'}" in ended.out
    assert "planned mix" in ended.err
    assert "best so far" in ended.err


def test_the_encoder_can_be_replaced(
    minbert: Command, recipe_path: Path, small_data: Path, tiny_encoder: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tiny_encoder, tmp_path / "other"))
    ended = minbert("train", recipe_path, "-e", other, "--out", tmp_path / "run", "--data", small_data)
    assert ended.code == 0
    assert read_recipe(tmp_path / "run" / "recipe.toml").model.encoder == str(other)


def test_resume_and_overwrite(minbert: Command, recipe_path: Path, small_data: Path, tmp_path: Path, run: Run) -> None:
    out = Path(shutil.copytree(run.folder, tmp_path / "run"))
    options = ("train", recipe_path, "--out", out, "--data", small_data, "--device", "cpu")
    before = left_behind(out)
    ended = minbert(*options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"error: {out} holds a run already; --resume goes on with it, --out names another folder\n"
    assert minbert(*options, "--resume").code == 0
    assert left_behind(out) == before
    (out / "model" / "minbert.json").write_text("broken")
    assert minbert(*options, "--overwrite").code == 0
    assert left_behind(out) == before
    ended = minbert(*options, "--resume", "--set", "optimizer.lr=0.5")
    assert ended.code == 2
    assert "was started otherwise: optimizer.lr: 0.5, was 0.001" in ended.err


def test_data_from_the_environment(
    minbert: Command, recipe_path: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINBERT_DATA", str(small_data))
    monkeypatch.chdir(tmp_path)
    ended = minbert("train", recipe_path)
    assert ended.code == 0
    assert "model: runs/small-seed1/model" in ended.out


def test_skipped_rows_are_told(minbert: Command, recipe_path: Path, small_data: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    with (data / "sentiment-train.tsv").open("a") as file:
        file.write("x\tA text without a label.\t\ny\t\t3\n")
    ended = minbert("train", recipe_path, "--out", tmp_path / "run", "--data", data, "--set", "model.max_tokens=8")
    assert ended.code == 0
    assert "sst train: 1 rows skipped (no label)" in ended.err
    assert "sst train: 1 rows skipped (empty text)" in ended.err
    assert "inputs cut" in ended.err


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no recipe": (["nowhere.toml"], "nowhere.toml: no such recipe"),
    "an unknown key": (["RECIPE", "--set", "training.epoch=3"], 'unknown key "epoch" (did you mean "epochs"?)'),
    "a wrong value": (["RECIPE", "--set", "training.epochs=0"], "training.epochs is 0; expected 1 or more"),
    "no value": (["RECIPE", "--set", "training.epochs"], "expected key=value"),
    "no data": (["RECIPE", "--data", "nowhere"], "no file nowhere/sentiment-train.tsv"),
    "no device": (["RECIPE", "--device", "tpu9"], 'device is "tpu9"; expected auto, cpu, cuda or cuda:N'),
    "no encoder": (["RECIPE", "-e", "./no-encoder"], "no-encoder"),
    "no weights": (
        ["RECIPE", "--set", "training.best=weighted-mean", "--set", "training.best_weights={sst=0, quora=0, sts=0}"],
        "training.best_weights are all 0; expected one above for at least one task",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(
    mistake: str, minbert: Command, recipe_path: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = MISTAKES[mistake]
    arguments = [str(recipe_path) if argument == "RECIPE" else argument for argument in arguments]
    data = [] if "--data" in arguments else ["--data", str(small_data)]
    ended = minbert("train", *arguments, *data, "--out", tmp_path / "run")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_debug_shows_where_it_arose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["minbert", "--debug", "train", "nowhere.toml"])
    with pytest.raises(MinbertError, match="no such recipe"):
        cli.main()


def test_ctrl_c_says_how_to_go_on(minbert: Command, recipe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real signal is in test_faults.py."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "train", interrupted)
    ended = minbert("train", recipe_path)
    assert (ended.code, ended.out) == (130, "")
    assert ended.err == "stopped; the same command with --resume goes on from the last checkpoint\n"


def test_as_a_process(recipe_path: Path, tmp_path: Path) -> None:
    """`python -m minbert`: the exit code and the one line are there outside of pytest too."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "40"}  # a narrow screen does not break the line
    command = [sys.executable, "-m", "minbert", "train", str(recipe_path), "--set", "optimizer.learning_rate=1"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert 'unknown key "learning_rate"' in ended.stderr
    assert ended.stderr.count("\n") == 1


# --- what follows ---------------------------------------------------------------------------------------------------


def test_evaluate(minbert: Command, run: Run, small_data: Path, tmp_path: Path) -> None:
    ended = minbert("evaluate", run.model, "--data", small_data, "--device", "cpu", "-o", tmp_path / "scores.json")
    assert ended.code == 0
    for word in ("sst, 12 rows", "accuracy", "pearson", "label \\ answer", "overall:"):
        assert word in ended.out
    written = json.loads((tmp_path / "scores.json").read_text())
    tuned = {name: found["metrics"]["accuracy"] for name, found in run.results["tuned_on_dev"].items()}
    for name, accuracy in tuned.items():
        assert written["dev"][name]["metrics"]["accuracy"]["value"] == pytest.approx(accuracy["value"])
    assert set(written["overall"]) == {"2023", "2024"}


def test_evaluate_other_files(minbert: Command, run: Run, recipe_path: Path, small_data: Path) -> None:
    sets = ("--set", "tasks.sst.dev=sentiment-train.tsv")
    ended = minbert("evaluate", run.model, recipe_path, *sets, "--data", small_data, "--device", "cpu")
    assert ended.code == 0
    assert "sst, 24 rows" in ended.out
    ended = minbert("evaluate", run.model, *sets, "--data", small_data, "--device", "cpu")  # no recipe to be changed
    assert ended.code == 2
    assert "--set changes a recipe, and none is named; expected MODEL RECIPE --set" in ended.err


def test_evaluate_a_run_instead_of_its_model(minbert: Command, run: Run) -> None:
    ended = minbert("evaluate", run.folder)
    assert ended.code == 2
    assert f"(did you mean {run.model}?)" in ended.err


def test_evaluate_without_data_says_where_it_looked(
    minbert: Command, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = minbert("evaluate", run.model, "--device", "cpu")
    assert ended.code == 2
    assert "say where the data is with --data DIR or MINBERT_DATA" in ended.err


def test_predict(minbert: Command, run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text('id,sentence,note\n1,"Fine, really.",a\n2,,b\n3,Awful.,c\n', encoding="utf-8")
    ended = minbert("predict", run.model, "-i", source, "-o", target, "-t", "sst")
    assert ended.code == 0
    assert "3 rows answered for sst" in ended.err
    assert "1 rows have an empty text: kept, without an answer" in ended.err
    with target.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["sentence"], row["note"]) for row in rows] == [
        ("1", "Fine, really.", "a"),
        ("2", "", "b"),
        ("3", "Awful.", "c"),
    ]
    assert [bool(row["sst"]) for row in rows] == [True, False, True]


def test_submit(minbert: Command, run: Run, small_data: Path, tmp_path: Path) -> None:
    """The course's format to the byte, for the files that are there; the others are named."""
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    (data / "ids-sst-test-student.csv").write_text("\tid\tsentence\n0\tabc\tA fine film.\n1\tdef\tA bad film.\n")
    ended = minbert("submit", run.model, "--data", data, "--out", tmp_path / "predictions", "--device", "cpu")
    assert ended.code == 0
    written = sorted(path.name for path in (tmp_path / "predictions").iterdir())
    assert written == ["para-dev-output.csv", "sst-dev-output.csv", "sst-test-output.csv", "sts-dev-output.csv"]
    header, *rows = (tmp_path / "predictions" / "sst-test-output.csv").read_text().splitlines()
    assert header == "id \t Predicted_Sentiment "
    assert [row.split(" , ")[0] for row in rows] == ["abc", "def"]
    for name in ("para-test-output.csv", "sts-test-output.csv"):
        assert f"{name}: no file" in ended.err
    header, first, *_ = (tmp_path / "predictions" / "para-dev-output.csv").read_text().splitlines()
    assert header == "id \t Predicted_Is_Paraphrase "
    assert first in ("para-0251 , 0.0 ", "para-0251 , 1.0 ")


def test_compare(minbert: Command, run: Run) -> None:
    ended = minbert("compare", run.folder, run.folder, "--samples", "100")
    assert ended.code == 0
    for task in ("sst", "quora", "sts"):
        (line,) = [line for line in ended.out.splitlines() if f" {task} " in line]
        assert "+0.0000" in line
        assert "1.0000" in line


def test_compare_something_else(minbert: Command, run: Run, tmp_path: Path) -> None:
    ended = minbert("compare", run.folder, tmp_path)
    assert ended.code == 2
    assert "expected the folder of a finished run" in ended.err


def test_data_check_and_stats(minbert: Command, recipe_path: Path, small_data: Path, tmp_path: Path) -> None:
    for command in ("check", "stats"):
        ended = minbert("data", command, recipe_path, "--data", small_data)
        assert ended.code == 0
        assert "sst" in ended.out
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    with (data / "similarity-dev.tsv").open("a") as file:
        file.write("x\tOne text.\tAnother.\t5.9\n")
    ended = minbert("data", "check", recipe_path, "--data", data)
    assert ended.code == 1
    assert 'similarity-dev.tsv:14: similarity is "5.9"; expected a number from 0 to 5' in ended.out


def test_a_recipe_with_a_masked_stage(minbert: Command, tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """Trained, its setting changed by the stage's name; the stage's data is checked, and its model has no answers."""
    files = {"train": "paraphrase-train.tsv", "dev": "paraphrase-dev.tsv", "test": []}
    brief = {"epochs": 9, "batch_size": 12, "best": "last"}
    stage = {"name": "mlm", "tasks": {"quora": {"kind": "masked", **files}}, "training": brief}
    recipe = small_recipe(tiny_encoder, "sst", stages=[stage], training={"epochs": 1})
    (tmp_path / "staged.toml").write_text(to_toml(recipe), encoding="utf-8")
    run = tmp_path / "run"
    ended = minbert(
        *("train", tmp_path / "staged.toml", "--set", "stages.mlm.training.epochs=1"),
        *("--out", run, "--data", small_data, "--device", "cpu"),
    )
    assert ended.code == 0
    assert "stage mlm: part 1 of 2" in ended.err
    assert "stage mlm: quora 0." in ended.out
    assert json.loads((run / "results.json").read_text())["stages"]["mlm"]["steps"] == 2

    ended = minbert("evaluate", run / "stages" / "1-mlm" / "model", "--data", small_data, "--device", "cpu")
    assert ended.code == 0
    assert "perplexity" in ended.out
    ended = minbert("predict", run / "stages" / "1-mlm" / "model", "--input", small_data / "paraphrase-dev.tsv")
    assert ended.code == 2
    assert "quora: a masked task trains the encoder and has nothing to predict" in ended.err

    assert minbert("data", "check", tmp_path / "staged.toml", "--data", small_data).code == 0
    (tmp_path / "data").mkdir()
    for name in ("train", "dev"):
        shutil.copy(small_data / f"sentiment-{name}.tsv", tmp_path / "data")
    ended = minbert("data", "check", tmp_path / "staged.toml", "--data", tmp_path / "data")
    assert ended.code == 1
    assert "paraphrase-train.tsv: no such file" in ended.out


# --- ensemble -------------------------------------------------------------------------------------------------------


def test_ensemble(minbert: Command, run: Run, small_data: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    ended = minbert("ensemble", both, run.folder, run.model)
    assert (ended.code, ended.out) == (0, f"ensemble of 2 models: {both}\n")
    options = ("--data", small_data, "--device", "cpu")
    ended = minbert("ensemble", both, run.folder, run.model, "--tune", "--overwrite", *options)
    assert ended.code == 0
    assert "quora: temperature " in ended.out
    figures = []
    for model in (both, run.model):
        assert minbert("evaluate", model, *options, "--output", tmp_path / "figures.json").code == 0
        figures.append(json.loads((tmp_path / "figures.json").read_text())["dev"]["sts"]["metrics"]["pearson"]["value"])
    assert figures[0] == pytest.approx(figures[1]), "the mean of a model and itself"
    (tmp_path / "texts.csv").write_text("sentence\na nice day\n")
    ended = minbert("predict", both, "--input", tmp_path / "texts.csv", "--output", tmp_path / "answers.csv")
    assert ended.code == 0
    assert "1 rows answered for sst" in ended.err


def test_an_ensemble_that_cannot_be(minbert: Command, run: Run, tmp_path: Path) -> None:
    ended = minbert("ensemble", tmp_path / "both", run.folder)
    assert (ended.code, ended.err) == (2, "error: an ensemble of 1 models; expected two or more\n")


def test_train_an_ensemble(minbert: Command, recipe_path: Path, small_data: Path, tmp_path: Path) -> None:
    ended = minbert(
        *("train", recipe_path, "--set", "ensemble.runs=2", "--set", "ensemble.models=2"),
        *("--out", tmp_path / "run", "--data", small_data, "--device", "cpu"),
    )
    assert ended.code == 0
    assert "run 2 of 2, seed 1001" in ended.err
    assert f"model: {tmp_path / 'run' / 'model'}" in ended.out
    assert len(json.loads((tmp_path / "run" / "results.json").read_text())["members"]) == 2
