"""What a person sees: progress of a run, tables of scores. Everything goes through rich; nothing is computed here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import ROUNDED
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from minbert.errors import shown

if TYPE_CHECKING:
    from minbert.delivery.search import Match

out = Console()
err = Console(stderr=True)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.0f}/s" if task.speed else "")


@contextmanager
def progress_bar(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """`with progress_bar("embedding", total) as advance:` on the error stream, and only where someone is looking."""
    columns = (SpinnerColumn(), TextColumn(label), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


def print_matches(questions: Sequence[str], found: Sequence[Sequence[Match]], console: Console = out) -> None:
    """The sentences nearest to each question: a table for a person, JSON lines for a pipe."""
    for question, matches in zip(questions, found, strict=True):
        if not console.is_terminal:
            row = {"text": question, "matches": [asdict(match) for match in matches]}
            console.file.write(json.dumps(row, ensure_ascii=False) + "\n")
            continue
        table = Table("cosine", "", "row", "sentence", title=escape(question), title_justify="left", box=ROUNDED)
        for match in matches:
            table.add_row(f"{match.score:.3f}", bar(match.score, 10), f"{match.row:,}", escape(match.text))
        console.print(table)
    console.file.flush()


def bar(share: float, width: int = 24, style: str = "cyan") -> Text:
    """A bar of so many characters, filled by eighths of one."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + ("" if not rest else " ▏▎▍▌▋▊▉"[rest])
    return Text(filled, style).append("░" * (width - len(filled)), "bright_black")


class AnswerTable:
    """Answered rows of `predict_file` as a table, while they are few; of more, JSON lines as they come.

    with AnswerTable() as table:
        predict_file(predictor, source, None, write=table.write)
    """

    def __init__(self, console: Console = out, *, most: int = 50) -> None:
        self.console, self.most = console, most
        self.rows: list[dict[str, Any]] = []
        self.full = False

    def __enter__(self) -> AnswerTable:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.rows and kind is None:
            self.console.print(self.table())

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        if self.full or len(self.rows) > self.most:
            self.full = True
            lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in self.rows)
            self.console.file.writelines(lines)
            self.rows = []

    def table(self) -> Table:
        """A class with its probability is one column, and the other classes' probabilities are left to JSON lines."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        known = set(names)
        answers = {name for name in names if f"{name}_probability" in known}
        hidden = {f"{name}_{what}" for name in answers for what in ("probability", "probabilities")}
        shown = [name for name in names if name not in hidden]
        table = Table(*map(escape, shown), box=ROUNDED)
        for row in self.rows:
            table.add_row(*(self._cell(row, name, name in answers) for name in shown))
        return table

    @staticmethod
    def _cell(row: Mapping[str, Any], name: str, answer: bool) -> Text:
        value = row.get(name)
        if value is None:
            return Text("")
        if not answer:
            return Text(str(value))
        share = row[f"{name}_probability"]
        return Text.assemble(bar(share, 6), f" {share:4.0%} ", (str(value), "bold"))


class RunWatcher:
    """Draws a run: what is being prepared, the planned mix, a bar with the losses, a line for each evaluation."""

    def __init__(self, console: Console = err) -> None:
        self.console = console
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.status = console.status("")
        self.task: TaskID | None = None
        self.part = ""  # of a run with stages
        self.started, self.rows_before = time.perf_counter(), 0

    def __enter__(self) -> RunWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()
        self.progress.stop()

    def preparing(self, what: str) -> None:
        self.status.update(escape(what))
        self.status.start()

    def prepared(self, note: str) -> None:
        self.status.stop()
        self.console.print(note, highlight=False, markup=False)

    def entering(self, name: str, number: int, parts: int) -> None:
        """A stage, or the main part as the last: said, and shown at the bar from now on."""
        self.part = f"{name} ({number}/{parts})  "
        kind = "stage" if number < parts else "main training"
        self.console.print(f"{kind} {name}: part {number} of {parts}", highlight=False, markup=False)
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None
        self.rows_before = 0

    def planned(self, plan: Any) -> None:
        table = Table("task", "rows", "batches", "rows trained", "passes", "share of steps", title="planned mix")
        for name, row in plan.tasks.items():
            counts = (row.size, row.batches, row.rows)
            table.add_row(name, *(f"{count:,}" for count in counts), f"{row.passes:.1f}", f"{row.share:.0%}")
        self.console.print(table)
        self.console.print(f"{plan.steps:,} steps in {len(plan.epochs)} epochs", highlight=False)
        self.task = self.progress.add_task(f"{self.part}training", total=plan.steps, rate="")
        self.progress.start()
        self.started = time.perf_counter()

    def stepped(self, step: int, record: Mapping[str, Any] | None) -> None:
        if self.task is None:
            return
        self.progress.update(self.task, completed=step)
        if record is None:
            return
        now = time.perf_counter()
        rate = (record["rows"] - self.rows_before) / max(now - self.started, 1e-9) if self.rows_before else 0
        self.started, self.rows_before = now, record["rows"]
        losses = "  ".join(f"{name} {loss:.3f}" for name, loss in record["loss"].items())
        self.progress.update(
            self.task,
            description=f"{self.part}epoch {record['epoch']}  loss {losses}  lr {record['lr']:.1e}",
            rate=f"{rate:,.0f} rows/s" if rate else "",
        )

    def evaluated(self, record: Mapping[str, Any]) -> None:
        scores = "  ".join(f"{name} {score:.3f}" for name, score in record["scores"]["dev"].items())
        mark = "  [green]best so far[/]" if record["kept"] else ""
        self.console.print(
            f"epoch {record['epoch']}  step {record['step']:,}  dev: {scores}  aggregate {record['aggregate']:.3f}{mark}",
            highlight=False,
        )
        self.started, self.rows_before = time.perf_counter(), 0

    def warn(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/] {message}", highlight=False, soft_wrap=True)


class ReproductionWatcher:
    """Draws `minbert reproduce`: a table of what runs and how far it is, and a line for each run that ends."""

    def __init__(self, console: Console = err) -> None:
        self.console = console
        self.live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self.done = 0

    def __enter__(self) -> ReproductionWatcher:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def looked(self, running: list[Any], waiting: int) -> None:
        if self.live is None:
            return
        title = f"{self.done} done, {len(running)} running, {waiting} waiting"
        table = Table("row", "seed", "epoch", "step", "loss or dev scores", "minutes", title=title)
        for one in running:
            record = one.last_record()
            numbers = record.get("loss") or record.get("scores", {}).get("dev", {})
            told = "  ".join(f"{name} {number(value)}" for name, value in numbers.items())
            minutes = f"{(time.monotonic() - one.started) / 60:.1f}"
            place = (f"{record['epoch']} of {one.epochs}" if record else "", f"{record.get('step', 0):,}")
            table.add_row(one.job.row.key, str(one.job.seed), *place, told, minutes)
        self.live.update(table, refresh=True)

    def started(self, job: Any, log: Path) -> None:
        if self.live is None:  # nobody sees the table
            self.console.print(f"{job.row.key} seed {job.seed}: begins, {shown(log)}", highlight=False, soft_wrap=True)

    def finished(self, job: Any, results: Mapping[str, Any]) -> None:
        self.done += 1
        values = {name: found["metrics"][found["metric"]]["value"] for name, found in results["dev"].items()}
        scores = "  ".join(f"{name} {number(value)}" for name, value in values.items())
        minutes = f"{results['seconds'] / 60:.1f} min"
        self.console.print(f"{job.row.key} seed {job.seed}: {scores}  ({minutes})", highlight=False, soft_wrap=True)

    def failed(self, job: Any, why: str) -> None:
        self.console.print(
            f"[red]failed:[/] {job.row.key} seed {job.seed}: {escape(why)}", highlight=False, soft_wrap=True
        )


def print_results(results: Mapping[str, Any], console: Console = out) -> None:
    """Dev and train scores of a run, with intervals and the gap; before them, those of its stages."""
    for stage, before in results.get("stages", {}).items():
        scores = (
            f"{name} {number(found['metrics'][found['metric']]['value'])}" for name, found in before["dev"].items()
        )
        console.print(
            f"stage {stage}: {'  '.join(scores)}  ({before['seconds']:,.0f} s)", highlight=False, markup=False
        )
    table = Table(
        "task", "metric", "dev", "95% interval", "train", "gap", title=f"{results['name']}: {results['encoder']}"
    )
    for name, found in results["dev"].items():
        metric = found["metric"]
        value = found["metrics"][metric]
        train = results["train"].get(name, {}).get("metrics", {}).get(metric, {}).get("value")
        table.add_row(
            name,
            metric,
            number(value["value"]),
            f"{number(value['low'])} to {number(value['high'])}",
            number(train),
            number(results["gap"][name]),
        )
    console.print(table)
    rules = results["overall"]
    console.print(f"overall: {number(rules['2023'])} (2023 rule)  {number(rules['2024'])} (2024 rule)", highlight=False)
    for name, tuned in results["tuned_on_dev"].items():
        threshold = "" if tuned["threshold"] is None else f"threshold {tuned['threshold']:.2f} and "
        accuracy = number(tuned["metrics"]["accuracy"]["value"])
        chosen = f"{threshold}temperature {tuned['temperature']:.2f} chosen on dev"
        console.print(f"{name}: {chosen} (accuracy there {accuracy})", highlight=False)


def print_notes(data: Mapping[str, Any], console: Console = err) -> None:
    """Rows that were skipped and texts that were cut, so that nothing is lost silently."""
    for split, tasks in data.items():
        for task, note in tasks.items():
            for reason, count in note["skipped"].items():
                console.print(f"{task} {split}: {count} rows skipped ({reason})", highlight=False)
            for what, count in note.get("added", {}).items():
                console.print(f"{task} {split}: {count} rows added ({what})", highlight=False)
            cut = note["truncated"]
            if cut["texts"]:
                text = f"{task} {split}: {cut['texts']} inputs cut, {cut['tokens']} tokens lost"
                console.print(text, highlight=False)


def print_evaluations(evaluations: Mapping[str, Any], console: Console = out) -> None:
    """Every metric of `minbert evaluate`."""
    for name, found in evaluations.items():
        table = Table("metric", "value", "95% interval", title=f"{name}, {len(found.labels):,} rows")
        for metric, interval in found.metrics.items():
            table.add_row(metric, number(interval.value), f"{number(interval.low)} to {number(interval.high)}")
        console.print(table)
        if found.confusion is not None:
            classes = found.task.classes
            matrix = Table("label \\ answer", *classes, "accuracy")
            for row, label in enumerate(classes):
                cells = [f"{count:,}" for count in found.confusion[row]]
                matrix.add_row(label, *cells, number(found.class_accuracy[row]))
            console.print(matrix)


def print_export(found: Any, console: Console = out) -> None:
    """What `minbert export` wrote, how near it is, and what int8 costs."""
    if found.losses:
        columns = "task", "dev rows", "metric", "fp32", "int8", "difference", "95% interval"
        table = Table(*columns, title="what int8 costs")
        for name, loss in found.losses.items():
            interval = f"{loss['low']:+.4f} to {loss['high']:+.4f}"
            values = f"{loss['fp32']:.4f}", f"{loss['int8']:.4f}", f"{loss['difference']:+.4f}"
            table.add_row(name, f"{loss['rows']:,} of {loss['of']:,}", loss["metric"], *values, interval)
        console.print(table)
    for note in found.notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    if found.differences:
        largest = max(found.differences.values())
        what = "its heads" if found.form == "onnx-int8" else "it"
        console.print(f"largest difference between {what} and the model's own: {largest:.1e}", highlight=False)
    else:
        console.print("not compared: the library that reads this form is not installed here", highlight=False)
    console.print(f"written: {shown(found.folder)}: {', '.join(found.files)}", highlight=False, soft_wrap=True)


def number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3f}"
