"""Whole files: every format in and out, order and columns kept, nothing left behind when it goes wrong."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minbert.data.raw import read_rows
from minbert.delivery import files
from minbert.delivery.files import FileReport, choose_columns, predict_file
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from tests.models import make

Rows = list[dict[str, Any]]
FORMATS = ["csv", "tsv", "jsonl", "parquet"]
TABLES = ["csv", "tsv"]
ROWS: Rows = [
    {"id": "a1", "sentence": "The sun came out.", "note": "x"},
    {"id": "b2", "sentence": "a nice bonus", "note": ""},
    {"id": "c3", "sentence": "Why, does my printer leave streaks?", "note": "é 日本 🙂"},
    {"id": "d4", "sentence": 'It was "nice", he said', "note": '"'},
    {"id": "e5", "sentence": "nice", "note": "y"},
]
PAIRS: Rows = [{"sentence1": row["sentence"], "sentence2": other["sentence"]} for row, other in product(ROWS[:2], ROWS)]


@pytest.fixture(scope="module")
def predictor(tiny_encoder: Path) -> Predictor:
    tokenizer, model, manifest = make(tiny_encoder)
    return Predictor(model, tokenizer, manifest)


def write(path: Path, rows: Rows) -> Path:
    """A file as others would write it: not with the code that is tested."""
    names = list(rows[0])
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix in (".jsonl", ".ndjson"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".tsv":
        lines = ["\t".join(names), *("\t".join(str(row[name]) for name in names) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    return path


def read(path: Path) -> Rows:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix in (".jsonl", ".ndjson"):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file, strict=True))
        header, *lines = (line.split("\t") for line in file.read().split("\n")[:-1])
        return [dict(zip(header, line, strict=True)) for line in lines]


def columns_of(rows: Rows, name: str) -> list[Any]:
    return [row[name] for row in rows]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(MinbertError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), list(product(FORMATS, FORMATS)))
def test_every_format_in_and_out(predictor: Predictor, tmp_path: Path, source: str, target: str) -> None:
    report = predict_file(predictor, write(tmp_path / f"in.{source}", ROWS), tmp_path / f"out.{target}")
    assert report == FileReport(5, 0, ("sst",))
    found = read(tmp_path / f"out.{target}")
    assert [{name: row[name] for name in ROWS[0]} for row in found] == ROWS
    expected = predictor.predict(columns_of(ROWS, "sentence"), tasks=["sst"])["sst"]
    for row, answer in zip(found, expected, strict=True):
        assert row["sst"] == answer["label"]
        assert float(row["sst_probability"]) == pytest.approx(answer["probability"], abs=1e-6)
        if target in TABLES:
            assert list(row) == ["id", "sentence", "note", "sst", "sst_probability"]
        else:
            assert list(row) == ["id", "sentence", "note", "sst", "sst_probability", "sst_probabilities"]
            assert row["sst_probabilities"] == pytest.approx(answer["probabilities"], abs=1e-6)
    assert left_in(tmp_path) == sorted([f"in.{source}", f"out.{target}"])


@pytest.mark.parametrize("target", FORMATS)
def test_pairs_get_classes_and_scores(predictor: Predictor, tmp_path: Path, target: str) -> None:
    report = predict_file(predictor, write(tmp_path / "in.csv", PAIRS), tmp_path / f"out.{target}")
    assert report == FileReport(10, 0, ("quora", "sts"))
    found = read(tmp_path / f"out.{target}")
    expected = predictor.predict(columns_of(PAIRS, "sentence1"), columns_of(PAIRS, "sentence2"))
    assert columns_of(found, "quora") == [answer["label"] for answer in expected["quora"]]
    scores = [answer["score"] for answer in expected["sts"]]
    assert [float(score) for score in columns_of(found, "sts")] == pytest.approx(scores, abs=1e-4)


def test_endings_in_capitals_and_ndjson(predictor: Predictor, tmp_path: Path) -> None:
    source = write(tmp_path / "in.ndjson", ROWS)
    predict_file(predictor, source, tmp_path / "out.CSV")
    assert (tmp_path / "out.CSV").read_text(encoding="utf-8").startswith("id,sentence,note,sst,sst_probability\n")
    predict_file(predictor, source, tmp_path / "out.ndjson")
    assert "sst_probabilities" in read(tmp_path / "out.ndjson")[0]


def test_the_courses_own_layout_is_read(predictor: Predictor, tmp_path: Path) -> None:
    """Tabs in a file that is called .csv, and a column without a name."""
    path = tmp_path / "ids-sst-dev.csv"
    path.write_text('\tid\tsentence\tsentiment\n0\ta\t It is "nice" .\t3\n', encoding="utf-8")
    predict_file(predictor, path, tmp_path / "out.csv")
    (row,) = read(tmp_path / "out.csv")
    assert (row[""], row["sentence"], row["sentiment"]) == ("0", ' It is "nice" .', "3")


def test_a_file_may_be_replaced_by_its_own_answers(predictor: Predictor, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", ROWS)
    predict_file(predictor, path, path)
    assert columns_of(read(path), "id") == columns_of(ROWS, "id")
    assert "sst" in read(path)[0]


# --- what survives --------------------------------------------------------------------------------------------------

AWKWARD = [
    'say "hi"',
    '"',
    '""',
    "a,b",
    "line\nline",
    "line\r\nline",
    "bare\rreturn",
    " spaces ",
    "日本語 🙂",
    "\\n",
    "'",
]
BREAKS = ["a\tb", "line\nline", "line\r\nline", "bare\rreturn"]


@pytest.mark.parametrize(("source", "target"), list(product(["jsonl", "parquet", "csv"], ["jsonl", "parquet", "csv"])))
def test_quotes_and_line_ends_survive(predictor: Predictor, tmp_path: Path, source: str, target: str) -> None:
    rows = [{"id": str(number), "sentence": text, "note": text} for number, text in enumerate(AWKWARD)]
    predict_file(predictor, write(tmp_path / f"in.{source}", rows), tmp_path / f"out.{target}")
    found = read(tmp_path / f"out.{target}")
    assert columns_of(found, "sentence") == columns_of(found, "note") == AWKWARD
    assert [dict(row) for _, row in read_rows(tmp_path / f"out.{target}")] == found  # and we read what we wrote


@pytest.mark.parametrize("source", ["jsonl", "csv"])
def test_tsv_keeps_quotes_as_they_are_and_makes_line_ends_spaces(
    predictor: Predictor, tmp_path: Path, source: str
) -> None:
    texts = [text for text in AWKWARD if text not in BREAKS] + BREAKS
    rows = [{"sentence": text, "note": "n"} for text in texts]
    predict_file(predictor, write(tmp_path / f"in.{source}", rows), tmp_path / "out.tsv")
    expected = [text for text in AWKWARD if text not in BREAKS] + ["a b", "line line", "line line", "bare return"]
    assert columns_of(read(tmp_path / "out.tsv"), "sentence") == expected
    assert [row["sentence"] for _, row in read_rows(tmp_path / "out.tsv")] == expected


def test_tsv_to_tsv_changes_no_letter(predictor: Predictor, tmp_path: Path) -> None:
    source = write(tmp_path / "in.tsv", ROWS)
    predict_file(predictor, source, tmp_path / "out.tsv")
    before, after = source.read_text(encoding="utf-8"), (tmp_path / "out.tsv").read_text(encoding="utf-8")
    assert all(new.startswith(old) for old, new in zip(before.splitlines(), after.splitlines(), strict=True))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5))
def test_any_text_comes_through_csv_and_json(predictor: Predictor, tmp_path: Path, texts: list[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"sentence": text, "end": "."} for text in texts])
    for target in (tmp_path / "out.csv", tmp_path / "out.jsonl"):
        predict_file(predictor, source, target)
        assert [row["sentence"] for _, row in read_rows(target)] == texts


def test_half_a_surrogate_pair_survives_in_json(predictor: Predictor, tmp_path: Path) -> None:
    rows = [{"sentence": "nice \ud83d", "note": "\udfff"}]
    source = write(tmp_path / "in.jsonl", rows)
    predict_file(predictor, source, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl")[0].items() >= rows[0].items()
    predict_file(predictor, source, tmp_path / "out.csv")
    assert "Parquet" in refusal(lambda: predict_file(predictor, source, tmp_path / "out.parquet"))


def test_values_that_are_no_texts_stay_what_they_are(predictor: Predictor, tmp_path: Path) -> None:
    rows: Rows = [{"sentence": "nice", "n": 3, "x": 0.5, "day": date(2024, 2, 1), "tags": ["a"], "more": {"k": 1}}]
    source = write(tmp_path / "in.parquet", rows)
    predict_file(predictor, source, tmp_path / "out.parquet")
    assert read(tmp_path / "out.parquet")[0].items() >= rows[0].items()
    predict_file(predictor, source, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl")[0].items() >= (rows[0] | {"day": "2024-02-01"}).items()


def test_a_number_is_read_as_its_digits(predictor: Predictor, tmp_path: Path) -> None:
    predict_file(predictor, write(tmp_path / "in.jsonl", [{"sentence": 42}]), tmp_path / "out.jsonl")
    (row,) = read(tmp_path / "out.jsonl")
    assert row["sentence"] == 42
    assert row["sst"] == predictor.predict(["42"])["sst"][0]["label"]


@pytest.mark.parametrize("target", FORMATS)
def test_a_label_named_like_its_task_is_not_overwritten(tiny_encoder: Path, tmp_path: Path, target: str) -> None:
    """The sample's own files: the task "sentiment" learns from the column "sentiment"."""
    tokenizer, model, manifest = make(tiny_encoder, {"sentiment": {"like": "sst"}})
    named = Predictor(model, tokenizer, manifest)
    source = write(tmp_path / "in.csv", [{"sentence": "nice", "sentiment": "3"}])
    predict_file(named, source, tmp_path / f"out.{target}")
    (row,) = read(tmp_path / f"out.{target}")
    answer = named.predict(["nice"])["sentiment"][0]
    assert row["sentiment"] == "3"
    assert row["sentiment_predicted"] == answer["label"]
    assert float(row["sentiment_predicted_probability"]) == pytest.approx(answer["probability"], abs=1e-6)
    predict_file(named, tmp_path / f"out.{target}", tmp_path / "again.jsonl")
    (again,) = read(tmp_path / "again.jsonl")
    assert again["sentiment_predicted_predicted"] == again["sentiment_predicted"] == answer["label"]


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", FORMATS)
def test_order_is_kept_over_windows(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    rows = [{"id": str(number), "sentence": "nice " * (number * 7 % 10 + 1)} for number in range(11)]
    source = write(tmp_path / "in.csv", rows)
    predict_file(predictor, source, tmp_path / f"whole.{target}")
    monkeypatch.setattr(files, "WINDOW", 3)
    seen: list[int] = []
    report = predict_file(predictor, source, tmp_path / f"out.{target}", progress=seen.append)
    assert seen == [3, 3, 3, 2]
    assert report.rows == 11
    whole, found = read(tmp_path / f"whole.{target}"), read(tmp_path / f"out.{target}")
    assert columns_of(found, "id") == columns_of(rows, "id")
    assert columns_of(found, "sst") == columns_of(whole, "sst")
    probabilities = [float(value) for value in columns_of(whole, "sst_probability")]
    assert [float(value) for value in columns_of(found, "sst_probability")] == pytest.approx(probabilities, abs=2e-6)


@pytest.mark.parametrize("target", FORMATS)
def test_a_first_window_without_any_answer(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """In Parquet a column of nothing has no type yet."""
    monkeypatch.setattr(files, "WINDOW", 2)
    rows: Rows = [{"id": number, "sentence": text, "note": None} for number, text in enumerate(["", None, "", "nice"])]
    report = predict_file(predictor, write(tmp_path / "in.jsonl", rows), tmp_path / f"out.{target}")
    assert (report.rows, report.unanswered) == (4, 3)
    found = read(tmp_path / f"out.{target}")
    assert [bool(row["sst"]) for row in found] == [False, False, False, True]


@pytest.mark.parametrize("target", FORMATS)
def test_no_answer_at_all(predictor: Predictor, tmp_path: Path, target: str) -> None:
    rows: Rows = [{"id": 1, "sentence": ""}, {"id": 2, "sentence": " "}]
    report = predict_file(predictor, write(tmp_path / "in.jsonl", rows), tmp_path / f"out.{target}")
    assert (report.rows, report.unanswered) == (2, 2)
    assert len(read(tmp_path / f"out.{target}")) == 2


@pytest.mark.parametrize("target", FORMATS)
def test_columns_that_some_rows_leave_out(predictor: Predictor, tmp_path: Path, target: str) -> None:
    rows: Rows = [{"sentence": "nice"}, {"sentence": "the sun", "note": "late"}, {"note": "no text"}]
    report = predict_file(predictor, write(tmp_path / "in.jsonl", rows), tmp_path / f"out.{target}")
    assert (report.rows, report.unanswered) == (3, 1)
    found = read(tmp_path / f"out.{target}")
    assert [row.get("note") or "" for row in found] == ["", "late", "no text"]


@pytest.mark.parametrize("target", ["csv", "tsv", "parquet"])
def test_a_column_that_comes_too_late_is_not_dropped_in_silence(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(files, "WINDOW", 2)
    rows: Rows = [{"sentence": "nice"}] * 2 + [{"sentence": "the sun", "note": "late"}]
    source = write(tmp_path / "in.jsonl", rows)
    message = refusal(lambda: predict_file(predictor, source, tmp_path / f"out.{target}"))
    assert message == 'no row of the first 2 has "note", a later one has; expected .jsonl as output'
    assert left_in(tmp_path) == ["in.jsonl"]
    predict_file(predictor, source, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl")[2]["note"] == "late"


def test_a_column_of_two_types_is_no_parquet_column(predictor: Predictor, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"sentence": "nice", "n": 1}, {"sentence": "the sun", "n": "one"}])
    assert "expected .jsonl" in refusal(lambda: predict_file(predictor, source, tmp_path / "out.parquet"))
    assert left_in(tmp_path) == ["in.jsonl"]


# --- rows without a text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [("csv", "csv"), ("jsonl", "jsonl"), ("parquet", "tsv")])
def test_rows_without_a_text_are_kept_and_counted(
    predictor: Predictor, tmp_path: Path, source: str, target: str
) -> None:
    texts = ["nice", "", "the sun", "  "]
    rows = [{"id": str(number), "sentence": text} for number, text in enumerate(texts)]
    report = predict_file(predictor, write(tmp_path / f"in.{source}", rows), tmp_path / f"out.{target}")
    assert report == FileReport(4, 2, ("sst",))
    found = read(tmp_path / f"out.{target}")
    assert columns_of(found, "id") == ["0", "1", "2", "3"]
    assert [bool(row["sst"]) for row in found] == [True, False, True, False]
    assert [bool(row["sst_probability"]) for row in found] == [True, False, True, False]
    answers = predictor.predict(["nice", "the sun"])["sst"]
    assert [found[0]["sst"], found[2]["sst"]] == [answer["label"] for answer in answers]


def test_a_pair_needs_both_its_texts(predictor: Predictor, tmp_path: Path) -> None:
    rows = [{"sentence1": "nice", "sentence2": ""}, {"sentence1": "", "sentence2": "nice"}, PAIRS[0]]
    report = predict_file(predictor, write(tmp_path / "in.csv", rows), tmp_path / "out.jsonl")
    assert report == FileReport(3, 2, ("quora", "sts"))  # a row counts once, however many tasks go without
    assert [row["sts"] is None for row in read(tmp_path / "out.jsonl")] == [True, True, False]


# --- columns --------------------------------------------------------------------------------------------------------


def test_the_tasks_are_those_whose_columns_are_there(predictor: Predictor, tmp_path: Path) -> None:
    rows = [PAIRS[0] | {"sentence": "nice"}]
    assert predict_file(predictor, write(tmp_path / "a.csv", rows), tmp_path / "o.csv").tasks == ("sst", "quora", "sts")
    assert predict_file(predictor, write(tmp_path / "b.csv", ROWS), tmp_path / "o.csv").tasks == ("sst",)
    some = predict_file(predictor, write(tmp_path / "a.csv", rows), tmp_path / "o.csv", tasks=["sts"])
    assert some.tasks == ("sts",)
    assert list(read(tmp_path / "o.csv")[0]) == ["sentence1", "sentence2", "sentence", "sts"]


def test_other_columns_can_be_named(predictor: Predictor, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", [{"review": "the sun", "answer": "nice"}])
    report = predict_file(predictor, source, tmp_path / "out.jsonl", text="review", text2="answer")
    assert report.tasks == ("sst", "quora", "sts")
    (row,) = read(tmp_path / "out.jsonl")
    expected = predictor.predict(["the sun"], ["nice"])
    assert row["sst"] == expected["sst"][0]["label"]
    assert row["sts"] == pytest.approx(expected["sts"][0]["score"], abs=1e-4)
    assert predict_file(predictor, source, tmp_path / "out.jsonl", text="review").tasks == ("sst",)


def test_a_named_column_replaces_the_usual_one(predictor: Predictor) -> None:
    found = choose_columns(predictor.tasks, ["sentence", "review"], None, "review", "", "in.csv")
    assert found == {"sst": ("review", "")}


def test_a_missing_column_suggests_a_near_one(predictor: Predictor, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", [{"id": "1", "sentense": "nice"}])
    message = refusal(lambda: predict_file(predictor, source, tmp_path / "out.csv", tasks=["sst"]))
    assert message.endswith('in.csv: no column "sentence" (did you mean "sentense"?) for sst; found: id, sentense')
    message = refusal(lambda: predict_file(predictor, source, tmp_path / "out.csv", tasks=["sst"], text="sentens"))
    assert 'no column "sentens" (did you mean "sentense"?)' in message


def test_no_task_fits(predictor: Predictor, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", [{"id": "1", "body": "nice"}])
    message = refusal(lambda: predict_file(predictor, source, tmp_path / "out.csv"))
    assert "no task fits its columns (id, body); sst reads sentence; quora reads sentence1 sentence2" in message
    assert message.endswith("say --text and --text2")
    assert left_in(tmp_path) == ["in.csv"]


def test_an_unknown_task_suggests_a_near_one(predictor: Predictor, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", ROWS)
    message = refusal(lambda: predict_file(predictor, source, tmp_path / "out.csv", tasks=["st"]))
    assert message.startswith('no task "st" (did you mean "s')


def test_texts_are_normalised_for_a_task_that_learnt_so(tiny_encoder: Path, tmp_path: Path) -> None:
    tokenizer, model, manifest = make(tiny_encoder, {"sst": {"normalise": True}, "plain": {"like": "sst"}})
    given: list[list[str]] = []

    class Listening(Predictor):
        def predict(self, texts: Any, *rest: Any, **more: Any) -> Any:
            given.append(list(texts))
            return super().predict(texts, *rest, **more)

    source = write(tmp_path / "in.csv", [{"sentence": "It's NICE."}])
    predict_file(Listening(model, tokenizer, manifest), source, tmp_path / "out.csv")
    assert given == [["it 's nice ."], ["It's NICE."]]
    assert read(tmp_path / "out.csv")[0]["sentence"] == "It's NICE."


# --- standard input and output --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", "jsonl", "csv", "tsv"])
def test_standard_input_to_standard_output(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = write(tmp_path / f"in.{kind or 'jsonl'}", ROWS)
    monkeypatch.setattr("sys.stdin", io.StringIO(path.read_text(encoding="utf-8")))
    assert predict_file(predictor, None, None, kind=kind) == FileReport(5, 0, ("sst",))
    printed = capsys.readouterr().out
    predict_file(predictor, path, tmp_path / f"out.{kind or 'jsonl'}")
    assert printed == (tmp_path / f"out.{kind or 'jsonl'}").read_text(encoding="utf-8")


def test_one_side_may_be_a_file(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"sentence": "nice"}\n'))
    predict_file(predictor, None, tmp_path / "out.csv")
    assert read(tmp_path / "out.csv")[0]["sentence"] == "nice"
    predict_file(predictor, tmp_path / "out.csv", None, kind="tsv")
    assert capsys.readouterr().out.startswith("sentence\tsst\tsst_probability\tsst_predicted\t")


def test_parquet_is_not_for_pipes(predictor: Predictor, tmp_path: Path) -> None:
    message = 'standard input and output as "parquet"; expected csv, tsv or jsonl'
    assert refusal(lambda: predict_file(predictor, None, tmp_path / "out.csv", kind="parquet")) == message
    source = write(tmp_path / "in.csv", ROWS)
    assert refusal(lambda: predict_file(predictor, source, None, kind="parquet")) == message


def test_nothing_on_standard_input(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert refusal(lambda: predict_file(predictor, None, None)) == "stdin.jsonl: no rows"


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_unknown_endings(predictor: Predictor, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", ROWS)
    message = refusal(lambda: predict_file(predictor, source, tmp_path / "out.xlsx"))
    assert "out.xlsx" in message
    assert message.endswith("expected .csv, .tsv, .jsonl, .ndjson or .parquet")
    (tmp_path / "in.docx").write_text("?")
    assert 'unknown file type ".docx"' in refusal(
        lambda: predict_file(predictor, tmp_path / "in.docx", tmp_path / "out.csv")
    )
    assert left_in(tmp_path) == ["in.csv", "in.docx"]


def test_no_such_input(predictor: Predictor, tmp_path: Path) -> None:
    assert "no.csv" in refusal(lambda: predict_file(predictor, tmp_path / "no.csv", tmp_path / "out.csv"))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("content", ["", "id,sentence\n"])
def test_no_rows(predictor: Predictor, tmp_path: Path, content: str) -> None:
    (tmp_path / "in.csv").write_text(content)
    assert "in.csv: " in refusal(lambda: predict_file(predictor, tmp_path / "in.csv", tmp_path / "out.csv"))
    assert left_in(tmp_path) == ["in.csv"]


@pytest.mark.parametrize("target", FORMATS)
def test_no_folder_for_the_output(predictor: Predictor, tmp_path: Path, target: str) -> None:
    source = write(tmp_path / "in.csv", ROWS)
    message = refusal(lambda: predict_file(predictor, source, tmp_path / "no" / f"out.{target}"))
    assert f"no/out.{target}: cannot be written (" in message
    assert "None" not in message


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("before", [True, False])
def test_a_failure_half_way_leaves_what_was_there(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, before: bool
) -> None:
    monkeypatch.setattr(files, "WINDOW", 2)
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:3], "{broken", *lines[3:]]), encoding="utf-8")
    out = tmp_path / f"out.{target}"
    if before:
        out.write_text("old")
    message = refusal(lambda: predict_file(predictor, tmp_path / "in.jsonl", out))
    assert "in.jsonl:4: not JSON" in message
    assert left_in(tmp_path) == (["in.jsonl", out.name] if before else ["in.jsonl"])
    assert not before or out.read_text() == "old"


@pytest.mark.parametrize("target", FORMATS)
def test_an_interruption_leaves_nothing(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(files, "WINDOW", 2)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    source = write(tmp_path / "in.csv", ROWS)
    with pytest.raises(KeyboardInterrupt):
        predict_file(predictor, source, tmp_path / f"out.{target}", progress=interrupt)
    assert left_in(tmp_path) == ["in.csv"]
