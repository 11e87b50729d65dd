"""The `minbert` command: what it prints and writes, and that a mistake is one line and exit code 2."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from pyarrow import parquet
from typer.testing import CliRunner

from minbert import __version__, console
from minbert.cli import app, main
from minbert.delivery.embedder import Embedder
from minbert.encoders import get_encoder
from tests.broken import BROKEN, Break

TEXTS = ["the cat sat.", "hello world", "a dog ran and then the bird sang.", "", "hello"]
WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from minbert.cli import main
main()
"""


@pytest.fixture(autouse=True)
def workplace(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of our own, and a cache in which the default encoder is the tiny one."""
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "home"))
    get_encoder(str(shutil.copytree(tiny_folder, tmp_path / "minilm")))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> np.ndarray:
    return Embedder.load(tiny_folder).embed(TEXTS)


def invoke(*arguments: str, stdin: str | None = None) -> tuple[str, str]:
    """Run a command that works. Returns what it printed and what it said on the error stream."""
    result = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused. Returns the one line that it says."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["minbert", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        assert caught.value.code == 2
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return run


def start(*arguments: str, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = ["-c", code] if code else ["-m", "minbert"]
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, check=False, timeout=120, **options
    )


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Everything that can be run, and the root; a group that only holds commands leaves the examples to them."""
    if not path or getattr(command, "invoke_without_command", True):
        yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


def test_version() -> None:
    assert invoke("--version") == (f"minbert {__version__}\n", "")


@pytest.mark.parametrize("path", commands(typer.main.get_command(app)), ids=" ".join)
def test_help_of_every_command_has_an_example(path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        printed, _ = invoke(*path, flag)
        assert "Usage: " in printed
        assert "Example: minbert" in " ".join(printed.split())


def test_encoders_lists_the_cache_and_what_else_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 300)
    printed, _ = invoke("encoders")
    row = next(line for line in printed.splitlines() if "minilm" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "minilm",
        "bert",
        "2",
        "16",
        "0.0M",
        "0 MB",
        f"folder {tmp_path / 'minilm'}",
    ]
    for more in ("get minilm", "get mpnet", "get google-bert/bert-base-uncased", "get FOLDER"):
        assert f"minbert encoders {more}" in printed
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "new"))
    printed, _ = invoke("encoders")
    assert "No encoders in" in printed


def test_encoders_get_a_folder(tmp_path: Path, tiny_folder: Path) -> None:
    printed, _ = invoke("encoders", "get", str(tiny_folder))
    assert printed.splitlines() == [
        "tiny: bert, 2 layers, 0.0M parameters",
        str(tmp_path / "home" / "encoders" / "tiny"),
    ]
    assert "tiny" in invoke("encoders")[0]
    assert len(invoke("embed", "hello", "--encoder", "tiny")[0].splitlines()) == 1


def read_lines(printed: str) -> tuple[list[str], np.ndarray]:
    rows = [json.loads(line) for line in printed.splitlines()]
    return [row["text"] for row in rows], np.array([row["vector"] for row in rows])


def test_embed_arguments(expected: np.ndarray) -> None:
    printed, said = invoke("embed", *TEXTS)
    texts, vectors = read_lines(printed)
    assert texts == TEXTS
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert said.startswith("5 texts in ")
    assert "truncated" not in said


def test_embed_standard_input(expected: np.ndarray) -> None:
    texts, vectors = read_lines(invoke("embed", stdin="\r\n".join(TEXTS) + "\n")[0])
    assert texts == TEXTS
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
def test_embed_a_file_to_a_file(workplace: Path, suffix: str, expected: np.ndarray) -> None:
    Path("in.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    printed, said = invoke("embed", "--input", "in.txt", "--output", f"out{suffix}")
    assert printed == ""
    assert f"written: out{suffix}" in said
    assert sorted(path.name for path in workplace.iterdir()) == ["in.txt", f"out{suffix}"]
    if suffix == ".npy":
        vectors = np.load("out.npy")
    elif suffix == ".jsonl":
        texts, vectors = read_lines(Path("out.jsonl").read_text(encoding="utf-8"))
        assert texts == TEXTS
    else:
        table = parquet.read_table("out.parquet")
        assert table["text"].to_pylist() == TEXTS
        vectors = np.array(table["vector"].to_pylist())
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_embed_nothing() -> None:
    Path("in.txt").write_text("")
    _, said = invoke("embed", "--input", "in.txt", "--output", "out.npy")
    assert said.startswith("0 texts in ")
    assert np.load("out.npy").shape == (0, 16)


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler", "max"])
def test_embed_with_another_pooling(tiny_folder: Path, pooling: Any) -> None:
    _, vectors = read_lines(invoke("embed", *TEXTS, "--pooling", pooling)[0])
    np.testing.assert_allclose(vectors, Embedder.load(tiny_folder, pooling=pooling).embed(TEXTS), atol=1e-5)


def test_embed_says_what_was_truncated() -> None:
    _, said = invoke("embed", *TEXTS, "--max-tokens", "5")
    assert "texts truncated: 2, tokens lost: 7" in said


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_encoder_is_one_line(
    tiny_folder: Path, workplace: Path, fail: Callable[..., str], damage: Break, message: str
) -> None:
    damage(Path(shutil.copytree(tiny_folder, workplace / "broken")))
    assert re.search(message, fail("embed", "hello", "--encoder", "broken", "--output", "out.npy"))
    assert not (workplace / "broken" / "was-here").exists()
    assert not list(workplace.glob("out.npy*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--encoder", "minlm"],
            'no encoder "minlm" (did you mean "minilm"?); expected a folder, a hub id or one of: ',
        ),
        (["--encoder", "mpnet"], 'the encoder "mpnet" is not on this machine: minbert encoders get mpnet'),
        (["--pooling", "average"], 'pooling is "average"; expected one of: cls, pooler, mean, max'),
        (["--max-tokens", "33"], "max_tokens is 33; this encoder takes 3 to 32 for texts"),
        (["--max-tokens", "0"], "max_tokens is 0; this encoder takes 3 to 32 for texts"),
        (["--device", "nonsense"], 'device is "nonsense"'),
        (["--output", "out.csv"], 'out.csv: unknown output ".csv"; expected .npy, .jsonl, .parquet'),
        (["--output", "missing/out.npy"], "missing/out.npy: cannot be written (No such file or directory)"),
    ],
    ids=" ".join,
)
def test_bad_options_are_one_line(fail: Callable[..., str], arguments: list[str], message: str) -> None:
    assert fail("embed", "hello", *arguments).startswith(message)


def test_a_device_that_is_not_here() -> None:
    """In a process that sees no GPU, whatever this machine has."""
    result = start("embed", "hello", "--device", "cuda", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith('error: device is "cuda"')


def test_bad_input_files_are_one_line(workplace: Path, fail: Callable[..., str]) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    Path("folder").mkdir()
    wanted = "expected UTF-8 text"
    for name, found in [
        ("missing.txt", "No such file or directory"),
        ("folder", "Is a directory"),
        ("latin.txt", "not UTF-8 at byte 3"),
    ]:
        assert fail("embed", "--input", name, "--output", "out.npy") == f"{name}: {found}; {wanted}"
    assert sorted(path.name for path in workplace.iterdir()) == ["folder", "latin.txt"]


def test_bad_standard_input_is_one_line(fail: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert fail("embed") == "standard input: not UTF-8 at byte 3; expected UTF-8 text"
    keyboard = io.StringIO()
    monkeypatch.setattr(keyboard, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", keyboard)
    assert fail("embed") == "no texts: expected arguments, --input FILE, or lines on standard input"


def test_words_outside_the_vocabulary_are_one_line(
    tiny_folder: Path, workplace: Path, fail: Callable[..., str]
) -> None:
    folder = Path(shutil.copytree(tiny_folder, workplace / "more"))
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text() + "zebra\n")
    message = fail("embed", "a zebra", "--encoder", "more")
    assert message == "token id 19; expected 0 to 18 (the vocabulary)"


def test_an_error_may_hold_square_brackets(fail: Callable[..., str]) -> None:
    assert '"[bold]x"' in fail("embed", "hello", "--encoder", "[bold]x")


@pytest.mark.parametrize("options", [[], ["--input", "/dev/stdin"]], ids=["standard input", "a pipe as a file"])
def test_end_to_end_in_a_process_of_its_own(expected: np.ndarray, options: list[str]) -> None:
    if options and not Path(options[1]).exists():
        pytest.skip(f"no {options[1]} here")
    result = start("embed", *options, "--output", "out.npy", input="".join(f"{text}\n" for text in TEXTS))
    assert (result.returncode, result.stdout) == (0, "")
    np.testing.assert_allclose(np.load("out.npy"), expected, atol=1e-5)  # a pipe can be read only once


def test_debug_shows_the_traceback_and_nothing_else_does() -> None:
    plain = start("embed", "hello", "--encoder", "minlm")
    assert plain.returncode == 2
    assert len(plain.stderr.splitlines()) == 1
    assert "Traceback" not in plain.stderr
    debug = start("embed", "hello", "--encoder", "minlm", "--debug")
    assert debug.returncode != 0
    assert debug.stderr.startswith("Traceback")
    assert 'MinbertError: no encoder "minlm" (did you mean "minilm"?)' in debug.stderr


def test_without_torch_the_install_command_is_said() -> None:
    result = start("embed", "hello", code=WITHOUT_TORCH)
    assert result.returncode == 2
    message = "error: minbert embed needs torch, which is not installed: pip install 'minbert[train]'\n"
    assert result.stderr == message
    assert start("encoders", code=WITHOUT_TORCH).returncode == 0  # the base install lists them


def test_a_reader_that_leaves_early_is_no_error(workplace: Path) -> None:
    Path("in.txt").write_text("the cat sat.\n" * 3000)
    command = [sys.executable, "-m", "minbert", "embed", "-i", "in.txt"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
