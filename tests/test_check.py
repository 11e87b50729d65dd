"""`minbert data check` and `stats`: every kind of trouble planted in small files, then found; and what is printed of it."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from minbert.config import SAMPLE, Recipe
from minbert.data.check import DataReport, Lengths, SplitReport, check_data, count_words, render, summary, token_counter
from minbert.recipes import parse_recipe

Write = Callable[..., Path]
HEADERS = {"sst": "sentence\tsentiment", "quora": "sentence1\tsentence2\tis_duplicate"}
HEADERS["sts"] = "sentence1\tsentence2\tsimilarity"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("sst", "train", "text\\t1", ...)` makes sst-train.tsv, with its header."""

    def write(task: str, split: str, *rows: str) -> Path:
        path = tmp_path / f"{task}-{split}.tsv"
        path.write_text("".join(f"{row}\n" for row in (HEADERS[task], *rows)), encoding="utf-8")
        return path

    return write


def recipe_for(*names: str, max_tokens: int = 256, **changes: Any) -> Recipe:
    """The built-in tasks, with the files that `write` makes; no test files."""
    tasks = {
        name: {"train": f"{name}-train.tsv", "dev": f"{name}-dev.tsv", "test": [], **changes.get(name, {})}
        for name in names
    }
    return parse_recipe({"name": "mine", "tasks": tasks, "model": {"max_tokens": max_tokens}})


def split_of(report: DataReport, task: str, split: str) -> SplitReport:
    return next(found for found in report.splits if (found.task, found.split) == (task, split))


def printed(report: DataReport, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=100, **options.pop("console", {}))
    render(report, console, **options)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_data_without_fault(write: Write, tmp_path: Path) -> None:
    write("sst", "train", *(f"row number {label}\t{label}" for label in range(5)))
    write("sst", "dev", *(f"dev row number {label}\t{label}" for label in range(5)))
    report = check_data(recipe_for("sst"), tmp_path)
    assert report.ok
    assert (report.problems, report.warnings, report.notes) == ((), 0, ())
    assert [(split.task, split.split, split.rows) for split in report.splits] == [
        ("sst", "train", 5),
        ("sst", "dev", 5),
    ]
    assert summary(report) == (
        "mine: 10 usable rows; no problems, no repeated rows, no contradicting labels, no rows of dev or test in train, "
        "no rows skipped, no rows over 256 tokens (or more: words were counted)"
    )


def test_every_problem_is_kept_and_few_are_printed(write: Write, tmp_path: Path) -> None:
    path = write("sst", "train", "fine\t0", *(f"bad {number}\t{number}" for number in range(5, 40)), "\t3", "none\t")
    write("sst", "dev", "fine too\t1")
    report = check_data(recipe_for("sst"), tmp_path, limit=3)
    train = split_of(report, "sst", "train")
    assert not report.ok
    assert (train.rows, train.skipped) == (1, {"empty text": 1, "no label": 1})
    assert [problem.line for problem in report.problems] == list(range(3, 38))
    text = printed(report)
    assert f'{path}:3: sentiment is "5"; expected 0 to 4' in text
    assert f"{path}:6:" not in text
    assert "... and 32 more" in text
    assert "mine: 2 usable rows; 35 problems, no repeated" in text


def test_a_missing_file_is_a_problem_and_a_missing_test_file_a_note(write: Write, tmp_path: Path) -> None:
    write("sst", "dev", "fine\t1")
    write("sst", "more", "better\t2")
    changes = {"train": ["a.csv|b.csv", "sst-more.tsv"], "test": "t.csv|u.csv"}
    report = check_data(recipe_for("sst", sst=changes), tmp_path)
    assert [str(problem) for problem in report.problems] == [f"{tmp_path}/a.csv: no such file, nor {tmp_path}/b.csv"]
    assert [(split.split, split.rows) for split in report.splits] == [("train", 1), ("dev", 1)]
    assert report.notes[0] == (
        f"sst test: {tmp_path}/t.csv: no such file, nor {tmp_path}/u.csv; only minbert submit needs it"
    )
    assert "note: sst test: " in printed(report)

    nothing = check_data(recipe_for("sst", "sts"), tmp_path / "nowhere")
    assert len(nothing.problems) == 4
    assert sum(split.rows for split in nothing.splits) == 0
    assert "4 problems" in printed(nothing)


def test_files_of_a_task_that_only_lends_its_rows(write: Write, tmp_path: Path) -> None:
    write("sts", "train", "a\tb\t1", "c\td\t2")
    write("sts", "dev", "e\tf\t3")
    (tmp_path / "quora-train.csv").write_text(
        "id\tsentence1\tsentence2\tis_duplicate\n1\tg\th\t1\n2\ti\tj\t0\n3\tk\tl\t7\n"
    )
    borrow = {"task": "quora", "only": "duplicate", "low": 4.0, "high": 5.0}
    report = check_data(recipe_for("sts", sts={"borrow": borrow}), tmp_path)
    found = [(split.task, split.split, split.rows) for split in report.splits]
    assert found == [("sts", "train", 2), ("sts", "dev", 1), ("quora", "train", 1)]  # one duplicate, no dev nor test
    assert [(problem.path.name, problem.line) for problem in report.problems] == [("quora-train.csv", 4)]
    both = check_data(recipe_for("sts", "quora", sts={"borrow": borrow}), tmp_path)
    assert sum(split.task == "quora" for split in both.splits) == 2  # its own, once, and both of its files missing


def test_files_that_cannot_be_read_at_all(write: Write, tmp_path: Path) -> None:
    (tmp_path / "sst-train.tsv").write_bytes(b"sentence\tsentiment\nfine\t1\n\xff\xfe\t1\n")
    (tmp_path / "sst-dev.tsv").write_bytes(b"")
    report = check_data(recipe_for("sst"), tmp_path)
    assert [(problem.path.name, problem.line, problem.message.split(";")[0]) for problem in report.problems] == [
        ("sst-train.tsv", 3, "byte 0xff at column 1 is not UTF-8"),
        ("sst-train.tsv", 0, "no usable rows for sst"),
        ("sst-dev.tsv", 0, "an empty file"),
        ("sst-dev.tsv", 0, "no usable rows for sst"),
    ]
    printed(report)


def test_repeated_rows_and_contradicting_labels(write: Write, tmp_path: Path) -> None:
    path = write("sst", "train", "One  Two\t1", "other\t2", "one two \t1", "ONE TWO\t3", "two one\t3")
    write("sst", "dev", "dev\t1")
    train = split_of(check_data(recipe_for("sst"), tmp_path), "sst", "train")
    assert train.repeated.count == 2
    assert [(repeat.first, repeat.second) for repeat in train.repeated.some] == [
        ((path, 2), (path, 4)),
        ((path, 2), (path, 5)),
    ]
    assert (train.contradicting.count, train.contradicting.some) == (1, train.repeated.some[1:])


def test_a_pair_is_the_same_in_either_order(write: Write, tmp_path: Path) -> None:
    write("quora", "train", "Who?\tWhat?\t1", "what?\twho?\t0", "Who?\tWhy?\t0")
    write("quora", "dev", "a\tb\t1", "WHY?\twho?\t0")
    report = check_data(recipe_for("quora"), tmp_path)
    assert split_of(report, "quora", "train").repeated.count == 1
    assert split_of(report, "quora", "train").contradicting.count == 1
    assert split_of(report, "quora", "dev").leaked.count == 1
    assert report.ok
    assert report.warnings == 2


def test_scores_contradict_by_more_than_a_tenth_of_the_scale(write: Write, tmp_path: Path) -> None:
    write("sts", "train", "a\tb\t3.3", "a\tb\t3.8", "a\tb\t4.0")
    write("sts", "dev", "c\td\t1")
    train = split_of(check_data(recipe_for("sts"), tmp_path), "sts", "train")
    assert (train.repeated.count, train.contradicting.count) == (2, 1)


def test_rows_of_dev_and_test_that_are_in_train(write: Write, tmp_path: Path) -> None:
    train = write("sst", "train", *(f"row {number}\t1" for number in range(50)))
    dev = write("sst", "dev", "fresh\t1", *(f"ROW {number}\t1" for number in range(30, 40)))
    write("sst", "test", "row 7\t", "unseen\t")
    report = check_data(recipe_for("sst", sst={"test": "sst-test.tsv"}), tmp_path, limit=4)
    leaked = split_of(report, "sst", "dev").leaked
    assert (leaked.count, len(leaked.some)) == (10, 4)
    assert (leaked.some[0].first, leaked.some[0].second) == ((train, 32), (dev, 3))
    assert split_of(report, "sst", "test").leaked.count == 1
    assert split_of(report, "sst", "train").leaked.count == 0
    text = printed(report)
    assert "sst dev: rows that are in train, too: 10" in text
    assert f"{dev}:3 as {train}:32: row 30" in text
    assert "... and 6 more" in text
    assert "11 rows of dev or test in train" in text


def test_texts_shared_across_tasks_are_a_note(write: Write, tmp_path: Path) -> None:
    write("sst", "train", *(f"shared {label}\t{label}" for label in range(5)))
    write("sst", "dev", "left\t0", *(f"{label}\t{label}" for label in range(1, 5)))
    write("sts", "train", "left\tright\t3")
    write("sts", "dev", "Shared 0\tshared 3\t1", "shared 0\tonly here\t1")
    report = check_data(recipe_for("sst", "sts"), tmp_path)
    assert report.warnings == 0
    assert report.notes == (
        "sst dev: 1 rows whose texts are all in the train rows of sts, too",
        "sts dev: 1 rows whose texts are all in the train rows of sst, too",
    )


def test_a_problem_of_a_file_that_two_tasks_share_is_told_once(tmp_path: Path) -> None:
    lines = ['{"text": "a", "one": 0, "two": 1}', "{", '{"text": "b", "one": 1, "two": 0}']
    (tmp_path / "both.jsonl").write_text("\n".join(lines))
    row = {"kind": "classification", "train": "both.jsonl", "text": "text", "classes": ["no", "yes"]}
    report = check_data(parse_recipe({"tasks": {name: {**row, "label": name} for name in ("one", "two")}}), tmp_path)
    assert [problem.line for problem in report.problems] == [2]
    assert [len(split.problems) for split in report.splits] == [1, 1]


def test_balance_of_classes_and_scores(write: Write, tmp_path: Path) -> None:
    write("sst", "train", "a\t0", "b\t0", "c\tpositive")
    write("sst", "dev", *(f"{label}\t{label}" for label in range(5)))
    write("sts", "train", *(f"a{score}\tb\t{score}" for score in (0, 0.9, 1, 2.5, 4, 4.9, 5)))
    write("sts", "dev", "c\td\t1")
    report = check_data(recipe_for("sst", "sts"), tmp_path)
    balance = split_of(report, "sst", "train").balance
    assert balance == {"very negative": 2, "negative": 0, "neutral": 0, "positive": 1, "very positive": 0}
    assert split_of(report, "sts", "train").balance == {"0 to 1": 2, "1 to 2": 1, "2 to 3": 1, "3 to 4": 0, "4 to 5": 3}
    absent = [note for note in report.notes if "class" in note]
    assert absent == [f'sst train: no row of class "{name}"' for name in ("negative", "neutral", "very positive")]


def test_lengths_in_words(write: Write, tmp_path: Path) -> None:
    counts = [1, 2, 3, 4, 5, 8, 9, 16, 17, 100]
    write("sst", "train", *(f"{'word ' * count}\t1" for count in counts))
    write("sst", "dev", "one\t1")
    report = check_data(recipe_for("sst", max_tokens=16), tmp_path)
    assert split_of(report, "sst", "train").lengths == Lengths(
        "words",
        {"median": 8, "90% within": 100, "99% within": 100, "longest": 100},
        {1: 1, 2: 1, 4: 2, 8: 2, 16: 2, 32: 1, 128: 1},
        2,
    )
    assert count_words(["a b", ""], ["c", "d  e f"]).tolist() == [3, 3]


@pytest.mark.parametrize(("head", "longest"), [("linear", 3 + 2 + 3), ("ph", 3 + 2 + 3), ("cosine", 3 + 2)])
def test_tokens_are_counted_as_the_head_reads_a_pair(write: Write, tmp_path: Path, head: str, longest: int) -> None:
    def count_tokens(texts: Sequence[str], pairs: Sequence[str] | None) -> np.ndarray:
        special = 2 if pairs is None else 3  # [CLS] A [SEP] and [CLS] A [SEP] B [SEP]
        return np.asarray(count_words(texts, pairs) + special)

    write("sts", "train", "one two three\tfour five\t1")
    write("sts", "dev", "one two\tthree four five\t1")
    recipe = recipe_for("sts", max_tokens=5, sts={"head": head})
    for split in check_data(recipe, tmp_path, count_tokens=count_tokens).splits:
        assert split.lengths is not None
        assert (split.lengths.unit, split.lengths.percentiles["longest"]) == ("tokens", longest)
        assert split.lengths.too_long == (longest > 5)


def test_tokens_of_an_encoder_that_is_here_and_of_one_that_is_not(tiny_folder: Path, tmp_path: Path) -> None:
    count = token_counter(str(tiny_folder))
    assert count is not None
    assert count(["the cat sat .", "dogs"], None).tolist() == [6, 4]  # [CLS] dog ##s [SEP]
    assert count(["the cat"], ["a bird sang"]).tolist() == [8]
    assert count(["the cat " * 1000], None).tolist() == [2002], "nothing is cut, though the encoder takes 32"
    assert token_counter(str(tmp_path)) is None
    assert token_counter("no-such-encoder") is None


# --- on the screen --------------------------------------------------------------------------------------------------


@pytest.fixture
def troubled(write: Write, tmp_path: Path) -> DataReport:
    write("sst", "train", *["good [bold]film\t4"] * 3, "good [bold]film\t0", "\x1b[31mred\t2", "bad\t9", "\t1")
    write("sst", "dev", "good [bold]film\t4", "\x1b[31mred\t2", f"{'long ' * 300}\t1")
    return check_data(recipe_for("sst"), tmp_path)


def test_check_prints_everything(troubled: DataReport) -> None:
    text = printed(troubled)
    for expected in ("problems", "repeated", "contradicting", "in train, too", "very positive", "median", "257 to 512"):
        assert expected in text
    assert "█" in text
    assert "good [bold]film" in text, "markup in the data is text"
    assert text.splitlines()[-1].startswith(
        "mine: 8 usable rows; 1 problems, 3 repeated rows, 1 contradicting labels, 2 r"
    )


def test_stats_prints_counts_balance_and_lengths_only(troubled: DataReport) -> None:
    text = printed(troubled, stats=True)
    for expected in ("rows", "skipped: empty text", "very positive", "█", "60%", "99% within", "over 256"):
        assert expected in text
    for unwanted in ("problem", "repeat", "contradict", "in train", "note"):
        assert unwanted not in text


def test_the_data_cannot_steer_the_terminal(troubled: DataReport) -> None:
    assert "\x1b" not in printed(troubled)
    coloured = printed(troubled, console={"force_terminal": True, "color_system": "standard"})
    assert "\x1b[33m" in coloured, "warnings are yellow"
    assert "\x1b[1;31m" in coloured, "problems are red"
    assert "\x1b[31mred" not in coloured


def test_bars_on_a_terminal_that_knows_ascii_only(write: Write, tmp_path: Path) -> None:
    write("sst", "train", *(f"row {number}\t1" for number in range(4)))
    write("sst", "dev", "dev\t1")
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, encoding="ascii")
    render(check_data(recipe_for("sst"), tmp_path), Console(file=screen, width=100))
    screen.flush()
    assert b"######       4 100%" in raw.getvalue()


# --- real data ------------------------------------------------------------------------------------------------------


def test_the_embedded_sample_is_clean() -> None:
    tasks = {
        name: {"like": like, "train": f"{name}-train.tsv", "dev": f"{name}-dev.tsv", "test": []}
        for name, like in {"sentiment": "sst", "paraphrase": "quora", "similarity": "sts"}.items()
    }
    report = check_data(parse_recipe({"tasks": tasks}), SAMPLE)
    assert (report.problems, report.warnings) == ((), 0)


def test_the_courses_data(shared_data: Path) -> None:
    start = time.process_time()
    report = check_data(parse_recipe({"tasks": {"sst": {}, "quora": {}, "sts": {}}}), shared_data, limit=5)
    assert time.process_time() - start < 20  # typically 3 s
    assert report.ok
    counts = {(split.task, split.split): split.rows for split in report.splits}
    assert counts["quora", "train"] == 127_043
    assert split_of(report, "quora", "dev").skipped == {"no label": 1, "empty text": 1}
    assert split_of(report, "quora", "dev").leaked.count == 0
    assert split_of(report, "sts", "dev").leaked.count == 16  # the course's own split has them
    assert [note.split(":")[0] for note in report.notes if "submit" in note] == ["quora test"]
