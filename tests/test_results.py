"""What a run leaves to be read: results.json, predictions, and the comparison of two runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minbert.data.raw import Examples
from minbert.errors import MinbertError
from minbert.evaluation import results as results_module
from minbert.evaluation.bootstrap import PairedResult
from minbert.evaluation.evaluate import evaluate_task
from minbert.evaluation.results import (
    commit,
    compare_runs,
    environment,
    gap,
    read_predictions,
    read_results,
    write_json,
    write_predictions,
)
from minbert.machine import cpu_model
from minbert.task_checks import check_task
from minbert.tasks import BUILT_IN, Task

SST, QUORA, STS = (check_task(BUILT_IN[name]) for name in ("sst", "quora", "sts"))
ROWS = 40


def make_run(folder: Path, answers: dict[str, Any], *, metrics: dict[str, str] | None = None, shift: int = 0) -> Path:
    """A run's folder with predictions of outputs that we choose; labels are 0, 1, 0, 1 ... or a ramp."""
    folder.mkdir()
    dev: dict[str, Any] = {}
    tasks = {"quora": QUORA, "sts": STS, "sst": SST}
    for name, outputs in answers.items():
        task: Task = tasks[name]
        labels = np.linspace(0, 5, ROWS) if name == "sts" else np.arange(ROWS) % 2.0
        ids = [f"row-{number + shift}" for number in range(ROWS)]
        pairs = [f"second {number}" for number in range(ROWS)] if task.is_pair else None
        examples = Examples(ids, [f"text {number}" for number in range(ROWS)], pairs, labels)
        found = evaluate_task(task, labels, outputs, rng=np.random.default_rng(0), samples=10)
        write_predictions(folder, task, examples, found)
        dev[name] = {**found.summary(), "metric": (metrics or {}).get(name, task.metric_name)}
    kinds = {name: tasks[name].kind for name in answers}
    write_json(folder / "results.json", {"name": folder.name, "kinds": kinds, "dev": dev})
    return folder


def logits(right: int) -> np.ndarray[Any, Any]:
    """Quora outputs with so many right answers, from the first row on."""
    signs = np.where(np.arange(ROWS) % 2, 1.0, -1.0)
    return (np.where(np.arange(ROWS) < right, signs, -signs) * (1 + np.arange(ROWS) / ROWS))[:, None]


def compare(one: Path, other: Path) -> dict[str, PairedResult]:
    return compare_runs(one, other, rng=np.random.default_rng(1), samples=500)


# --- comparing ------------------------------------------------------------------------------------------------------


def test_a_run_against_itself(tmp_path: Path) -> None:
    noise = np.random.default_rng(3).normal(size=(ROWS, 1))
    run = make_run(tmp_path / "a", {"quora": logits(25), "sts": noise, "sst": np.tile(noise, 5)})
    for result in compare(run, run).values():
        assert (result.difference.value, result.difference.low, result.difference.high) == (0, 0, 0)
        assert result.p_value == 1
        assert result.wins == 0.5


def test_a_better_run(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", {"quora": logits(20)})
    b = make_run(tmp_path / "b", {"quora": logits(35)})
    found = compare(a, b)["quora"]
    assert found.difference.value == pytest.approx(15 / 40)
    assert 0 < found.difference.low < 15 / 40 < found.difference.high
    assert found.p_value < 0.01
    assert found.wins > 0.99
    back = compare(b, a)["quora"]
    assert back.difference.value == pytest.approx(-15 / 40)
    assert back.p_value == found.p_value


def test_a_difference_that_means_nothing(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", {"quora": logits(30)})
    b = make_run(tmp_path / "b", {"quora": logits(31)})
    found = compare(a, b)["quora"]
    assert found.difference.low <= 0 <= found.difference.high
    assert found.p_value > 0.05


def test_the_metric_is_the_tasks(tmp_path: Path) -> None:
    """One that reads probabilities compares probabilities."""
    a = make_run(tmp_path / "a", {"quora": logits(20)}, metrics={"quora": "roc-auc"})
    b = make_run(tmp_path / "b", {"quora": logits(40)}, metrics={"quora": "roc-auc"})
    area = read_results(a)["dev"]["quora"]["metrics"]["roc-auc"]["value"]
    assert compare(a, b)["quora"].difference.value == pytest.approx(1 - area, abs=1e-6)


def test_tasks_that_only_one_run_has_are_left_out(tmp_path: Path) -> None:
    ramp = np.linspace(0, 5, ROWS)[:, None]
    a = make_run(tmp_path / "a", {"quora": logits(20), "sts": ramp})
    b = make_run(tmp_path / "b", {"sts": ramp})
    assert list(compare(a, b)) == ["sts"]


def test_no_task_in_common(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", {"quora": logits(20)})
    b = make_run(tmp_path / "b", {"sts": np.linspace(0, 5, ROWS)[:, None]})
    with pytest.raises(MinbertError, match="have no task in common"):
        compare(a, b)


def test_other_dev_rows_are_refused(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", {"quora": logits(20)})
    b = make_run(tmp_path / "b", {"quora": logits(20)}, shift=1)
    expected = "quora: the two runs were scored on different dev rows; expected the same"
    with pytest.raises(MinbertError, match=expected):
        compare(a, b)
    c = Path(shutil.copytree(a, tmp_path / "c"))
    path = c / "predictions" / "quora.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0].replace('"label": 0.0', '"label": 1.0'), *lines[1:]]) + "\n")
    with pytest.raises(MinbertError, match=expected):  # the same rows with another label
        compare(a, c)
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(MinbertError, match=expected):  # one row less
        compare(a, c)


# --- files ----------------------------------------------------------------------------------------------------------


def test_json_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"text": "é 😀", "number": 0.1})
    assert path.read_text(encoding="utf-8").endswith("}\n")
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"value": math.nan})
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "é 😀", "number": 0.1}, "the old file stays"
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_results_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(MinbertError, match=r"results\.json: no such file; expected the folder of a finished run"):
        read_results(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1"])
def test_results_that_are_no_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(MinbertError, match=r"results\.json: not JSON \("):
        read_results(tmp_path)


@pytest.mark.parametrize("text", ["plain", "a\u2028b", "a\x85b", "a\x0bb\x0cc", 'quo"te \\ tab\t', "😀 é", "a\r\nb"])
def test_predictions_survive_any_text(tmp_path: Path, text: str) -> None:
    """Some characters look like the end of a line to Python and not to JSON."""
    examples = Examples(["1", "2"], [text, "other"], [text * 2, text], np.array([0.0, 1.0]))
    outputs = np.array([[-1.0], [2.0]])
    found = evaluate_task(QUORA, np.array([0.0, 1.0]), outputs, rng=np.random.default_rng(0), samples=5)
    write_predictions(tmp_path, QUORA, examples, found)
    rows = read_predictions(tmp_path, "quora").rows
    assert [(row["id"], row["text"], row["text2"]) for row in rows] == [("1", text, text * 2), ("2", "other", text)]
    assert [row["prediction"] for row in rows] == [0, 1]
    assert [round(sum(row["probabilities"]), 5) for row in rows] == [1, 1]


def test_predictions_of_scores_have_no_probabilities(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"sts": np.linspace(0, 5, ROWS)[:, None]})
    predictions = read_predictions(run, "sts")
    assert set(predictions.rows[0]) == {"id", "text", "text2", "label", "prediction"}
    assert predictions.column("prediction") == pytest.approx(np.linspace(0, 5, ROWS))


@pytest.mark.parametrize("content", [None, "{\n"])
def test_predictions_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "predictions").mkdir()
    if content is not None:
        (tmp_path / "predictions" / "sst.jsonl").write_text(content)
    with pytest.raises(
        MinbertError, match=r"sst\.jsonl: cannot be read \(.+\); expected the predictions of a finished"
    ):
        read_predictions(tmp_path, "sst")


# --- surroundings ---------------------------------------------------------------------------------------------------


def test_environment_is_plain_data() -> None:
    found = environment("cpu")
    assert set(found) == {"minbert", "commit", "python", "torch", "device", "device_name", "threads"}
    assert found["device_name"] == cpu_model()[0], "not the kind of machine: x86_64 is said of all of them"
    json.dumps(found, allow_nan=False)


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "__file__", str(tmp_path / "results.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))  # nor where there is no git
    assert commit() is None


def test_the_commit_says_of_the_whole_package_whether_it_was_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "minbert"
    (package / "evaluation").mkdir(parents=True)
    (package / "model.py").touch()
    monkeypatch.setattr(results_module, "__file__", str(package / "evaluation" / "results.py"))
    for words in (["init"], ["add", "."], ["-c", "user.name=me", "-c", "user.email=@", "commit", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "notes.txt").touch()
    assert re.fullmatch("[0-9a-f]{12}", commit() or "")
    (package / "model.py").write_text("changed")
    assert re.fullmatch(r"[0-9a-f]{12}\+", commit() or "")


@pytest.mark.parametrize(
    ("train", "dev", "expected"),
    [
        (0.9, 0.7, 0.2),
        (0.5, 0.6, -0.1),
        (None, 0.5, None),
        (0.5, None, None),
        (math.nan, 0.5, None),
        (0.5, math.nan, None),
    ],
)
def test_gap(train: float | None, dev: float | None, expected: float | None) -> None:
    assert gap(train, dev) == (None if expected is None else pytest.approx(expected))
