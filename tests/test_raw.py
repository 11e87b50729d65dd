"""Files as people have them, read into examples; what is wrong with a row, said with its line; the sample; real files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from minbert.config import SAMPLE
from minbert.data.raw import (
    EMPTY_TEXT,
    NO_LABEL,
    Examples,
    Problem,
    class_counts,
    fingerprint,
    normalise,
    read_rows,
    read_split,
    resolve,
)
from minbert.errors import MinbertError
from minbert.tasks import BUILT_IN, Task

SST = replace(BUILT_IN["sst"], train=("sst.csv",), dev=("sst-dev.csv",), test=("sst-test.csv",))
PAIRS = replace(BUILT_IN["quora"], train=("pairs.csv",))
STS = replace(BUILT_IN["sts"], train=("sts.csv",))

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write lines, or bytes as they are, to a file of the temporary folder."""

    def write(name: str, *lines: str, raw: bytes | None = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes("".join(f"{line}\n" for line in lines).encode() if raw is None else raw)
        return path

    return write


def read(task: Task, folder: Path, **options: Any) -> Examples:
    return read_split(task, "train", folder, **options)


def refusal(task: Task, folder: Path, split: Any = "train") -> str:
    """The one line that reading ends with."""
    with pytest.raises(MinbertError) as caught:
        read_split(task, split, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}/")


# --- the course's layout --------------------------------------------------------------------------------------------


def test_the_courses_layout(write: Write, tmp_path: Path) -> None:
    path = write(
        "pairs.csv",
        "\tid\tsentence1\tsentence2\tis_duplicate",
        "290564\tfbfddc \t What now?\tWhat then?\t0.0",
        '318737\t 318658\t"""Is ""the"" right?"" he asked"\tplain "quotes" inside\t1.0',
    )
    found = read(PAIRS, tmp_path)
    assert found.ids == ["fbfddc", "318658"]
    assert found.texts == ["What now?", '"Is "the" right?" he asked']
    assert found.pairs == ["What then?", 'plain "quotes" inside']
    assert found.labels is not None
    assert (found.labels.dtype, found.labels.tolist()) == (np.float64, [0, 1])
    assert found.lines == [(path, 2), (path, 3)]
    assert found.files == {str(path): fingerprint(path)}
    assert (len(found), found.skipped) == (2, {})


def test_the_courses_test_files_have_columns_of_numbers_and_no_labels(write: Write, tmp_path: Path) -> None:
    write(
        "sst-test.csv", "0\t\tid\tsentence", "1\t0.0\tb7573\t Effective but too-tepid biopic", "2\t1.0\td17a8\t Fun ."
    )
    found = read_split(SST, "test", tmp_path)
    assert found.ids == ["b7573", "d17a8"]
    assert found.texts == ["Effective but too-tepid biopic", "Fun ."]
    assert found.pairs is None
    assert found.labels is None


def test_labels_of_a_test_file_are_not_looked_at(write: Write, tmp_path: Path) -> None:
    write("sst-test.csv", "id\tsentence\tsentiment", "a\tFine .\tnonsense", "b\tBad .\t")
    assert len(read_split(SST, "test", tmp_path)) == 2


def test_a_tsv_knows_no_quotes(write: Write, tmp_path: Path) -> None:
    write("a.tsv", "id\tsentence\tsentiment", '1\t"open\t0', '2\tsaid ""so"" "\t4')
    found = read(replace(SST, train=("a.tsv",)), tmp_path)
    assert found.texts == ['"open', 'said ""so"" "']


def test_commas_where_the_header_has_no_tab(write: Write, tmp_path: Path) -> None:
    write("sst.csv", "id,sentence,sentiment", '1,"Yes, indeed: ""fine""",3', "2,No\ttab splits this,1")
    found = read(SST, tmp_path)
    assert found.texts == ['Yes, indeed: "fine"', "No\ttab splits this"]
    assert found.labels is not None
    assert found.labels.tolist() == [3, 1]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_and_the_byte_order_mark(write: Write, tmp_path: Path, end: str, mark: bytes, last: bool) -> None:
    text = end.join(["sentence\tid\tsentiment", "Grüße\ta\t1", "", "zwei\tb\t2"]) + (end if last else "")
    write("sst.csv", raw=mark + text.encode())
    found = read(SST, tmp_path)
    assert found.texts == ["Grüße", "zwei"]
    assert [line for _, line in found.lines] == [2, 4]


def test_a_field_of_several_lines_keeps_the_count(write: Write, tmp_path: Path) -> None:
    write("sst.csv", "id\tsentence\tsentiment", 'a\t"one', "two", 'three"\t0', "", "b\tfour\t1", "c\tfive\t9")
    problems: list[Problem] = []
    found = read(SST, tmp_path, on_problem=problems.append)
    assert found.texts == ["one\ntwo\nthree", "four"]
    assert [line for _, line in found.lines] == [2, 6]
    assert [problem.line for problem in problems] == [7]


def test_a_text_longer_than_the_csv_modules_usual_limit(write: Write, tmp_path: Path) -> None:
    write("sst.csv", "id\tsentence\tsentiment", f"a\t{'long ' * 100_000}\t0")
    assert len(read(SST, tmp_path).texts[0]) == 499_999


cells = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text == text.strip() and text
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=5), st.sampled_from([",", "\t"]))
def test_what_pandas_would_write_is_read_back(tmp_path_factory: Any, rows: list[tuple[str, str]], between: str) -> None:
    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    path = tmp_path_factory.mktemp("csv") / "sts.csv"
    lines = [between.join(["sentence1", "sentence2", "similarity"])]
    lines += [between.join([quoted(one), quoted(two), "2.5"]) for one, two in rows]
    path.write_bytes("\r\n".join(lines).encode())
    found = read(STS, path.parent)
    assert list(zip(found.texts, found.pairs or [], strict=True)) == rows


# --- JSON lines and Parquet -----------------------------------------------------------------------------------------


def test_two_tasks_share_a_json_file_whose_rows_have_labels_for_some(write: Write, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 0, "text": "Good and kind.", "mood": "positive"},
        {"id": 1, "text": "Awful.", "mood": "negative", "stars": 1},
        {"id": 2, "text": "Fine.", "stars": 3.5},
        {"id": 3, "text": "Nobody said.", "mood": None, "stars": ""},
    ]
    write("both.jsonl", *(json.dumps(row) for row in rows), "")
    mood = Task("mood", "classification", ("both.jsonl",), text="text", label="mood", classes=("negative", "positive"))
    stars = Task("stars", "regression", ("both.jsonl",), text="text", label="stars")
    found = read(mood, tmp_path)
    assert (found.ids, found.skipped) == (["0", "1"], {NO_LABEL: 2})
    assert found.labels is not None
    assert found.labels.tolist() == [1, 0]
    found = read(stars, tmp_path)
    assert (found.texts, found.skipped) == (["Awful.", "Fine."], {NO_LABEL: 2})
    assert found.labels is not None
    assert found.labels.tolist() == [1, 3.5]
    assert [line for _, line in found.lines] == [2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2: not JSON (Expecting property name"),
        ("[1]", "a.jsonl:2: a list; expected an object a line"),
        ("[" * 100_000, "a.jsonl:2: not JSON (maximum recursion"),
        (f'{{"sentiment": {"1" * 5000}}}', "a.jsonl:2: not JSON (Exceeds the limit"),
        ('{"sentence": 3, "sentiment": 1}', "a.jsonl:2: sentence is 3; expected a text"),
        ('{"sentence": ["a"], "sentiment": 1}', "a.jsonl:2: sentence is ['a']; expected a text"),
        ('{"sentence": "a", "sentiment": true}', 'a.jsonl:2: sentiment is "True"; expected 0 to 4 or one of: very neg'),
        ('{"sentence": "a", "sentiment": NaN}', 'a.jsonl:2: sentiment is "nan"; expected 0 to 4'),
    ],
)
def test_a_wrong_json_line_is_said(write: Write, tmp_path: Path, line: str, message: str) -> None:
    write("a.jsonl", '{"sentence": "fine", "sentiment": 1}', line, '{"sentence": "fine too", "sentiment": 2}')
    task = replace(SST, train=("a.jsonl",))
    assert refusal(task, tmp_path).startswith(message)
    problems: list[Problem] = []
    assert len(read(task, tmp_path, on_problem=problems.append)) == 2
    assert len(problems) == 1


def test_an_open_stream_is_read_by_the_name_it_is_given() -> None:
    assert list(read_rows(io.StringIO('{"a": 1}\n\n{"a": 2}\n'))) == [(1, {"a": 1}), (3, {"a": 2})]
    assert list(read_rows(io.StringIO("a,b\n1,2\n"), "x.csv")) == [(2, {"a": "1", "b": "2"})]
    with pytest.raises(MinbertError, match=r"^standard input:1: not JSON"):
        list(read_rows(io.StringIO("{\n")))


def test_parquet(write: Write, tmp_path: Path) -> None:
    columns = {
        "id": [0, 1, 2, 3],
        "sentence1": ["A dog.", "A cat.", None, "An owl."],
        "sentence2": ["Dogs.", "Cats.", "Owls.", " "],
        "similarity": [4.5, None, 1.0, 2.0],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    task = replace(STS, train=("a.parquet",))
    found = read(task, tmp_path)
    assert (found.ids, found.texts, found.pairs) == (["0"], ["A dog."], ["Dogs."])
    assert found.skipped == {NO_LABEL: 1, EMPTY_TEXT: 2}
    assert found.lines == [(tmp_path / "a.parquet", 1)]

    write("a.parquet", "no such thing")
    assert refusal(task, tmp_path).startswith("a.parquet: ")
    assert refusal(task, tmp_path).endswith("; expected a Parquet file")


# --- which rows, which files ----------------------------------------------------------------------------------------


def test_rows_with_empty_fields_are_skipped_and_counted(write: Write, tmp_path: Path) -> None:
    write(
        "pairs.csv",
        "id\tsentence1\tsentence2\tis_duplicate",
        "a",  # a short row: its fields are empty, its columns are not missing
        "b\tone\ttwo\t1",
        "c\t \ttwo\t1",
        'd\tone\t""\t1',
        "e\tone\ttwo\t",
        "f\tone\ttwo",
    )
    found = read(PAIRS, tmp_path)
    assert found.ids == ["b"]
    assert found.skipped == {EMPTY_TEXT: 3, NO_LABEL: 2}


def test_a_row_without_an_id_is_named_after_its_line(write: Write, tmp_path: Path) -> None:
    write("sst.csv", "sentence\tsentiment", "one\t1", "two\t2")
    assert read(SST, tmp_path).ids == ["sst:2", "sst:3"]


def test_the_first_alternative_that_exists_and_all_of_a_list(write: Write, tmp_path: Path) -> None:
    task = replace(SST, train=("a.csv | sub/b.tsv", "c.jsonl"))
    with pytest.raises(MinbertError, match=r"^no file .*/a\.csv or .*/sub/b\.tsv; say where the data is with --data"):
        read(task, tmp_path)
    b = write("sub/b.tsv", "id\tsentence\tsentiment", "b\tfrom b\t1")
    c = write("c.jsonl", '{"id": "c", "sentence": "from c", "sentiment": 2}')
    assert resolve(task.train, tmp_path) == [b, c]
    found = read(task, tmp_path)
    assert (found.ids, found.lines) == (["b", "c"], [(b, 2), (c, 1)])
    assert list(found.files) == [str(b), str(c)]
    a = write("a.csv", "id\tsentence\tsentiment", "a\tfrom a\t1")
    assert resolve(task.train, tmp_path) == [a, c]


def test_a_split_without_files_is_said() -> None:
    assert refusal(replace(SST, dev=()), Path(), "dev") == "[tasks.sst] names no dev files; expected at least one"


def test_classes_by_name_and_by_number(write: Write, tmp_path: Path) -> None:
    labels = ["very negative", "4", "2.0", " neutral ", "1e0"]
    write("sst.csv", "sentence\tsentiment", *(f"row {label}\t{label}" for label in labels))
    found = read(SST, tmp_path).labels
    assert found is not None
    assert found.tolist() == [0, 4, 2, 2, 1]
    assert class_counts(found, SST.classes) == {
        "very negative": 1,
        "negative": 1,
        "neutral": 2,
        "positive": 0,
        "very positive": 1,
    }


def test_names_that_are_numbers_are_never_positions(write: Write, tmp_path: Path) -> None:
    stars = Task("stars", "classification", ("stars.csv",), classes=("1", "2", "3"))
    write("stars.csv", "sentence,label", "a,1", "b,2.0", "c,3")  # 2.0 is the second name, not the third
    found = read(stars, tmp_path).labels
    assert found is not None
    assert found.tolist() == [0, 1, 2]
    write("stars.csv", "sentence,label", "a,0")
    assert refusal(stars, tmp_path) == 'stars.csv:2: label is "0"; expected one of: 1, 2, 3'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's GREAT, isn't it?", "it 's great , isn 't it ?"),
        ("U.S.  and\tsuch...", "u .s . and such . . ."),
        ('Left alone: ; ! "so"', 'left alone: ; ! "so"'),
        ("", ""),
    ],
)
def test_normalise_is_the_courses(text: str, expected: str) -> None:
    assert normalise(text) == expected


@given(st.text())
def test_normalise_agrees_with_the_courses_code(text: str) -> None:
    theirs = text.lower().replace(".", " .").replace("?", " ?").replace(",", " ,").replace("'", " '")
    assert normalise(text) == " ".join(theirs.split())


def test_a_task_that_asks_for_it_is_normalised(write: Write, tmp_path: Path) -> None:
    write("pairs.csv", "sentence1\tsentence2\tis_duplicate", "What's UP?\tFine, you\t1")
    found = read(replace(PAIRS, normalise=True), tmp_path)
    assert (found.texts, found.pairs) == (["what 's up ?"], ["fine , you"])


# --- what is wrong, and where ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        (
            STS,
            ["sentence1\tsentence2\tsimilarity", "a\tb\t5", "a\tb\t5.9"],
            'sts.csv:3: similarity is "5.9"; expected a number from 0 to 5',
        ),
        (
            replace(STS, low=-1.0, high=1.0),
            ["sentence1\tsentence2\tsimilarity", "a\tb\t-1.5"],
            'sts.csv:2: similarity is "-1.5"; expected a number from -1 to 1',
        ),
        (
            STS,
            ["sentence1\tsentence2\tsimilarity", "a\tb\tNaN"],
            'sts.csv:2: similarity is "NaN"; expected a number from 0 to 5',
        ),
        (
            STS,
            ["sentence1\tsentence2\tsimilarity", "a\tb\thigh"],
            'sts.csv:2: similarity is "high"; expected a number from 0 to 5',
        ),
        (
            SST,
            ["sentence\tsentiment", "a\t5"],
            'sst.csv:2: sentiment is "5"; expected 0 to 4 or one of: '
            "very negative, negative, neutral, positive, very positive",
        ),
        (SST, ["sentence\tsentiment", "a\t1.5"], 'sst.csv:2: sentiment is "1.5"; expected 0 to 4 or one of: '),
        (SST, ["sentence\tsentiment", "a\t-1"], 'sst.csv:2: sentiment is "-1"; expected 0 to 4 or one of: '),
        (SST, ["sentence\tsentiment", "a\tNegative"], 'sst.csv:2: sentiment is "Negative"; expected 0 to 4 or one of'),
        (
            SST,
            ["\tid\tsentense\tsentiment", "0\ta\tb\t1"],
            'sst.csv: no column "sentence" (did you mean "sentense"?); found: id, sentense, sentiment',
        ),
        (SST, ["id\tsentence", "a\tb"], 'sst.csv: no column "sentiment"; found: id, sentence'),
        (
            PAIRS,  # sentence1 is near, but has its use
            ["sentence1\tother\tis_duplicate", "a\tb\t1"],
            'pairs.csv: no column "sentence2"; found: sentence1, other, is_duplicate',
        ),
        (SST, [], "sst.csv: an empty file; expected a header line and rows"),
        (SST, ["", "sentence\tsentiment"], "sst.csv: an empty file; expected a header line and rows"),
        (SST, ["sentence\tsentiment"], "sst.csv: no usable rows for sst"),
        (SST, ["sentence\tsentiment", "\t3"], "sst.csv: no usable rows for sst; 1 rows skipped: empty text"),
        (
            SST,
            ["sentence\tsentiment", "a\t1", "b\t2\tmore"],
            "sst.csv:3: 3 fields; the header has 2 (sentence, sentiment)",
        ),
        (
            SST,
            ["sentence\tsentiment", "a\t1", '"never closed\t2', "b\t3"],
            "sst.csv:3: unexpected end of data; expected quotes around a whole field, and doubled inside it",
        ),
        (SST, ["sentence\tsentiment", '"So" he said\t2'], "sst.csv:2: 'a tab' expected after '\"'; expected quotes"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(
    write: Write, tmp_path: Path, task: Task, lines: list[str], message: str
) -> None:
    write(task.train[0], *lines)
    assert refusal(task, tmp_path).startswith(message)


def test_no_usable_rows_in_several_files(write: Write, tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        write(name, "sentence\tsentiment", "text\t")
    expected = f"a.csv: no usable rows for sst, nor in {tmp_path}/b.csv; 2 rows skipped: no label"
    assert refusal(replace(SST, train=("a.csv", "b.csv")), tmp_path) == expected


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_bytes_that_are_not_utf8_are_found(write: Write, tmp_path: Path, suffix: str) -> None:
    line = b'{"sentence": "a", "sentiment": 1}\n' if suffix == "jsonl" else b"a\t1\n"
    header = b"" if suffix == "jsonl" else b"sentence\tsentiment\n"
    body = header + line * 5000  # beyond the first block that is decoded
    write(f"a.{suffix}", raw=body + line.replace(b"a", "Grüße".encode("latin-1"), 1) + line)
    number, column = body.count(b"\n") + 1, line.index(b"a") + 3
    expected = f"a.{suffix}:{number}: byte 0xfc at column {column} is not UTF-8; expected a UTF-8 file"
    assert refusal(replace(SST, train=(f"a.{suffix}",)), tmp_path) == expected


def test_an_unknown_file_type_is_refused_and_capitals_are_not(write: Write, tmp_path: Path) -> None:
    write("a.xls", "sentence,sentiment", "a,1")
    expected = 'a.xls: unknown file type ".xls"; expected .csv, .tsv, .txt, .jsonl, .ndjson, .parquet'
    assert refusal(replace(SST, train=("a.xls",)), tmp_path) == expected
    write("A.CSV", "sentence,sentiment", "a,1")
    assert read(replace(SST, train=("A.CSV",)), tmp_path).texts == ["a"]


def test_all_problems_are_collected_and_the_other_rows_kept(write: Write, tmp_path: Path) -> None:
    one = write(
        "one.csv",
        "sentence\tsentiment",
        "good\t1",
        "bad label\t9",
        "too\tmany\tfields",
        '"bad" quotes\t1',
        "good too\tneutral",
        "no label\t",
        '"never closed\t1',
    )
    two = write("two.csv", "text\tsentiment", "unread\t1", "unread\t1")
    three = write("three.jsonl", "{", '{"sentence": "good again", "sentiment": 0}')
    four = write("four.csv", raw=b"sentence\tsentiment\nfine\t1\n\xff\t1\n")
    problems: list[Problem] = []
    task = replace(SST, train=("one.csv", "two.csv", "three.jsonl", "four.csv"))
    found = read(task, tmp_path, on_problem=problems.append)
    assert found.texts[:3] == ["good", "good too", "good again"]
    assert found.skipped == {NO_LABEL: 1}
    places = [(problem.path, problem.line) for problem in problems]
    assert places == [(one, 3), (one, 4), (one, 5), (one, 8), (two, 0), (three, 1), (four, 3)]
    assert str(problems[0]).startswith(f'{one}:3: sentiment is "9"; expected')
    assert str(problems[4]) == f'{two}: no column "sentence"; found: text, sentiment'


def test_no_usable_rows_is_one_more_problem(write: Write, tmp_path: Path) -> None:
    path = write("sst.csv", "sentence\tsentiment", "bad\t9")
    problems: list[Problem] = []
    assert len(read(SST, tmp_path, on_problem=problems.append)) == 0
    assert [problem.line for problem in problems] == [2, 0]
    assert str(problems[1]) == f"{path}: no usable rows for sst"


# --- the embedded sample --------------------------------------------------------------------------------------------

SAMPLES = {
    "sentiment": replace(BUILT_IN["sst"], train=("sentiment-train.tsv",), dev=("sentiment-dev.tsv",)),
    "paraphrase": replace(BUILT_IN["quora"], train=("paraphrase-train.tsv",), dev=("paraphrase-dev.tsv",)),
    "similarity": replace(BUILT_IN["sts"], train=("similarity-train.tsv",), dev=("similarity-dev.tsv",)),
}


def words(*texts: str) -> frozenset[str]:
    return frozenset("".join(c if c.isalnum() else " " for c in " ".join(texts).lower()).split())


@pytest.mark.parametrize("name", SAMPLES)
def test_the_sample_is_whole_varied_and_cleanly_split(name: str) -> None:
    task = SAMPLES[name]
    splits = [read_split(task, "train", SAMPLE), read_split(task, "dev", SAMPLE)]
    rows = [row for split in splits for row in zip(split.texts, split.pairs or split.texts, strict=True)]
    assert len(rows) >= 240
    assert all(split.skipped == {} for split in splits)
    ids = [each for split in splits for each in split.ids]
    assert len(set(ids)) == len(ids)
    assert len({frozenset(row) for row in rows}) == len(rows), "a row is there twice, or in train and in dev"

    for split in splits:
        assert split.labels is not None
        if task.is_classification:
            assert min(class_counts(split.labels, task.classes).values()) >= 5
        else:
            assert (np.histogram(split.labels, bins=5, range=(0, 5))[0] >= 5).all()

    bags = [words(*row) for row in rows]
    near = {i for (i, one), (j, two) in combinations(enumerate(bags), 2) if len(one & two) > 0.6 * len(one | two)}
    assert len(near) < 0.02 * len(rows), [rows[i] for i in near]


def test_the_sample_is_small() -> None:
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 200_000


# --- the real files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split", "rows", "skipped"),
    [
        ("sst", "train", 8544, 0),
        ("sst", "dev", 1101, 0),
        ("sst", "test", 2210, 0),
        ("cfimdb", "train", 1707, 0),
        ("cfimdb", "dev", 245, 0),
        ("cfimdb", "test", 488, 0),
        ("sts", "train", 6040, 0),
        ("sts", "dev", 863, 0),
        ("sts", "test", 1725, 0),
        ("quora", "train", 127_043, 0),
        ("quora", "dev", 20_212, 2),
    ],
)
def test_the_real_files(shared_data: Path, name: str, split: Any, rows: int, skipped: int) -> None:
    found = read_split(BUILT_IN[name], split, shared_data)
    assert (len(found), sum(found.skipped.values())) == (rows, skipped)
    assert len(set(found.ids)) == rows
    assert (found.labels is None) == (split == "test")
    if split != "test" and BUILT_IN[name].is_classification:
        assert found.labels is not None
        assert min(class_counts(found.labels, BUILT_IN[name].classes).values()) > 0
