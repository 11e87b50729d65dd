"""Files to examples: CSV, TSV, JSON lines and Parquet, as people have them; and plain text, where a text is all.

    examples = read_split(task, "dev", Path("data"))

Nothing is dropped silently: a row that cannot be used is counted under its reason, and a row that is wrong stops the
reading with the file, the line, the column, what was found and what was expected.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from minbert.config import EMBEDDED, SAMPLE
from minbert.errors import MinbertError, require, shown, suggest
from minbert.tasks import Task

Split = Literal["train", "dev", "test"]
Row = Mapping[str, Any]
Report = Callable[["Problem"], None]
SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl", ".ndjson", ".parquet")
EMPTY_TEXT = "empty text"
NO_LABEL = "no label"

csv.field_size_limit(1 << 28)  # the default refuses texts over 128 KiB


@dataclass(frozen=True)
class Problem:
    """Something wrong with one row, or with a file as a whole (line 0)."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{shown(self.path)}:{self.line}: {self.message}" if self.line else f"{shown(self.path)}: {self.message}"


@dataclass(frozen=True, eq=False)
class Examples:
    """The usable rows of a split, as columns."""

    ids: list[str]
    texts: list[str]
    pairs: list[str] | None
    labels: NDArray[np.float64] | None
    """Class numbers or scores; None where the split has no labels."""
    lines: list[tuple[Path, int]] = field(default_factory=list)
    """Where each row came from."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Rows not used, counted by reason."""
    files: Mapping[str, str] = field(default_factory=dict)
    """sha256 of each file that was read."""
    thirds: list[str] | None = None
    """Hard negatives."""
    added: Mapping[str, int] = field(default_factory=dict)
    """Rows that are not the files' own, counted by where they come from; they come last."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: NDArray[np.integer]) -> Examples:
        """These rows, in that order."""
        columns: dict[str, Any] = {
            item.name: [column[row] for row in rows]
            for item in fields(self)
            if isinstance(column := getattr(self, item.name), list) and column
        }
        return replace(self, **columns, labels=None if self.labels is None else self.labels[rows])

    def extended(self, other: Examples, what: str) -> Examples:
        """With the rows of another after these; `what` says in `added` what they are."""
        columns: dict[str, Any] = {
            item.name: column + getattr(other, item.name)
            for item in fields(self)
            if isinstance(column := getattr(self, item.name), list)
        }
        labels = None
        if self.labels is not None and other.labels is not None:
            labels = np.concatenate([self.labels, other.labels])
        files, added = {**self.files, **other.files}, {**self.added, what: len(other)}
        return replace(self, **columns, labels=labels, files=files, added=added)


def resolve(names: Sequence[str], folder: Path) -> list[Path]:
    """The files of a split: for each name the first of its alternatives ("a.csv|b.tsv") that exists.

    "embedded/a.tsv" is a file of the sample inside the package, whatever the folder.
    """
    found = []
    for name in names:
        options = [_place(option.strip(), folder) for option in name.split("|")]
        path = next((option for option in options if option.is_file()), None)
        if path is None:
            looked = " or ".join(shown(option) for option in options)
            raise MinbertError(f"no file {looked}; say where the data is with --data DIR or MINBERT_DATA")
        found.append(path)
    return found


def _place(name: str, folder: Path) -> Path:
    inside = name.removeprefix(f"{EMBEDDED}/")
    return folder / name if inside == name else SAMPLE / inside


def read_split(task: Task, split: Split, folder: Path, *, on_problem: Report | None = None) -> Examples:
    """The rows of a task's train, dev or test files.

    Args:
        task: says which columns to read, and what a label may be.
        split: test rows need no labels; in the others a row without one is skipped and counted.
        folder: what the task's file names are relative to.
        on_problem: is told of each wrong row or file, which is then left out; without it the first one is an error.
    """
    names: tuple[str, ...] = getattr(task, split)
    if not names:
        raise MinbertError(f"[tasks.{task.name}] names no {split} files; expected at least one")
    paths = resolve(names, folder)
    report = on_problem or _refuse
    ids, texts, pairs, thirds, labels, lines = [], [], [], [], [], []
    skipped: Counter[str] = Counter()
    labelled = split != "test" and not task.is_masked
    for path in paths:
        columns = _Columns(task, path, labelled, only=task.only if split == "train" else "")
        plain = task.text if is_plain(task, path) else ""
        for line, row in read_rows(path, on_problem=report, plain=plain):
            if (wrong := columns.check(row)) is not None:
                report(Problem(path, 0, wrong))
                break
            try:
                found = columns.read(line, row)
            except _Skip as reason:
                skipped[str(reason)] += 1
                continue
            except MinbertError as error:
                report(Problem(path, line, str(error)))
                continue
            name, text, pair, third, label = found
            ids.append(name)
            texts.append(text)
            pairs.append(pair)
            thirds.append(third)
            labels.append(label)
            lines.append((path, line))
    if not texts:
        others = "".join(f", nor in {shown(path)}" for path in paths[1:])
        why = "".join(f"; {count} rows skipped: {reason}" for reason, count in skipped.items())
        report(Problem(paths[0], 0, f"no usable rows for {task.name}{others}{why}"))
    return Examples(
        ids,
        texts,
        pairs if task.is_pair else None,
        np.array(labels, dtype=np.float64) if labelled else None,
        lines,
        dict(skipped),
        {shown(path): fingerprint(path) for path in paths if os.access(path, os.R_OK)},
        thirds if task.text3 else None,
    )


def is_plain(task: Task, path: Path) -> bool:
    """Whether a file is one text a line, without a header: a .txt of a task that reads one text and no label."""
    return path.suffix.lower() == ".txt" and not task.has_label and not task.text2


def read_rows(
    path: Path | IO[str], name: str = "", *, on_problem: Report | None = None, plain: str = ""
) -> Iterator[tuple[int, Row]]:
    """Line numbers and rows of a file by its ending; an open text file is read as the ending of `name` says.

    `on_problem` is told of a row or a file that cannot be read, which is then left out; without it that is an error.
    With `plain`, the name of the only column, each line is a row as it is.
    """
    report = on_problem or _refuse
    where = path if isinstance(path, Path) else Path(name or "standard input")
    suffix = Path(name).suffix.lower() if name else path.suffix.lower() if isinstance(path, Path) else ".jsonl"
    if suffix not in SUFFIXES:
        report(Problem(where, 0, f'unknown file type "{suffix}"; expected {", ".join(SUFFIXES)}'))
        return
    if suffix == ".parquet":
        yield from _parquet_rows(Path(str(path)), report)
        return
    read = _json_rows if suffix in (".jsonl", ".ndjson") else _csv_rows
    if plain:
        read = partial(_plain_rows, plain)
    if not isinstance(path, Path):
        yield from read(path, where, suffix, report)
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from read(file, path, suffix, report)
    except UnicodeDecodeError:
        report(Problem(path, *_undecodable(path)))
    except OSError as error:
        report(Problem(path, 0, f"{error.strerror}; expected a file that can be read"))


def _csv_rows(file: IO[str], path: Path, suffix: str, report: Report) -> Iterator[tuple[int, Row]]:
    """Tabs where the header has any, commas otherwise. Quotes mean something in .csv and nothing in .tsv."""
    header = file.readline()
    if not header.strip():
        report(Problem(path, 0, "an empty file; expected a header line and rows"))
        return
    delimiter = "\t" if "\t" in header or suffix == ".tsv" else ","
    quoting: Any = csv.QUOTE_NONE if suffix == ".tsv" else csv.QUOTE_MINIMAL
    names = next(csv.reader([header], delimiter=delimiter, quoting=quoting))
    # Strict: otherwise a quote that is never closed swallows the rows after it, and nobody hears of them
    reader = csv.reader(file, delimiter=delimiter, quoting=quoting, strict=True)
    while True:
        line = reader.line_num + 2
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            why = str(error).replace("\t", "a tab")
            report(Problem(path, line, f"{why}; expected quotes around a whole field, and doubled inside it"))
            continue
        if len(values) > len(names):
            report(Problem(path, line, f"{len(values)} fields; the header has {len(names)} ({', '.join(names)})"))
        elif values:
            yield line, dict(zip_longest(names, values, fillvalue=""))


def _plain_rows(column: str, file: IO[str], _path: Path, _suffix: str, _report: Report) -> Iterator[tuple[int, Row]]:
    for line, text in enumerate(file, start=1):
        yield line, {column: text}


def _json_rows(file: IO[str], path: Path, _: str, report: Report) -> Iterator[tuple[int, Row]]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python's limits
            report(Problem(path, line, f"not JSON ({error})"))
            continue
        if isinstance(row, dict):
            yield line, row
        else:
            report(Problem(path, line, f"a {type(row).__name__}; expected an object a line"))


def _parquet_rows(path: Path, report: Report) -> Iterator[tuple[int, Row]]:
    parquet: Any = require("pyarrow.parquet", "parquet", f"reading {shown(path)}")
    try:
        with parquet.ParquetFile(path) as file:
            number = 1
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these classes
        report(Problem(path, 0, f"{str(error).splitlines()[0]}; expected a Parquet file"))


def _undecodable(path: Path) -> tuple[int, str]:
    """The first line that is not UTF-8, and what is wrong with it. No letter's bytes hold those of a line's end."""
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                spot = f"byte {raw[error.start]:#x} at column {error.start + 1}"
                return line, f"{spot} is not UTF-8; expected a UTF-8 file"
    return 0, "not UTF-8; expected a UTF-8 file"  # it changed in between


class _Skip(Exception):  # noqa: N818 - not an error: a row to count and leave out
    pass


class _Columns:
    """Reads a task's fields out of a file's rows. The column names are checked at the first row."""

    def __init__(self, task: Task, path: Path, labelled: bool, *, only: str = "") -> None:
        self.task, self.path, self.labelled = task, path, labelled
        self.classes = {name: number for number, name in enumerate(task.classes)}
        # Where the names themselves are numbers, as in 1 to 5 stars, a number is a name and never a position
        named = {_number(name): number for name, number in self.classes.items() if not math.isnan(_number(name))}
        self.numbers = named or {float(number): number for number in self.classes.values()}
        self.positions = "" if named else f"0 to {len(self.classes) - 1} or "
        self.checked = False
        self.only = self._class(only) if only else None

    def check(self, row: Row) -> str | None:
        """At the first row: what is wrong with the file's column names."""
        if self.checked:
            return None
        self.checked = True
        task = self.task
        needed = [task.text, *([task.text2] if task.is_pair else []), *([task.text3] if task.text3 else [])]
        has_label = self.labelled and (not task.is_contrastive or self.only is not None)
        if has_label and self.path.suffix not in (".jsonl", ".ndjson"):  # whose rows may leave a label out
            needed.append(task.label)
        for column in needed:
            if column not in row:
                known = [name for name in row if name]
                free = set(known) - {task.id, task.text, task.text2, task.text3, task.label}
                return f'no column "{column}"{suggest(column, free)}; found: {", ".join(known)}'
        return None

    def read(self, line: int, row: Row) -> tuple[str, str, str, str, float]:
        task = self.task
        found = row.get(task.id)
        name = ("" if found is None else str(found).strip()) or f"{self.path.stem}:{line}"
        text = self._text(row, task.text)
        pair = self._text(row, task.text2) if task.is_pair else ""
        third = self._text(row, task.text3) if task.text3 else ""
        if self.only is not None and self._class_of(row) != self.only:
            raise _Skip(f'not of the class "{task.classes[int(self.only)]}"')
        return name, text, pair, third, self._label(row) if self.labelled else math.nan

    def _text(self, row: Row, column: str) -> str:
        value = row.get(column)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise _Skip(EMPTY_TEXT)
        if not isinstance(value, str):
            raise MinbertError(f"{column} is {value!r}; expected a text")
        return normalise(value) if self.task.normalise else value.strip()

    def _label(self, row: Row) -> float:
        if self.task.is_contrastive:
            return 0.0  # a number: a label that is none marks a row that is not there
        if self.task.is_classification:
            return self._class_of(row)
        text = self._label_text(row)
        number = _number(text)
        if not self.task.low <= number <= self.task.high:  # NaN is refused here too
            expected = f"a number from {self.task.low:g} to {self.task.high:g}"
            raise MinbertError(f'{self.task.label} is "{text}"; expected {expected}')
        return number

    def _label_text(self, row: Row) -> str:
        value = row.get(self.task.label)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise _Skip(NO_LABEL)
        return str(value).strip()

    def _class_of(self, row: Row) -> float:
        return self._class(self._label_text(row))

    def _class(self, text: str) -> float:
        number = self.classes.get(text, self.numbers.get(_number(text)))
        if number is None:
            expected = f"{self.positions}one of: {', '.join(self.classes)}"
            raise MinbertError(f'{self.task.label} is "{text}"; expected {expected}')
        return float(number)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _refuse(problem: Problem) -> None:
    raise MinbertError(str(problem))


def normalise(text: str) -> str:
    """As the course does: lower case, and `. ? , '` set apart."""
    for mark in ".?,'":
        text = text.replace(mark, f" {mark}")
    return " ".join(text.lower().split())


def fingerprint(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def class_counts(labels: Iterable[float], classes: Sequence[str]) -> dict[str, int]:
    """Rows of each class, in the order of the classes."""
    counts = Counter(int(label) for label in labels)
    return {name: counts[number] for number, name in enumerate(classes)}
