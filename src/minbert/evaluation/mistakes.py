"""The error analysis of a finished run: which dev rows went wrong, by a stated rule and never by hand.

    found = read_mistakes(Path("runs/sample"), count=5)
    write_markdown(found, Path("errors.md"))

It holds sentences of the dataset, so it goes where its user says, and nowhere else; `texts=False` leaves only their ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from minbert.atomic import write_text
from minbert.errors import MinbertError, shown, suggest
from minbert.evaluation.diagnosis import Mistakes, Row, confidence_of, worst_mistakes
from minbert.evaluation.results import read_predictions, read_results


@dataclass(frozen=True)
class TaskMistakes:
    """What went wrong in one task."""

    task: str
    score: str
    """The metric's name and value, and of which run."""
    rows: int
    """Dev rows of the task."""
    classes: Sequence[str]
    groups: Sequence[Mistakes]

    def expected(self, row: Row) -> str:
        return self.classes[int(row["label"])] if self.classes else f"{row['label']:.2f}"

    def predicted(self, row: Row) -> str:
        if not self.classes:
            return f"{row['prediction']:.2f}"
        return f"{self.classes[int(row['prediction'])]} ({confidence_of(row):.1%})"


def read_mistakes(run: Path, *, tasks: Iterable[str] | None = None, count: int = 10) -> list[TaskMistakes]:
    """The worst rows of a run's tasks, or of those named.

    Args:
        run: the folder of a finished run.
        tasks: which; default all.
        count: rows of each direction, at most.
    """
    results = read_results(run)
    known = results["dev"]
    which = f"{results['name']} with {results['encoder']}, seed {results['seed']}"
    chosen = list(tasks or known)
    for task in chosen:
        if task not in known:
            raise MinbertError(f'{shown(run)}: no task "{task}"{suggest(task, known)}; it has: {", ".join(known)}')
    found = []
    for task in chosen:
        rows, classes = read_predictions(run, task).rows, known[task].get("classes", [])
        metric = known[task]["metric"]
        score = f"{metric} {known[task]['metrics'][metric]['value'] or 0:.3f} of {which}"
        found.append(TaskMistakes(task, score, len(rows), classes, worst_mistakes(rows, classes, count)))
    return found


def tables(found: Iterable[TaskMistakes]) -> Iterator[Table]:
    """For a terminal: a table for each direction of each task."""
    for each in found:
        for group in each.groups:
            title = f"{each.task}. {group.title}: {_shown_of(group)} of {each.rows:,} rows"
            table = Table("expected", "predicted", "id", "text", title=escape(title), caption=group.rule)
            for row in group.rows:
                texts = "\n".join(row[key] for key in ("text", "text2") if key in row)
                cells = (each.expected(row), each.predicted(row), str(row["id"]), texts)
                table.add_row(*map(escape, cells))
            yield table


def write_markdown(found: Sequence[TaskMistakes], path: Path, *, texts: bool = True) -> None:
    """The same as a file; without texts it may be shown where the dataset may not."""
    lines = ["# Wrong answers on dev", ""]
    for each in found:
        lines += [f"## {_plain(each.task)}", "", f"{_plain(each.score)}.", ""]
        for group in each.groups:
            lines += [f"### {_plain(group.title)}", "", f"{_shown_of(group)} of {each.rows:,} rows. {group.rule}", ""]
            for number, row in enumerate(group.rows, start=1):
                verdict = f"expected {_plain(each.expected(row))}, predicted {_plain(each.predicted(row))}"
                lines += [f"{number}. {verdict} ({_plain(str(row['id']))})", ""]
                for key in ("text", "text2") if texts else ():
                    lines += [f"   > {_plain(row[key])}", ""] if key in row else []
    try:
        write_text(path, "\n".join(lines).encode("utf-8", "replace").decode())  # a lone surrogate has no UTF-8
    except OSError as error:
        raise MinbertError(f"{shown(path)}: cannot be written ({error.strerror})") from None


def _shown_of(group: Mistakes) -> str:
    """How many are shown, where it is not all of them."""
    if len(group.rows) == group.found:
        return f"{group.found:,}"
    return f"the worst {len(group.rows):,} of {group.found:,}, out"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))
