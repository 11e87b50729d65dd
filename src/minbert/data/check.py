"""Is the data what the recipe takes it for? What is wrong, repeated or leaked; the balance and the lengths.

    report = check_data(recipe, data_folder(recipe))
    render(report, Console())

A problem is what training would stop at: a wrong row, a file that is not there. What training would survive and the
scores would not is a warning: rows that are there twice, perhaps with two labels, and rows of dev that are in train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minbert.config import Recipe
from minbert.data.raw import Examples, Problem, Split, class_counts, read_split
from minbert.data.tokenizer import Tokenizer
from minbert.encoders import find_encoder
from minbert.errors import MinbertError, shown
from minbert.recipe_checks import lender
from minbert.tasks import Task

CountTokens = Callable[[Sequence[str], Sequence[str] | None], NDArray[Any]]
Place = tuple[Path, int]

PERCENTILES = {"median": 50, "90% within": 90, "99% within": 99, "longest": 100}
SAME_SCORE = 0.1  # of the scale: scores of one pair that differ by no more do not contradict each other
BAR = 6  # characters


@dataclass(frozen=True)
class Repeat:
    """Two rows with the same texts: the earlier one, or the one in train, and the other."""

    text: str
    first: Place
    second: Place

    def __str__(self) -> str:
        (one, first), (other, second) = self.first, self.second
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        return f"{shown(other)}:{second} as {shown(one)}:{first}: {text}"


@dataclass(frozen=True)
class Repeats:
    """How many rows repeat another, and the first few of them."""

    count: int = 0
    some: tuple[Repeat, ...] = ()


@dataclass(frozen=True)
class Lengths:
    """Of the longest input that the head reads of a row: both texts of a pair together, or one."""

    unit: str
    percentiles: Mapping[str, int]
    histogram: Mapping[int, int]
    """Rows by the power of 2 that they fit into: 16 has the lengths from 9 to 16."""
    too_long: int
    """Rows above the recipe's max_tokens."""


@dataclass(frozen=True)
class SplitReport:
    """One split of one task."""

    task: str
    split: Split
    rows: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    repeated: Repeats = Repeats()
    contradicting: Repeats = Repeats()
    """Those of the repeated rows whose label is another than the first one's."""
    leaked: Repeats = Repeats()
    """Rows of dev or test that are in this task's train too."""
    balance: Mapping[str, int] = field(default_factory=dict)
    """Rows of each class, or of each fifth of the scale."""
    lengths: Lengths | None = None


@dataclass(frozen=True)
class DataReport:
    """All that was found. Duplicates and leaks are warnings: `ok` does not look at them."""

    recipe: str
    folder: Path
    max_tokens: int
    splits: tuple[SplitReport, ...]
    notes: tuple[str, ...]
    limit: int
    """How many of each kind are kept and printed; of the problems all are kept."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Each once, also where tasks share a file."""
        return tuple(dict.fromkeys(problem for split in self.splits for problem in split.problems))

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def warnings(self) -> int:
        return sum(split.repeated.count + split.leaked.count for split in self.splits)


def check_data(recipe: Recipe, folder: Path, *, count_tokens: CountTokens | None = None, limit: int = 20) -> DataReport:
    """Read every file of every task and look at it from all sides.

    Args:
        recipe: says which tasks, and after how many tokens a text is cut.
        folder: what the file names are relative to.
        count_tokens: tokens of each text, or of each with its partner, special ones included and nothing cut; without
            it words are counted.
        limit: how many repeated and leaked rows to keep as examples.
    """
    splits: list[SplitReport] = []
    notes: list[str] = []
    read: dict[tuple[str, Split], _Rows] = {}
    for task in (*recipe.tasks, *_lenders(recipe)):
        for split in get_args(Split):
            problems: list[Problem] = []
            examples = _read(task, split, folder, problems, notes)
            found = SplitReport(task.name, split, len(examples), examples.skipped, tuple(problems))
            if len(examples):
                rows = read[task.name, split] = _Rows(examples)
                repeated, contradicting = rows.repeated(task, limit)
                lengths = _lengths(task, examples, count_tokens, recipe.model.max_tokens)
                found = replace(found, repeated=repeated, contradicting=contradicting, lengths=lengths)
                found = replace(found, balance=_balance(task, examples))
                if split != "train" and (task.name, "train") in read:
                    found = replace(found, leaked=rows.leaked_from(read[task.name, "train"], limit))
            if found.rows or found.problems:
                splits.append(found)
    notes += _absent(recipe, splits) + _shared(read)
    return DataReport(recipe.name, folder, recipe.model.max_tokens, tuple(splits), tuple(notes), limit)


def _lenders(recipe: Recipe) -> list[Task]:
    """Tasks that are not the recipe's own, though one of its own borrows their training rows."""
    own = {task.name for task in recipe.tasks}
    lent = [lender(recipe, task) for task in recipe.tasks if task.borrow is not None]
    return [replace(task, dev=(), test=()) for task in lent if task.name not in own]


class _Rows:
    """A split as rows are compared: their texts in lower case, white space folded, a pair in either order."""

    def __init__(self, examples: Examples) -> None:
        columns = [column for column in (examples.texts, examples.pairs, examples.thirds) if column is not None]
        folded = ([" ".join(text.lower().split()) for text in column] for column in columns)
        self.examples = examples
        self.texts = list(zip(*folded, strict=True))
        self.keys = ["\t".join(sorted(row)) for row in self.texts]
        self.first: dict[str, int] = {}
        for row, key in enumerate(self.keys):
            self.first.setdefault(key, row)

    def repeated(self, task: Task, limit: int) -> tuple[Repeats, Repeats]:
        """Rows whose texts were there before, and those of them whose label is another one."""
        rows = [(self.first[key], row) for row, key in enumerate(self.keys) if self.first[key] != row]
        labels, differ = self.examples.labels, list[tuple[int, int]]()
        if labels is not None:
            tolerance = 1e-9 if task.is_classification else SAME_SCORE * (task.high - task.low) + 1e-9
            differ = [(one, other) for one, other in rows if abs(labels[one] - labels[other]) > tolerance]
        return self._repeats(rows, self, limit), self._repeats(differ, self, limit)

    def leaked_from(self, train: _Rows, limit: int) -> Repeats:
        both = [(train.first[key], row) for row, key in enumerate(self.keys) if key in train.first]
        return self._repeats(both, train, limit)

    def _repeats(self, rows: list[tuple[int, int]], of: _Rows, limit: int) -> Repeats:
        texts, places, others = self.texts, self.examples.lines, of.examples.lines
        some = [Repeat(" | ".join(texts[j]), others[i], places[j]) for i, j in rows[:limit]]
        return Repeats(len(rows), tuple(some))


def _read(task: Task, split: Split, folder: Path, problems: list[Problem], notes: list[str]) -> Examples:
    """What can be read of a split; nothing where none of its files is there."""
    present: list[str] = []
    for name in getattr(task, split):
        options = [folder / option.strip() for option in name.split("|")]
        missing = "no such file" + "".join(f", nor {shown(option)}" for option in options[1:])
        if any(option.is_file() for option in options):
            present.append(name)
        elif split == "test":
            notes.append(f"{task.name} test: {shown(options[0])}: {missing}; only minbert submit needs it")
        else:
            problems.append(Problem(options[0], 0, missing))
    if not present:
        return Examples([], [], None, None)
    there: dict[str, Any] = {split: tuple(present)}
    return read_split(replace(task, **there), split, folder, on_problem=problems.append)


def _balance(task: Task, examples: Examples) -> dict[str, int]:
    if examples.labels is None or task.is_contrastive:
        return {}
    if task.is_classification:
        return class_counts(examples.labels, task.classes)
    counts, edges = np.histogram(examples.labels, bins=5, range=(task.low, task.high))
    names = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
    return dict(zip(names, counts.tolist(), strict=True))


def count_words(texts: Sequence[str], pairs: Sequence[str] | None) -> NDArray[np.int64]:
    words = np.fromiter((len(text.split()) for text in texts), np.int64, len(texts))
    return words if pairs is None else words + count_words(pairs, None)


def token_counter(encoder: str) -> CountTokens | None:
    """Counts the tokens of a recipe's encoder; None where that is not on this machine, and words must do."""
    try:
        return Tokenizer.load(find_encoder(encoder)).count
    except MinbertError:
        return None


def _lengths(task: Task, examples: Examples, count_tokens: CountTokens | None, max_tokens: int) -> Lengths:
    count = count_tokens or count_words
    if "joint" in task.views:
        found = count(examples.texts, examples.pairs)
    else:
        columns = [column for column in (examples.texts, examples.pairs, examples.thirds) if column is not None]
        found = np.max([count(column, None) for column in columns], axis=0)
    numbers = np.percentile(found, list(PERCENTILES.values()), method="higher").astype(int).tolist()
    powers, rows = np.unique(np.ceil(np.log2(np.maximum(found, 1))).astype(int), return_counts=True)
    return Lengths(
        "words" if count_tokens is None else "tokens",
        dict(zip(PERCENTILES, numbers, strict=True)),
        {2**power: row for power, row in zip(powers.tolist(), rows.tolist(), strict=True)},
        int((found > max_tokens).sum()),
    )


def _absent(recipe: Recipe, splits: Iterable[SplitReport]) -> list[str]:
    """Classes without a row, of tasks that are to learn them all."""
    whole = {task.name for task in recipe.tasks if task.is_classification and not task.only}
    return [
        f'{split.task} {split.split}: no row of class "{name}"'
        for split in splits
        if split.task in whole
        for name, rows in split.balance.items()
        if not rows
    ]


def _shared(read: Mapping[tuple[str, Split], _Rows]) -> list[str]:
    """Dev rows whose texts another task trains on: no leak of a label, but worth knowing."""
    trained = {
        task: {text for row in rows.texts for text in row} for (task, split), rows in read.items() if split == "train"
    }
    notes = []
    for (task, split), rows in read.items():
        for other, known in trained.items():
            if split == "dev" and other != task and (count := sum(known.issuperset(row) for row in rows.texts)):
                notes.append(f"{task} dev: {count:,} rows whose texts are all in the train rows of {other}, too")
    return notes


# --- on the screen --------------------------------------------------------------------------------------------------


def render(report: DataReport, console: Console, *, stats: bool = False) -> None:
    """Print the report; with `stats` only what there is (counts, balance, lengths), not what is wrong with it."""
    for task in dict.fromkeys(split.task for split in report.splits):
        console.print(_table([split for split in report.splits if split.task == task], report, console, stats), "")
    if stats:
        return
    _list(console, "problems", len(report.problems), report.problems[: report.limit], "red")
    for split in report.splits:
        for repeats, what in (
            (split.repeated, "rows that repeat an earlier one"),
            (split.contradicting, "of these, rows with another label"),
            (split.leaked, "rows that are in train, too"),
        ):
            _list(console, f"{split.task} {split.split}: {what}", repeats.count, repeats.some, "yellow")
    for note in report.notes:
        _say(console, f"note: {note}", "dim")
    _say(
        console, summary(report), "bold red" if report.problems else "bold yellow" if report.warnings else "bold green"
    )


def summary(report: DataReport) -> str:
    """One line that leaves nothing out."""
    kinds = {
        "problems": len(report.problems),
        "repeated rows": sum(split.repeated.count for split in report.splits),
        "contradicting labels": sum(split.contradicting.count for split in report.splits),
        "rows of dev or test in train": sum(split.leaked.count for split in report.splits),
        "rows skipped": sum(sum(split.skipped.values()) for split in report.splits),
        f"rows over {report.max_tokens} tokens": sum(s.lengths.too_long for s in report.splits if s.lengths),
    }
    rows = sum(split.rows for split in report.splits)
    found = ", ".join(f"{count:,} {kind}" if count else f"no {kind}" for kind, count in kinds.items())
    words = any(split.lengths and split.lengths.unit == "words" for split in report.splits)
    return f"{report.recipe}: {rows:,} usable rows; {found}{' (or more: words were counted)' if words else ''}"


def _list(console: Console, title: str, count: int, some: Sequence[object], style: str) -> None:
    if count:
        _say(console, f"{title}: {count:,}", f"bold {style}")
    for line in some:
        _say(console, f"  {line}", style)
    if count > len(some):
        _say(console, f"  ... and {count - len(some):,} more", style)


def _say(console: Console, line: str, style: str) -> None:
    """A line as it is: no markup, no wrapping, and nothing out of the data that a terminal would obey."""
    console.print(Text("".join(c if c.isprintable() else " " for c in line), style), soft_wrap=True)


def _table(splits: Sequence[SplitReport], report: DataReport, console: Console, stats: bool) -> Table:
    """A task's splits side by side: rows and what is wrong with them, balance, lengths."""
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))  # three splits in 80 columns
    table.add_column(Text(splits[0].task))
    for split in splits:
        table.add_column(split.split, no_wrap=True)

    def add(name: str, values: Iterable[str], style: str = "") -> None:
        cells = list(values)
        if any(cells):
            table.add_row(Text(name), *(Text(cell, style if cell != "0" else "dim") for cell in cells))

    add("rows", (f"{split.rows:,}" for split in splits))
    for reason in dict.fromkeys(reason for split in splits for reason in split.skipped):
        add(f"skipped: {reason}", (f"{split.skipped.get(reason, 0):,}" for split in splits))
    if not stats:
        add("problems", (f"{len(split.problems):,}" for split in splits), "bold red")
        add("repeated", (f"{split.repeated.count:,}" for split in splits), "yellow")
        add("contradicting", (f"{split.contradicting.count:,}" for split in splits), "yellow")
        add(
            "in train, too", ("" if split.split == "train" else f"{split.leaked.count:,}" for split in splits), "yellow"
        )
    table.add_section()
    for name in dict.fromkeys(name for split in splits for name in split.balance):
        add(name, (_share(split.balance.get(name), split.rows, console) for split in splits))
    table.add_section()
    measured = [split.lengths for split in splits]
    unit = next((lengths.unit for lengths in measured if lengths), "")
    if unit:
        table.add_row(f"rows by {unit}")
    for power in sorted({power for lengths in measured if lengths for power in lengths.histogram}):
        name = f"{power // 2 + 1} to {power}" if power > 2 else f"{power}"
        add(name, (_share(s.lengths.histogram.get(power, 0) if s.lengths else None, s.rows, console) for s in splits))
    for name in PERCENTILES:
        add(name, (f"{lengths.percentiles[name]:,} {unit}" if lengths else "" for lengths in measured))
    add(f"over {report.max_tokens}", (f"{lengths.too_long:,}" if lengths else "" for lengths in measured), "yellow")
    return table


def _share(count: int | None, total: int, console: Console) -> str:
    """A bar, the count, and its part of the whole: `██▋      4,102  44%`."""
    if count is None:
        return ""
    whole, rest = divmod(round(8 * BAR * count / total), 8)
    bar = "#" * whole if console.options.ascii_only else "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()
    return f"{bar:<{BAR}}{count:>8,}{count / total:>5.0%}"
