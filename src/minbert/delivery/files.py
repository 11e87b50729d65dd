"""Predictions for whole files, window by window: CSV, TSV, JSON lines and Parquet in and out, order kept.

    report = predict_file(predictor, Path("reviews.csv"), Path("answers.csv"))

Every column of the input stays; each task adds its answer: for a class NAME and NAME_probability (in JSON lines and
Parquet also NAME_probabilities), for a score NAME. Where the input has such a column, perhaps the label that the task
learnt from, NAME_predicted takes its place.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from minbert.data.raw import Row, normalise, read_rows
from minbert.delivery.predictor import Predictor, nothing_to_predict
from minbert.errors import MinbertError, require, shown, suggest
from minbert.tasks import Task

WINDOW = 4096
NESTED = (".jsonl", ".ndjson", ".parquet")
Write = Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True)
class FileReport:
    """How a file went."""

    rows: int
    unanswered: int
    """Rows with an empty text: they are in the output, without an answer."""
    tasks: tuple[str, ...]


def predict_file(
    predictor: Predictor,
    source: Path | None,
    target: Path | None,
    *,
    tasks: Iterable[str] | None = None,
    text: str = "",
    text2: str = "",
    kind: str = "",
    write: Write | None = None,
    progress: Callable[[int], None] | None = None,
) -> FileReport:
    """Answer every row of a file.

    Args:
        source: a file; None is standard input.
        target: a file; None is standard output.
        tasks: which; default all whose columns the file has.
        text: the column with the text, where it is not named as in training.
        text2: likewise for the second of a pair.
        kind: how standard input and output are written: csv, tsv or jsonl (the default).
        write: takes the answered rows in the place of a target, such as a table for a person.
    """
    kind = kind or "jsonl"
    if not (source and target) and kind not in ("csv", "tsv", "jsonl"):
        raise MinbertError(f'standard input and output as "{kind}"; expected csv, tsv or jsonl')
    name = str(source) if source else f"stdin.{kind}"
    rows = iter(row for _, row in read_rows(source or sys.stdin, "" if source else name))
    first = next(rows, None)
    if first is None:
        raise MinbertError(f"{name}: no rows")
    columns = choose_columns(predictor.tasks, list(first), tasks, text, text2, name)
    into = {task: _free_name(task, first) for task in columns}
    done = unanswered = 0
    with nullcontext(write) if write else open_rows(target, kind) as write_rows:
        for window in _windows(chain([first], rows)):
            answered, empty = _answer(predictor, window, columns, into, nested=_suffix(target, kind) in NESTED)
            write_rows(answered)
            done, unanswered = done + len(window), unanswered + empty
            if progress is not None:
                progress(len(window))
    return FileReport(done, unanswered, tuple(columns))


def choose_columns(
    tasks: Mapping[str, Task], found: list[str], wanted: Iterable[str] | None, text: str, text2: str, where: str
) -> dict[str, tuple[str, str]]:
    """The columns that each task reads; tasks that do not fit are left out, unless they were asked for."""
    chosen: dict[str, tuple[str, str]] = {}
    for name in tasks if wanted is None else wanted:
        if name not in tasks:
            raise MinbertError(f'no task "{name}"{suggest(name, tasks)}; this model has: {", ".join(tasks)}')
        task = tasks[name]
        if task.is_masked:
            if wanted is not None or all(other.is_masked for other in tasks.values()):
                raise MinbertError(nothing_to_predict([name] if wanted is not None else tasks))
            continue
        columns = (text or task.text, (text2 or task.text2) if task.answers_pairs else "")
        missing = [column for column in columns if column and column not in found]
        alone = task.answers_pairs and not columns[1]  # it learnt from single texts, and compares two
        if alone and wanted is not None:
            raise MinbertError(f"{where}: {name} compares two texts, and learnt from one column; say --text2")
        if missing and wanted is not None:
            near = suggest(missing[0], found)
            raise MinbertError(f'{where}: no column "{missing[0]}"{near} for {name}; found: {", ".join(found)}')
        if not missing and not alone:
            chosen[name] = columns
    if not chosen:
        needs = "; ".join(f"{name} reads {task.text} {task.text2}".strip() for name, task in tasks.items())
        raise MinbertError(f"{where}: no task fits its columns ({', '.join(found)}); {needs}; say --text and --text2")
    return chosen


def _answer(
    predictor: Predictor,
    window: list[Row],
    columns: Mapping[str, tuple[str, str]],
    into: Mapping[str, str],
    *,
    nested: bool,
) -> tuple[list[dict[str, Any]], int]:
    """The rows with each task's answer added, and how many could not be answered. Tasks that read the same columns
    share one call, so that their texts are encoded once."""
    answered = [dict(row) for row in window]
    empty: set[int] = set()
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name, (first, second) in columns.items():
        groups.setdefault((first, second, predictor.tasks[name].normalise), []).append(name)
    for (first, second, lower), names in groups.items():
        texts = [_text(row, first, lower) for row in window]
        pairs = [_text(row, second, lower) for row in window] if second else None
        usable = [number for number, text in enumerate(texts) if text and (pairs is None or pairs[number])]
        empty |= set(range(len(window))) - set(usable)
        found = predictor.predict(
            [texts[number] for number in usable],
            None if pairs is None else [pairs[number] for number in usable],
            tasks=names,
        )
        for name in names:
            for row in answered:
                row.update(dict.fromkeys(_added(predictor.tasks[name], into[name], nested)))
            for number, answer in zip(usable, found[name], strict=True):
                answered[number].update(_flat(into[name], answer, nested))
    return answered, len(empty)


def _text(row: Row, column: str, lower: bool) -> str:
    value = row.get(column)
    text = "" if value is None else str(value).strip()
    return normalise(text) if lower else text


def _free_name(task: str, found: Collection[str]) -> str:
    """The column for a task's answer, which no column of the input has to give way to."""
    name = task
    while not {name, f"{name}_probability", f"{name}_probabilities"}.isdisjoint(found):
        name += "_predicted"
    return name


def _added(task: Task, name: str, nested: bool) -> list[str]:
    if not task.is_classification:
        return [name]
    return [name, f"{name}_probability", *([f"{name}_probabilities"] if nested else [])]


def _flat(name: str, answer: Mapping[str, Any], nested: bool) -> dict[str, Any]:
    if "score" in answer:
        return {name: round(answer["score"], 4)}
    flat = {name: answer["label"], f"{name}_probability": round(answer["probability"], 6)}
    if nested:
        flat[f"{name}_probabilities"] = {label: round(value, 6) for label, value in answer["probabilities"].items()}
    return flat


def _suffix(path: Path | None, kind: str) -> str:
    return path.suffix.lower() if path else f".{kind}"


@contextmanager
def open_rows(path: Path | None, kind: str) -> Iterator[Write]:
    """A function that takes rows. A file appears under its name only when everything is written."""
    suffix = _suffix(path, kind)
    writers = {".csv": _csv_writer, ".tsv": _tsv_writer, ".jsonl": _json_writer, ".ndjson": _json_writer}
    if suffix not in writers and not (suffix == ".parquet" and path):
        raise MinbertError(f'unknown output "{path or kind}"; expected {", ".join(writers)} or .parquet')
    if path is None:
        yield writers[suffix](sys.stdout)
        sys.stdout.flush()
        return
    partial = path.with_name(f".{path.name}.part")
    try:
        if suffix == ".parquet":
            with _parquet_writer(partial) as write:
                yield write
        else:
            # Half of a surrogate pair has no UTF-8; with a backslash it is what JSON calls it.
            with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                yield writers[suffix](file)
        partial.replace(path)
    except OSError as error:
        raise MinbertError(f"{shown(path)}: cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)


def _columns(rows: list[dict[str, Any]], known: list[str]) -> list[str]:
    """The columns of a table, all found in the first window; one that comes later has no place any more."""
    found = list(dict.fromkeys(name for row in rows for name in row))
    late = [name for name in found if known and name not in known]
    if late:
        raise MinbertError(
            f'no row of the first {WINDOW:,} has "{late[0]}", a later one has; expected .jsonl as output'
        )
    return known or found


def _csv_writer(file: IO[str]) -> Write:
    def quoted(text: str) -> str:  # the csv module leaves a bare "\r" unquoted, which then ends the row
        return '"' + text.replace('"', '""') + '"' if re.search(r'[,"\r\n]', text) else text

    return _table_writer(file, ",", quoted)


def _tsv_writer(file: IO[str]) -> Write:
    """Quotes mean nothing in .tsv, so a tab or the end of a line inside a value can only become a space."""
    return _table_writer(file, "\t", lambda text: re.sub(r"[\t\r\n]+", " ", text))


def _table_writer(file: IO[str], delimiter: str, cell: Callable[[str], str]) -> Write:
    columns: list[str] = []

    def write(rows: list[dict[str, Any]]) -> None:
        nonlocal columns
        first, columns = not columns, _columns(rows, columns)
        header = [dict(zip(columns, columns, strict=True))] if first else []
        for row in [*header, *rows]:
            values = (row.get(name) for name in columns)
            file.write(delimiter.join("" if value is None else cell(str(value)) for value in values) + "\n")

    return write


def _json_writer(file: IO[str]) -> Write:
    def write(rows: list[dict[str, Any]]) -> None:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)  # str: dates

    return write


@contextmanager
def _parquet_writer(path: Path) -> Iterator[Write]:
    """The first windows wait for a value in every column, from which alone its type is known."""
    arrow: Any = require("pyarrow", "parquet", "Parquet output")
    parquet: Any = require("pyarrow.parquet", "parquet", "Parquet output")
    writer: Any = None
    columns: list[str] = []
    waiting: list[Any] = []

    def write(rows: list[dict[str, Any]]) -> None:
        nonlocal columns
        columns = _columns(rows, columns)
        table = [{name: row.get(name) for name in columns} for row in rows]
        try:
            waiting.append(arrow.Table.from_pylist(table, schema=writer.schema if writer else None))
            whole = arrow.concat_tables(waiting, promote_options="default")
        except (arrow.ArrowException, UnicodeError) as error:
            raise MinbertError(
                f"no Parquet column can hold it: {str(error).splitlines()[0]}; expected .jsonl as output"
            ) from None
        if writer or not any(arrow.types.is_null(field.type) for field in whole.schema):
            flush(whole)
            waiting.clear()

    def flush(table: Any) -> None:
        nonlocal writer
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)

    try:
        yield write
        if waiting:
            flush(arrow.concat_tables(waiting, promote_options="default"))
    finally:
        if writer is not None:
            writer.close()


def _windows(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while window := list(islice(rows, WINDOW)):
        yield window
