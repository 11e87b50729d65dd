"""The error analysis of a finished run: where dev rows went wrong, and which most, by stated rules and never by hand.

    found = read_mistakes(Path("runs/sample"), count=5)
    write_mistakes(found, Path("errors.md"))

It holds sentences of the dataset, so it goes where its user says, and nowhere else; `texts=False` leaves only their ids.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from minbert.atomic import write_text
from minbert.encoders import has_seen_quora, last_part
from minbert.errors import MinbertError, shown, suggest
from minbert.evaluation.diagnosis import Mistakes, Row, confidence_of, worst_mistakes
from minbert.evaluation.results import read_predictions, read_results
from minbert.evaluation.slices import FEW, RULES, Rate, Slice, columns_of, slices

BOLD = "Bold: that of all rows lies outside its 95% interval."


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
    slices: Sequence[Slice]
    """How often answers are wrong, by what the texts are like."""

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
    encoder = last_part(results["encoder"])
    which = f"{results['name']} with {encoder}, seed {results['seed']}"
    chosen = list(tasks or known)
    for task in chosen:
        if task not in known:
            raise MinbertError(f'{shown(run)}: no task "{task}"{suggest(task, known)}; it has: {", ".join(known)}')
    found = []
    for task in chosen:
        rows, classes = read_predictions(run, task).rows, known[task].get("classes", [])
        metric = known[task]["metric"]
        score = f"{metric} {known[task]['metrics'][metric]['value'] or 0:.3f} of {which}"
        if task == "quora" and has_seen_quora(encoder):
            score += f"; {encoder} has seen Quora questions in its own training"
        worst = worst_mistakes(rows, classes, count)
        found.append(TaskMistakes(task, score, len(rows), classes, worst, slices(rows, classes)))
    return found


def tables(found: Iterable[TaskMistakes]) -> Iterator[Table]:
    """For a terminal: of each task where the mistakes are, then a table for each direction."""
    for each in found:
        if each.slices:
            yield _slices_table(each)
        for group in each.groups:
            title = f"{each.task}. {group.title}: {_shown_of(group)} of {each.rows:,} rows"
            table = Table("expected", "predicted", "id", "text", title=escape(title), caption=group.rule)
            for row in group.rows:
                texts = "\n".join(row[key] for key in ("text", "text2") if key in row)
                cells = (each.expected(row), each.predicted(row), str(row["id"]), texts)
                table.add_row(*map(escape, cells))
            yield table


def _slices_table(each: TaskMistakes) -> Table:
    title = f"{each.task}. Where the mistakes are"
    table = Table("texts", "", "rows", *map(escape, columns_of(each.classes)), title=escape(title), caption=BOLD)
    before = ""
    for part in each.slices:
        bold = [f"[bold]{rate}[/]" if unusual else str(rate) for rate, unusual in _compared(part, each)]
        table.add_row(part.by if part.by != before else "", part.group, f"{part.rows:,}", *bold)
        before = part.by
    return table


def _compared(part: Slice, each: TaskMistakes) -> Iterator[tuple[Rate, bool]]:
    """Each rate, and whether it is another one than that of all rows."""
    for rate, general in zip(part.rates, each.slices[0].rates, strict=True):
        yield rate, rate.differs(general.value)


def write_mistakes(found: Sequence[TaskMistakes], path: Path, *, texts: bool = True) -> None:
    """The same as a file, Markdown or JSON by its name. Without texts it may be shown where the dataset may not."""
    if path.suffix not in (".md", ".json"):
        raise MinbertError(f"{shown(path)}: expected a name that ends in .md or .json")
    if path.suffix == ".json":
        content = json.dumps(_as_json(found, texts=texts), indent=1, ensure_ascii=False) + "\n"
    else:
        content = "\n".join(["# Wrong answers on dev", "", *markdown(found, texts=texts)])
    try:
        write_text(path, content.encode("utf-8", "replace").decode())  # a lone surrogate has no UTF-8
    except OSError as error:
        raise MinbertError(f"{shown(path)}: cannot be written ({error.strerror})") from None


def load_mistakes(path: Path) -> list[TaskMistakes]:
    """What `write_mistakes` wrote as JSON."""
    return [
        TaskMistakes(
            **{
                **one,
                "groups": [Mistakes(**group) for group in one["groups"]],
                "slices": [Slice(**{**part, "rates": [_rate(r) for r in part["rates"]]}) for part in one["slices"]],
            }
        )
        for one in json.loads(path.read_text(encoding="utf-8"))
    ]


def _rate(content: dict[str, Any]) -> Rate:
    """An interval without ends, of a mean over one row, is null twice: JSON has no infinity."""
    low, high = content["low"], content["high"]
    ends = {"low": -math.inf if low is None else low, "high": math.inf if high is None else high}
    return Rate(**{**content, **ends})


def _as_json(found: Sequence[TaskMistakes], *, texts: bool) -> list[dict[str, Any]]:
    content = [asdict(each) for each in found]
    for rate in (rate for each in content for part in each["slices"] for rate in part["rates"]):
        rate |= {key: rate[key] if math.isfinite(rate[key]) else None for key in ("low", "high")}
    if not texts:
        for group in (group for each in content for group in each["groups"]):
            group["rows"] = [{k: v for k, v in row.items() if not k.startswith("text")} for row in group["rows"]]
    return content


def markdown(found: Sequence[TaskMistakes], *, texts: bool = True) -> list[str]:
    """Lines: a chapter for each task."""
    lines = []
    for each in found:
        lines += [f"## {_plain(each.task)}", "", f"{_plain(each.score)}.", ""]
        lines += _slices_lines(each) if each.slices else []
        for group in each.groups:
            lines += [f"### {_plain(group.title)}", "", f"{_shown_of(group)} of {each.rows:,} rows. {group.rule}", ""]
            for number, row in enumerate(group.rows, start=1):
                verdict = f"expected {_plain(each.expected(row))}, predicted {_plain(each.predicted(row))}"
                lines += [f"{number}. {verdict} ({_plain(str(row['id']))})", ""]
                for key in ("text", "text2") if texts else ():
                    lines += [f"   > {_plain(row[key])}", ""] if key in row else []
    return lines


def _slices_lines(each: TaskMistakes) -> list[str]:
    columns = ["texts", "", "rows", *map(_plain, columns_of(each.classes))]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for part in each.slices:
        cells = [part.by, part.group, f"{part.rows:,}"]
        for rate, unusual in _compared(part, each):
            interval = f" ({rate.interval})" if rate.interval else ""
            cells.append((f"**{rate}**" if unusual else str(rate)) + interval)
        lines.append(f"| {' | '.join(cells)} |")
    intervals = f"With 95% intervals, from {FEW} rows on. {BOLD}"
    rules = [f"- {by}: {RULES[by]}" for by in dict.fromkeys(part.by for part in each.slices) if by in RULES]
    return ["### Where the mistakes are", "", *lines, "", intervals, "", *rules, ""]


def _shown_of(group: Mistakes) -> str:
    """How many are shown, where it is not all of them."""
    if len(group.rows) == group.found:
        return f"{group.found:,}"
    return f"the worst {len(group.rows):,} of {group.found:,}, out"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))
