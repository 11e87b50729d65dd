"""metrics.jsonl: whole lines, valid JSON, cut back on resume; TensorBoard and W&B where they are, faked here."""

from __future__ import annotations

import errno
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minbert.training.metrics_log import MetricsLog, read_metrics

RECORD = {"kind": "train", "step": 20, "epoch": 1, "loss": {"sst": 1.5, "sts": 2.0}, "lr": 1e-5, "seconds": 0.25}


@pytest.fixture(autouse=True)
def _nobody_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it is an ImportError
    monkeypatch.setitem(sys.modules, "wandb", None)


def write(folder: Path, *steps: int, resume_at: int | None = None) -> None:
    log = MetricsLog(folder, name="run", resume_at=resume_at)
    for step in steps:
        log.write({"step": step})
    log.close()


def steps_of(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def test_a_record_is_a_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, name="run")
    log.write(RECORD)
    log.write({"kind": "evaluation", "step": 20})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # at once: before the log is closed
    assert [json.loads(line) for line in lines] == [RECORD, {"kind": "evaluation", "step": 20}]
    log.sync()
    log.close()


def test_numbers_survive_exactly(tmp_path: Path) -> None:
    values = [1 / 3, 1e-300, 5e-324, 123456789.123456789, -0.0]
    log = MetricsLog(tmp_path, name="run")
    log.write({"step": 1, "loss": {"a": values[0]}, "rest": values[1:]})
    log.close()
    write(tmp_path, resume_at=1)  # read and written again
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["loss"]["a"], *record["rest"]] == values


def test_an_evaluation_that_is_to_be_done_again_is_not_there_twice(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, name="run")
    for kind, step in (("train", 1), ("evaluation", 1), ("train", 2), ("evaluation", 2), ("train", 3)):
        log.write({"kind": kind, "step": step})
    log.close()
    MetricsLog(tmp_path, name="run", resume_at=2, scored=False).close()
    found = [(record["kind"], record["step"]) for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert found == [("train", 1), ("evaluation", 1), ("train", 2)]


def test_an_undefined_score_is_null(tmp_path: Path) -> None:
    """JSON has no NaN: jq and browsers refuse it."""
    log = MetricsLog(tmp_path, name="run")
    log.write({"step": 1, "scores": {"dev": {"sts": math.nan, "sst": 0.5}}, "aggregate": math.inf})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(text, parse_constant=refuse) == {
        "step": 1,
        "scores": {"dev": {"sts": None, "sst": 0.5}},
        "aggregate": None,
    }


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    write(tmp_path, 1)
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize(("resume_at", "kept"), [(0, []), (2, [1, 2, 2]), (3, [1, 2, 2, 4][:3]), (9, [1, 2, 2, 4])])
def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path, resume_at: int, kept: list[int]) -> None:
    write(tmp_path, 1, 2, 2, 4)
    write(tmp_path, 5, resume_at=resume_at)
    assert steps_of(tmp_path) == [*kept, 5]


def test_resume_without_a_file(tmp_path: Path) -> None:
    write(tmp_path, 1, resume_at=0)
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize("cut", [1, 2, 5, 11])
def test_a_last_line_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 1, 2, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    whole = [1, 2, 3] if cut == 1 else [1, 2]  # one byte is only the end of the line
    assert steps_of(tmp_path) == whole
    write(tmp_path, 3, resume_at=2)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert path.read_bytes().endswith(b"}\n")


def test_lines_wait_for_space_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error at once, so that somebody hears of it; the line is written when there is space again."""
    log = MetricsLog(tmp_path, name="run")
    log.write({"step": 1})
    real = log._file

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log, "_file", Full())
    with pytest.raises(OSError, match="No space left"):
        log.write({"step": 2})
    monkeypatch.setattr(log, "_file", real)
    log.write({"step": 3})
    log.close()
    assert steps_of(tmp_path) == [1, 2, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_closing_on_a_full_disk_is_no_error(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, name="run")
    log._file.close()
    log._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115 - the log closes it
    with pytest.raises(OSError, match="No space left"):
        log.write({"step": 1})
    log.close()  # what was lost was said


class FakeBoard:
    made: list[FakeBoard]

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.scalars: list[tuple[str, float, int]] = []
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def init(self, **options: Any) -> FakeWandb:
        self.started.append(options)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((numbers, step))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[FakeBoard]:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeBoard
    FakeBoard.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return FakeBoard.made


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


FLAT = {"epoch": 1, "loss/sst": 1.5, "loss/sts": 2.0, "lr": 1e-5, "seconds": 0.25}


def test_tensorboard_gets_every_number(tmp_path: Path, boards: list[FakeBoard]) -> None:
    log = MetricsLog(tmp_path, name="run")
    log.write({**RECORD, "kept": ["model"], "flag": True})
    log.close()
    (board,) = boards
    assert board.folder == str(tmp_path / "tensorboard")
    assert {name: value for name, value, _ in board.scalars} == FLAT
    assert {step for *_, step in board.scalars} == {20}
    assert board.closed


def test_tensorboard_too_drops_what_came_after_the_checkpoint(tmp_path: Path, boards: list[FakeBoard]) -> None:
    write(tmp_path, 1, 2, 3)
    write(tmp_path, resume_at=2)
    assert [board.purge_step for board in boards] == [None, 3]


def test_an_installed_wandb_alone_sends_nothing(tmp_path: Path, wandb: FakeWandb) -> None:
    write(tmp_path, 1)
    assert wandb.started == []


@pytest.mark.parametrize("variable", ["WANDB_PROJECT", "WANDB_MODE"])
def test_wandb_where_its_variable_is_set(
    variable: str, tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "offline")
    log = MetricsLog(tmp_path, name="mine")
    log.write(RECORD)
    log.close()
    assert [(options["dir"], options["name"]) for options in wandb.started] == [(str(tmp_path), "mine")]
    assert wandb.logged == [(FLAT, 20)]
    assert wandb.finished


def test_wandb_asked_for_but_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    write(tmp_path, 1)
    assert steps_of(tmp_path) == [1]
