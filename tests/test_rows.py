"""Which rows are trained on: of one class, borrowed from another task, and negatives; and that dev stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minbert.config import Recipe
from minbert.data.negatives import known_pairs, pair_of
from minbert.data.raw import read_split
from minbert.data.rows import training_rows
from minbert.errors import MinbertError
from minbert.experiment import train
from minbert.model.manifest import read_manifest
from minbert.preparing import prepare
from minbert.recipes import as_dict, differences, parse_recipe, read_recipe, to_toml
from tests.runs import small_recipe

BORROW = {"task": "quora", "only": "duplicate", "low": 4, "high": 5}


def recipe_with(**tasks: dict[str, Any]) -> Recipe:
    return parse_recipe({"tasks": tasks})


def files(name: str) -> dict[str, Any]:
    return {"train": f"{name}-train.tsv", "dev": f"{name}-dev.tsv"}


# --- rows of one class ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", ["duplicate", "1"])
def test_only_one_class_is_trained_on(only: str, small_data: Path) -> None:
    recipe = recipe_with(quora={**files("paraphrase"), "only": only})
    every = read_split(recipe_with(quora=files("paraphrase")).tasks[0], "train", small_data)
    found = training_rows(recipe, recipe.tasks[0], small_data)
    assert every.labels is not None and found.labels is not None
    assert len(found) == int((every.labels == 1).sum()) and set(found.labels) == {1.0}
    assert found.skipped == {'not of the class "duplicate"': int((every.labels == 0).sum())}
    assert set(read_split(recipe.tasks[0], "dev", small_data).labels) == {0.0, 1.0}  # type: ignore[arg-type]


def test_a_class_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nfine\tgood\n")
    task = {"kind": "classification", "train": "a.tsv", "classes": ["bad", "good"], "only": "bad"}
    recipe = recipe_with(mood=task)
    with pytest.raises(MinbertError, match='no usable rows for mood; 1 rows skipped: not of the class "bad"'):
        training_rows(recipe, recipe.tasks[0], tmp_path)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (
            "quora",
            {"only": "duplicated"},
            '[tasks.quora] only is "duplicated" (did you mean "duplicate"?); expected one',
        ),
        ("quora", {"only": "2"}, '[tasks.quora] only is "2"; expected one of: different, duplicate'),
        ("sts", {"only": "1"}, '[tasks.sts] only is "1"; the pair-regression task sts has no classes'),
        ("sts", {"negatives": -1}, "[tasks.sts] negatives is -1.0; expected 0 to 100"),
        (
            "sst",
            {"negatives": 1},
            "[tasks.sst] negatives is 1.0; a classification task has no labelled pairs to take apart",
        ),
        ("sts", {"negative_kind": "mined"}, 'negative_kind is "mined" with negatives 0; expected negatives above 0'),
        ("sts", {"negatives": 1, "negative_kind": "hard"}, 'negative_kind is "hard"; expected one of: random, mined'),
        ("quora", {"borrow": BORROW}, "[tasks.quora] borrow gives rows a score; a pair-classification task has none"),
        ("sts", {"borrow": {**BORROW, "task": "sts"}}, 'borrow.task is "sts", the task itself; expected another'),
        ("sts", {"borrow": {**BORROW, "task": "qora"}}, 'borrow.task is "qora" (did you mean "quora"?); known: '),
        ("sts", {"borrow": {**BORROW, "task": "sst"}}, 'borrow.task is "sst", which reads one text; expected pairs'),
        ("sts", {"borrow": {**BORROW, "only": "same"}}, 'borrow.only is "same"; expected one of: different, duplicate'),
        ("sts", {"borrow": {**BORROW, "high": 6}}, "borrow runs from 4 to 6; expected a part of the scale 0 to 5"),
        ("sts", {"borrow": {**BORROW, "low": 5, "high": 4}}, "borrow runs from 5 to 4; expected a part of the scale"),
        ("sts", {"borrow": {**BORROW, "fraction": 0}}, "borrow.fraction is 0.0; expected more than 0 and at most 1"),
        ("sts", {"borrow": {**BORROW, "part": 1}}, 'borrow: unknown key "part"'),
        ("sts", {"borrow": {"task": "quora", "low": 1}}, "borrow: no high; expected it"),
        ("sts", {"borrow": {"only": "x"}}, "borrow: no task, low, high; expected them"),
    ],
)
def test_what_is_refused(task: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MinbertError) as caught:
        recipe_with(**{task: settings})
    assert message in str(caught.value)


# --- borrowed rows --------------------------------------------------------------------------------------------------


def test_a_recipe_that_borrows_can_be_written_and_read(tmp_path: Path) -> None:
    recipe = recipe_with(sts={"borrow": {**BORROW, "fraction": 0.5}, "negatives": 0.5}, sst={})
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert read_recipe(tmp_path / "recipe.toml") == recipe
    assert as_dict(recipe)["tasks"]["sts"]["borrow"]["fraction"] == 0.5
    other = recipe_with(sts={"borrow": BORROW, "negatives": 0.5}, sst={})
    assert differences(recipe, other) == ["tasks.sts.borrow.fraction: 0.5, was 1.0"]
    changed = read_recipe(tmp_path / "recipe.toml", sets=["tasks.sts.borrow.low=3"])
    assert changed.tasks[0].borrow is not None and changed.tasks[0].borrow.low == 3


@pytest.fixture
def lending(tmp_path: Path) -> Path:
    """Six pairs to lend, of which one is in dev (the other way round) and one is here already; four are duplicates."""
    rows = ["a\tb\t1", "c\td\t1", "e\tf\t0", "g\th\t1", "i\tj\t1", "k\tl\t0"]
    head = "sentence1\tsentence2\t"
    (tmp_path / "lent.tsv").write_text(head + "is_duplicate\n" + "\n".join(rows) + "\n")
    (tmp_path / "own.tsv").write_text(head + "similarity\nC\td.\t2\nx\ty\t1.5\n")
    (tmp_path / "dev.tsv").write_text(head + "similarity\nb\tA\t3\n")
    return tmp_path


def borrowing(folder: Path, **borrow: Any) -> Any:
    tasks = {
        "sts": {"train": "own.tsv", "dev": "dev.tsv", "borrow": {**BORROW, **borrow}},
        "quora": {"train": "lent.tsv", "dev": "dev.tsv"},
    }
    recipe = recipe_with(**tasks)
    return training_rows(recipe, recipe.tasks[0], folder)


def test_borrowed_rows_come_last_with_scores_of_their_own(lending: Path) -> None:
    found = borrowing(lending)
    assert list(zip(found.texts, found.pairs, strict=True)) == [("C", "d."), ("x", "y"), ("g", "h"), ("i", "j")]
    assert found.labels[:2].tolist() == [2, 1.5] and np.all((found.labels[2:] >= 4) & (found.labels[2:] <= 5))
    assert found.added == {"borrowed from quora": 2}
    assert found.skipped == {"of quora, in dev": 1, "of quora, here already": 1}
    assert [Path(name).name for name in found.files] == ["own.tsv", "lent.tsv"]
    assert np.array_equal(found.labels, borrowing(lending).labels)


def test_a_part_of_them_and_one_score(lending: Path) -> None:
    found = borrowing(lending, only="", fraction=0.5, low=4.5, high=4.5)
    assert len(found) == 2 + 2 and found.labels[2:].tolist() == [4.5, 4.5]
    assert set(found.texts[2:]) < {"e", "g", "i", "k"}


def test_nothing_to_borrow(lending: Path) -> None:
    (lending / "lent.tsv").write_text("sentence1\tsentence2\tis_duplicate\na\tb\t1\n")
    with pytest.raises(MinbertError, match='none of the 1 rows of "quora" can be taken'):
        borrowing(lending)


# --- all of it in a run ---------------------------------------------------------------------------------------------


def test_negatives_are_of_the_own_rows_and_avoid_all_pairs(small_data: Path) -> None:
    sts = {**files("similarity"), "negatives": 1, "borrow": {"task": "quora", "low": 4, "high": 5}}
    recipe = recipe_with(sts=sts, quora=files("paraphrase"))
    found = training_rows(recipe, recipe.tasks[0], small_data)
    assert found.added == {"borrowed from quora": 24, "random negatives": 24} and len(found) == 72
    assert found.texts[48:] == found.texts[:24] and found.labels is not None and not found.labels[48:].any()
    drawn = {pair_of(*texts) for texts in zip(found.texts[48:], (found.pairs or [])[48:], strict=True)}
    known = known_pairs(*(read_split(recipe.tasks[0], split, small_data) for split in ("train", "dev")))  # type: ignore[arg-type]
    assert len(drawn) == 24 and not drawn & known


def test_negatives_of_one_class_know_the_pairs_of_the_others(tmp_path: Path) -> None:
    # Only "different" is trained on. The one row that could give a negative would be the duplicate that was left out.
    rows = "sentence1\tsentence2\tis_duplicate\na\tb\t0\nc\td\t0\na\td\t1\nc\tb\t1\n"
    (tmp_path / "a.tsv").write_text(rows)
    recipe = recipe_with(quora={"train": "a.tsv", "dev": [], "only": "different", "negatives": 1})
    with pytest.raises(MinbertError, match="negatives: none of 2 rows has one"):
        training_rows(recipe, recipe.tasks[0], tmp_path)


def test_a_run_with_hard_negatives_is_noted_saved_and_resumed(
    tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    tasks = {"sts": {"negatives": 0.5, "negative_kind": "mined", "borrow": {**BORROW, "fraction": 0.5}}}
    recipe = small_recipe(tiny_encoder, "sts", "quora", tasks=tasks, training={"epochs": 1})
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    note = run.results["data"]["train"]["sts"]
    assert note["added"]["mined negatives"] == 12 and note["added"]["borrowed from quora"] > 0
    assert note["rows"] == 24 + sum(note["added"].values())
    assert "added" not in run.results["data"]["dev"]["sts"]
    assert read_manifest(run.model).tasks == recipe.tasks
    again = train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)
    assert again.results["data"] == run.results["data"]

    path = tmp_path / "run" / "data.json"
    before = json.loads(path.read_text())
    before["train"]["sts"]["sha256"] = "another"
    path.write_text(json.dumps(before))
    with pytest.raises(MinbertError, match=r"sts, train: the rows drawn \(borrowed from quora, mined negatives\)"):
        train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)


def test_hard_negatives_need_an_encoder(tiny_encoder: Path, small_data: Path) -> None:
    from minbert.data.tokenizer import Tokenizer

    recipe = small_recipe(tiny_encoder, "sts", tasks={"sts": {"negatives": 1, "negative_kind": "mined"}})
    with pytest.raises(MinbertError, match="expected an encoder to mine with"):
        prepare(recipe, Tokenizer.load(tiny_encoder), small_data)
