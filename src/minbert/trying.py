"""`minbert try MODEL`: type a text, or two, and see what the model says.

    > What a lovely day.                       the classes as bars
    > How old is it? | What is its age?        how alike two texts are
    > :why                                     which words mattered, in colours

Lines of a pipe are answered one by one, without a prompt and without colours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minbert.console import bar
from minbert.data.raw import normalise
from minbert.delivery.importance import Importance, word_effects
from minbert.delivery.predictor import Predictor
from minbert.encoders import home
from minbert.errors import MinbertError, suggest
from minbert.tasks import Task

SEPARATOR = " | "
REMEMBERED = 1000  # lines of the history
COMMANDS = {
    ":help": "this list",
    ":tasks": "what the model answers",
    ":two": "ask for two texts, a line each; again: back to one",
    ":why": "which words mattered for the last answer; :why TASK for one task",
    ":quit": "leave; so does Ctrl-D",
}
COLOURS = {
    "very negative": "red",
    "negative": "dark_orange",
    "neutral": "yellow",
    "positive": "chartreuse3",
    "very positive": "green",
}
FOR = ("white on #1b3d2a", "white on #1f6b3f", "bold white on #22994f")
AGAINST = ("white on #45211f", "white on #7d2f2a", "bold white on #b83a32")
"""Backgrounds of words that speak for the answer, and against it: the stronger, the brighter."""


class Session:
    """A model, a screen, and what was asked last.

    Args:
        predictor: the model.
        console: where the answers go.
    """

    def __init__(self, predictor: Predictor, console: Console) -> None:
        self.predictor, self.console = predictor, console
        self.last: tuple[str, str | None] | None = None
        self.pairs = False
        self.waiting: str | None = None  # the first of two lines

    @property
    def prompt(self) -> str:
        if not self.pairs:
            return "> "
        return "first  > " if self.waiting is None else "second > "

    def take(self, line: str) -> bool:
        """Answer a line; False after :quit. What goes wrong is said, and the session goes on."""
        line = line.strip()
        try:
            return self._take(line)
        except MinbertError as error:
            self.console.print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
        return True

    def _take(self, line: str) -> bool:
        if line.startswith(":"):
            return self._obey(*line.split(maxsplit=1))
        if not line:
            return True
        if self.pairs:
            if self.waiting is None:
                self.waiting = line
                return True
            first, self.waiting = self.waiting, None
            self._answer(first, line)
        elif SEPARATOR in f" {line} ":
            first, second = (part.strip() for part in f" {line} ".split(SEPARATOR, 1))
            if not first or not second:
                raise MinbertError(f"a side of{SEPARATOR}is empty; expected a text on both")
            self._answer(first, second)
        else:
            self._answer(line, None)
        return True

    def _obey(self, command: str, rest: str = "") -> bool:
        if command in (":quit", ":q", ":exit"):
            return False
        if command == ":help":
            self.console.print(_help())
        elif command == ":tasks":
            self.console.print(_tasks(self.predictor.tasks))
        elif command == ":two":
            self.pairs, self.waiting = not self.pairs, None
            self.console.print("two texts, a line each" if self.pairs else "one text a line")
        elif command == ":why":
            self._explain(rest.strip())
        else:
            raise MinbertError(f'no command "{command}"{suggest(command, COMMANDS)}; :help lists them')
        return True

    def _answer(self, text: str, second: str | None) -> None:
        started = time.perf_counter()
        rows = answer_one(self.predictor, text, second)
        taken = time.perf_counter() - started
        self.last = (text, second)
        tasks = self.predictor.tasks
        shown = [draw_answer(tasks[name], answer) for name, answer in rows.items()]
        self.console.print(Padding(Group(*shown, Text(f"{taken * 1000:.0f} ms", "dim")), (0, 0, 1, 2), expand=False))

    def _explain(self, task: str) -> None:
        if self.last is None:
            raise MinbertError("nothing was asked yet; type a text first")
        text, second = self.last
        started = time.perf_counter()
        found = word_effects(self.predictor, text, second, tasks=[task] if task else None)
        taken = time.perf_counter() - started
        shown = [draw_words(one, text, second) for one in found.values()]
        self.console.print(Padding(Group(*shown, Text(f"{taken * 1000:.0f} ms", "dim")), (0, 0, 1, 2), expand=False))


def answer_one(predictor: Predictor, text: str, second: str | None = None) -> dict[str, dict[str, Any]]:
    """Answers of the tasks that read what is given: of one text its classes and scores, of two how they compare."""
    paired = second is not None
    fitting = [task for task in predictor.tasks.values() if not task.is_masked and task.answers_pairs == paired]
    if not fitting:
        known = ", ".join(predictor.tasks)
        missing = f"two texts: {known}; found two" if paired else f"one text: {known}; found one (TEXT{SEPARATOR}TEXT?)"
        raise MinbertError(f"no task of this model reads {missing}")
    rows: dict[str, dict[str, Any]] = {}
    for lower in (False, True):
        names = [task.name for task in fitting if task.normalise == lower]
        if not names:
            continue
        texts, pairs = ([normalise(one) if lower else one] if one is not None else None for one in (text, second))
        found = predictor.predict(texts or [], pairs, tasks=names)
        rows |= {name: found[name][0] for name in names}
    return {task.name: rows[task.name] for task in fitting}


def draw_answer(task: Task, answer: dict[str, Any]) -> Table:
    """Classes as bars, one a class; of a pair's two classes the second only; a score as a gauge over its scale."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=14)
    if "score" in answer:
        low, high = (0.0, task.scale or 1.0) if task.is_contrastive else (task.low, task.high)
        share = (answer["score"] - low) / (high - low)
        style = "red" if share < 0.34 else "yellow" if share < 0.67 else "green"
        table.add_row(Text(task.name, "bold"), bar(share, style=style), f"{answer['score']:.2f} of {high:g}")
        return table
    probabilities: dict[str, float] = answer["probabilities"]
    if task.is_pair and len(probabilities) == 2:
        label, value = list(probabilities.items())[1]
        said = Text(f"▸ {answer['label']}", "bold")
        table.add_row(Text(task.name, "bold"), bar(value, style="cyan"), f"{value:6.1%} {escape(label)}", said)
        return table
    table.add_row(Text(task.name, "bold"))
    for label, value in probabilities.items():
        chosen = label == answer["label"]
        name = Text(("▸ " if chosen else "  ") + label, "bold" if chosen else "")
        table.add_row(
            name, bar(value, style=COLOURS.get(label, "cyan")), Text(f"{value:6.1%}", "bold" if chosen else "")
        )
    return table


def draw_words(found: Importance, text: str, second: str | None = None) -> Group:
    """The texts with their words in colours, and the strongest words with their effects, which need no colours."""
    score = not found.answer
    said = f"{found.value:.2f}" if score else f"{found.answer} {found.value:.1%}"
    lines = [Text.assemble((found.task, "bold"), "  ", said)]
    largest = max((abs(word.effect) for word in found.words), default=0.0) or 1.0
    sides = {word.side for word in found.words}
    for side, one in enumerate((text, second)):
        if one is None or side not in sides:
            continue
        line = Text(one)
        for word in found.words:
            strength = int(abs(word.effect) / largest * 3.999) - 1  # the weakest quarter has no colour
            if word.side == side and strength >= 0:
                line.stylize((FOR if word.effect > 0 else AGAINST)[strength], word.start, word.end)
        lines.append(line)
    strongest = [word for word in found.strongest() if word.effect]
    if strongest:
        effects = (
            f"{word.text} {word.effect:+.2f}" if score else f"{word.text} {word.effect:+.1%}" for word in strongest
        )
        lines.append(Text("   ".join(effects), "dim"))
    else:
        lines.append(Text("no word makes a difference", "dim"))
    if found.skipped:
        lines.append(Text(f"{found.skipped} more words were not looked at", "yellow"))
    return Group(*lines)


def _help() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("a text", "bold"), "every task that reads one text answers")
    table.add_row(Text(f"a text{SEPARATOR}another", "bold"), "every task that compares two texts answers")
    for command, about in COMMANDS.items():
        table.add_row(Text(command, "bold"), about)
    return table


def _tasks(tasks: dict[str, Task]) -> Table:
    table = Table.grid(padding=(0, 2))
    for task in tasks.values():
        reads = "nothing to ask" if task.is_masked else "two texts" if task.answers_pairs else "one text"
        answers = ", ".join(task.classes) if task.is_classification else f"{task.low:g} to {task.high:g}"
        if not task.has_label:
            answers = "" if task.is_masked else "how near they are"
        table.add_row(Text(task.name, "bold"), reads, Text(answers))
    return table


def hold(session: Session, read: Callable[[str], str]) -> None:
    """Ask for lines until there are no more; Ctrl-C drops a line, and not the session."""
    while True:
        try:
            if not session.take(read(session.prompt)):
                return
        except EOFError:
            session.console.print()
            return
        except KeyboardInterrupt:
            session.waiting = None
            session.console.print()


def try_model(predictor: Predictor, *, title: str = "") -> None:
    """A session on this terminal, or with the lines of a pipe."""
    if not sys.stdin.isatty():
        session = Session(predictor, Console(color_system=None, highlight=False))
        for line in sys.stdin:
            if not session.take(line):
                return
        return
    console = Console(highlight=False)
    tasks = ", ".join(task.name for task in predictor.tasks.values() if not task.is_masked)
    console.print(
        f"[bold]{escape(title)}[/]  {escape(tasks)}\nType a text, or two with{SEPARATOR}between. :help, :quit\n"
    )
    with _history(home() / "try-history"):
        hold(Session(predictor, console), input)


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Arrow keys, and the lines of earlier sessions, where Python has readline."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    try:
        readline.read_history_file(path)
    except OSError:
        readline.clear_history()
    readline.set_history_length(REMEMBERED)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)  # what somebody typed is nobody else's business
        except OSError:
            pass
