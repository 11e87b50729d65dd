"""minbert try: every line has its answer, nothing ends the session but :quit, and a pipe gets no colours."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minbert import console as screens
from minbert.console import AnswerTable, bar
from minbert.delivery.importance import Importance, WordEffect
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from minbert.model.saved import save_model
from minbert.task_checks import check_task
from minbert.tasks import BUILT_IN
from minbert.trying import AGAINST, FOR, Session, answer_one, draw_answer, draw_words, hold
from tests.models import make
from tests.test_cli_train import Command, minbert  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def predictor(tiny_encoder: Path) -> Predictor:
    tokenizer, model, manifest = make(tiny_encoder, {"sst": {"normalise": True}, "quora": {}, "sts": {}})
    return Predictor(model, tokenizer, manifest)


@pytest.fixture(scope="module")
def folder(predictor: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("try") / "model"
    save_model(path, predictor.model, predictor.tokenizer, predictor.manifest)
    return path


def session(predictor: Predictor) -> tuple[Session, io.StringIO]:
    file = io.StringIO()
    return Session(predictor, Console(file=file, width=100, highlight=False)), file


def said(predictor: Predictor, *lines: str) -> str:
    talk, file = session(predictor)
    for line in lines:
        assert talk.take(line)
    return file.getvalue()


def plain(thing: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=100).print(thing)
    return file.getvalue()


# --- answers --------------------------------------------------------------------------------------------------------


def test_a_text_shows_every_class_with_its_probability(predictor: Predictor) -> None:
    text = said(predictor, "The sun, and a LAKE.")
    expected = predictor.predict(["the sun , and a lake ."], tasks=["sst"])["sst"][0]  # as the task reads it
    for label, value in expected["probabilities"].items():
        assert re.search(rf"{label} .*{value:.1%}", text), label
    assert f"▸ {expected['label']}" in text
    assert re.search(r"\d+ ms", text)
    assert "quora" not in text


def test_two_texts_show_how_they_compare(predictor: Predictor) -> None:
    text = said(predictor, "The sun | a lake | and more")
    found = predictor.predict(["The sun"], ["a lake | and more"], tasks=["quora", "sts"])
    assert f"{found['quora'][0]['probabilities']['duplicate']:.1%} duplicate" in text
    assert f"{found['sts'][0]['score']:.2f} of 5" in text
    assert "very negative" not in text


def test_the_two_line_mode_says_the_same_as_the_bar(predictor: Predictor) -> None:
    talk, file = session(predictor)
    assert (talk.take(":two"), talk.prompt) == (True, "first  > ")
    talk.take("The sun")
    assert talk.prompt == "second > "
    talk.take("a lake")
    assert talk.prompt == "first  > "

    def without_time(text: str) -> list[str]:
        return [line for line in text.splitlines() if " ms" not in line]

    assert without_time(file.getvalue())[1:] == without_time(said(predictor, "The sun | a lake"))
    talk.take(":two")
    assert talk.prompt == "> "


def test_a_model_without_a_fitting_task_says_so(tiny_encoder: Path) -> None:
    tokenizer, model, manifest = make(tiny_encoder, {"sst": {}})
    only = Predictor(model, tokenizer, manifest)
    assert list(answer_one(only, "nice")) == ["sst"]
    with pytest.raises(MinbertError, match="no task of this model reads two texts: sst; found two"):
        answer_one(only, "nice", "day")


def test_a_gauge_is_filled_as_far_as_its_share() -> None:
    assert bar(0.5, 8).plain == "████░░░░"
    assert bar(0.5 + 1 / 16, 8).plain == "████▌░░░"
    assert [bar(share, 4).plain for share in (-1.0, 0.0, 1.0, 2.0)] == ["░░░░", "░░░░", "████", "████"]
    assert all(len(bar(number / 997, 24).plain) == 24 for number in range(998))
    task = check_task(BUILT_IN["sts"])
    assert "████████████░░░░░░░░░░░░  2.50 of 5" in plain(draw_answer(task, {"score": 2.5}))


# --- why ------------------------------------------------------------------------------------------------------------


def test_words_are_coloured_by_what_they_do() -> None:
    effects = {"good": 0.5, "and": 0.02, "odd": -0.3}
    words = tuple(
        WordEffect(word, *match.span(), 0, effect)
        for word, effect in effects.items()
        if (match := re.search(word, "good and odd"))
    )
    line = draw_words(Importance("sst", "positive", 0.8, words), "good and odd").renderables[1]
    assert [(span.start, span.end, span.style) for span in line.spans] == [(0, 4, FOR[2]), (9, 12, AGAINST[1])]  # type: ignore[union-attr]


def test_why_names_the_strongest_words_without_colours_too(predictor: Predictor) -> None:
    text = said(predictor, "The sun came out", ":why")
    assert re.search(r"(The|sun|came|out) [+-]\d+\.\d%", text)
    text = said(predictor, "The sun | a lake", ":why sts")
    assert re.search(r"(The|sun|a|lake) [+-]\d\.\d\d", text)
    assert text.count("quora") == 1  # in the answer, and not in what was asked about one task


def test_words_that_do_nothing_and_words_left_out_are_said() -> None:
    shown = plain(draw_words(Importance("sst", "positive", 0.8, (WordEffect("a", 0, 1),), 7), "a b c d e f g h"))
    assert "no word makes a difference" in shown
    assert "7 more words were not looked at" in shown


# --- the session ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (":why", "nothing was asked yet"),
        (":whi", 'no command ":whi" (did you mean ":why"?)'),
        (" | ", "a side of | is empty"),
        ("a |", "a side of | is empty"),
        (":help", "which words mattered"),
        (":tasks", "very negative, negative, neutral, positive, very positive"),
        ("", ""),
    ],
)
def test_nothing_ends_the_session_but_quit(predictor: Predictor, line: str, expected: str) -> None:
    assert expected in said(predictor, line)


def test_an_unknown_task_and_markup_are_only_text(predictor: Predictor) -> None:
    assert 'no task "[red]x"' in said(predictor, "[bold]nice[/]", ":why [red]x")
    assert "[bold]nice[/]" in said(predictor, "[bold]nice[/]", ":why")


def test_an_interrupt_drops_the_line_and_the_end_of_the_input_ends_it(predictor: Predictor) -> None:
    talk, file = session(predictor)
    lines: Iterator[Any] = iter([":two", "The sun", KeyboardInterrupt(), "a", "lake", EOFError()])

    def read(_: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    hold(talk, read)
    assert file.getvalue().count("of 5") == 1
    assert talk.last == ("a", "lake")
    assert not talk.take(":quit")


def test_a_pipe_is_answered_line_by_line_without_colours(
    minbert: Command,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The sun\nThe sun | a lake\n:quit\nnever read\n"))
    ended = minbert("try", folder)
    assert ended.code == 0, ended.err
    assert "\x1b[3" not in ended.out
    assert ended.out.count("very negative") == 1 and ended.out.count("of 5") == 1
    assert sys.stdin.read() == "never read\n"


@pytest.mark.slow
def test_a_terminal_has_a_prompt_colours_and_a_history(folder: Path, tmp_path: Path) -> None:
    outer, inner = pty.openpty()
    environment = {**os.environ, "MINBERT_HOME": str(tmp_path), "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "minbert", "try", folder], stdin=inner, stdout=inner, stderr=inner, env=environment
    )
    os.close(inner)
    os.write(outer, b"The sun\n:why\n:quit\n")
    shown = b""
    while True:
        try:
            shown += os.read(outer, 4096)
        except OSError:  # the other end is closed
            break
    assert process.wait(60) == 0
    assert b"\x1b[" in shown and "▸".encode() in shown and b":help" in shown
    assert (tmp_path / "try-history").read_text().splitlines() == ["The sun", ":why", ":quit"]


# --- minbert predict ------------------------------------------------------------------------------------------------

ROWS = [
    {"id": "1", "text": "[b]", "sst": "good", "sst_probability": 0.75, "sst_probabilities": {"good": 0.75}},
    {"id": "2", "text": "", "sst": None, "sst_probability": None, "sst_probabilities": None},
]


def test_few_rows_are_a_table_and_many_are_lines() -> None:
    file = io.StringIO()
    with AnswerTable(Console(file=file, width=100), most=2) as table:
        table.write(ROWS)
    assert "probabilities" not in file.getvalue()
    assert re.search(r"1 +│ \[b\] +│ ████▌░ +75% good", file.getvalue())
    file = io.StringIO()
    with AnswerTable(Console(file=file, width=100), most=3) as table:
        table.write(ROWS)
        table.write(ROWS)
        table.write(ROWS)
    assert [json.loads(line) for line in file.getvalue().splitlines()] == ROWS * 3


def test_predict_shows_a_table_on_a_terminal_and_lines_to_a_pipe(
    minbert: Command,  # noqa: F811
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.csv").write_text("sentence\nThe sun\n")
    ended = minbert("predict", folder, "-i", tmp_path / "a.csv")
    assert json.loads(ended.out)["sentence"] == "The sun"
    monkeypatch.setattr(screens.out, "_force_terminal", True)
    ended = minbert("predict", folder, "-i", tmp_path / "a.csv")
    assert "The sun" in ended.out and "│" in ended.out
    ended = minbert("predict", folder, "-i", tmp_path / "a.csv", "--format", "csv")
    assert ended.out.splitlines()[0] == "sentence,sst,sst_probability"
