"""The error analysis: what is read of a run, what the file says, what the command prints and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from minbert.cli import app
from minbert.errors import MinbertError
from minbert.evaluation.mistakes import load_mistakes, markdown, read_mistakes, write_mistakes
from tests.made_up_runs import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def edit(task: str, rows: list[dict[str, Any]]) -> None:
        if task == "sts":
            rows[7] |= {
                "label": 0.0,
                "prediction": 5.0,
                "text": "Stars * and\n[bold]brackets[/] and_lines.",
                "text2": "x",
            }

    return make_run(tmp_path_factory.mktemp("runs") / "run", edit_rows=edit)


def test_the_worst_of_each_direction_of_each_task(run: Path) -> None:
    found = {each.task: each for each in read_mistakes(run, count=3)}
    assert list(found) == ["sst", "quora", "sts"]
    rows = [json.loads(line) for line in (run / "predictions" / "quora.jsonl").read_text().splitlines()]
    positives = sorted(
        (row for row in rows if row["prediction"] == 1 and row["label"] == 0),
        key=lambda row: -row["probabilities"][1],
    )
    group = found["quora"].groups[0]
    assert group.rows == positives[:3] and group.found == len(positives)
    assert found["quora"].expected(positives[0]) == "different"
    assert found["quora"].predicted(positives[0]) == f"duplicate ({positives[0]['probabilities'][1]:.1%})"
    over = found["sts"].groups[0].rows[0]
    assert (found["sts"].expected(over), found["sts"].predicted(over)) == ("0.00", "5.00")


def test_a_quora_score_says_that_the_encoder_has_seen_the_questions(run: Path) -> None:
    scores = {each.task: each.score for each in read_mistakes(run)}
    assert scores["quora"].endswith(" with minilm, seed 1; minilm has seen Quora questions in its own training")
    assert scores["sst"].endswith(" with minilm, seed 1")


def test_the_file(run: Path, tmp_path: Path) -> None:
    write_mistakes(read_mistakes(run, tasks=["sts"], count=2), tmp_path / "errors.md")
    text = (tmp_path / "errors.md").read_text()
    assert re.match(
        r"# Wrong answers on dev\n\n## sts\n\npearson -?0\.\d{3} of .+ with .+, seed \d\.\n\n### Where the mistakes are\n\n\| texts ",
        text,
    )
    assert "### Overestimates\n\nthe worst 2 of " in text
    assert "out of 60 rows. By the difference of prediction and label: the largest first." in text
    assert "1. expected 0.00, predicted 5.00 (row-7)\n\n   > Stars \\* and \\[bold\\]brackets" in text
    assert text.count("\n   > ") == 8 and "## sst" not in text
    write_mistakes(read_mistakes(run, tasks=["sts"], count=2), tmp_path / "ids.md", texts=False)
    without = (tmp_path / "ids.md").read_text()
    assert "1. expected 0.00, predicted 5.00 (row-7)\n" in without and ">" not in without and "Stars" not in without


@pytest.mark.parametrize("texts", [True, False])
def test_as_json_and_back(run: Path, tmp_path: Path, texts: bool) -> None:
    found = read_mistakes(run, count=2)
    write_mistakes(found, tmp_path / "errors.json", texts=texts)
    text = (tmp_path / "errors.json").read_text(encoding="utf-8")
    assert "Infinity" not in text and ("brackets" in text) == texts
    assert None in [rate["low"] for one in json.loads(text) for part in one["slices"] for rate in part["rates"]]
    again = load_mistakes(tmp_path / "errors.json")
    assert markdown(again, texts=texts) == markdown(found, texts=texts)
    assert [each.slices for each in again] == [each.slices for each in found]


def test_the_command(run: Path, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["errors", str(run), "-t", "sts", "--count", "1", "--out", str(tmp_path / "e.md")])
    assert ended.exit_code == 0, ended.output
    assert "[bold]brackets[/]" in ended.output and "5.00" in ended.output and "Underestimates" in ended.output
    assert "brackets" in (tmp_path / "e.md").read_text()
    ended = CliRunner().invoke(app, ["errors", str(run), "--no-texts", "--out", str(tmp_path / "ids.md")])
    assert ended.exit_code == 0 and "brackets" not in (tmp_path / "ids.md").read_text()


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(MinbertError, match=r'no task "st" \(did you mean "sts"\?\); it has: sst, quora, sts'):
        read_mistakes(run, tasks=["st"])
    with pytest.raises(MinbertError, match="expected the folder of a finished run"):
        read_mistakes(tmp_path)
    (taken := tmp_path / "taken.md").mkdir()
    with pytest.raises(MinbertError, match="cannot be written"):
        write_mistakes(read_mistakes(run), taken)
    with pytest.raises(MinbertError, match=r"errors\.pdf: expected a name that ends in \.md or \.json"):
        write_mistakes(read_mistakes(run), tmp_path / "errors.pdf")
