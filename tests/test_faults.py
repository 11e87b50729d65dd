"""Power cuts, Ctrl-C and full disks, for real: processes are killed and a small disk is filled."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from minbert.config import Recipe
from minbert.errors import MinbertError
from minbert.evaluation.results import read_results
from minbert.experiment import train
from minbert.model.saved import load_model
from minbert.recipes import to_toml
from minbert.training.checkpoint import list_checkpoints
from minbert.training.metrics_log import read_metrics
from tests.runs import Listener, Stopped, last_checkpoint, small_recipe, unlike

pytestmark = [pytest.mark.fault, pytest.mark.skipif(os.name != "posix", reason="signals and mounts of a Unix")]

OFTEN = {"checkpoint_every": 2, "evaluate_every": 3, "accumulate": 2, "loss_weighting": "uncertainty", "ema": 0.9}


def make_recipe(encoder: Path, **training: Any) -> Recipe:
    return small_recipe(encoder, training={**OFTEN, "train_sample": 8, "best": "per-task", **training})


# --- kills ----------------------------------------------------------------------------------------------------------


def hear() -> None:
    """A shell that runs us in the background has SIGINT ignored, nohup SIGHUP, and children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(recipe: Path, out: Path, data: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "minbert", "train", recipe, "--out", out, "--data", data, "--device", "cpu"]
    return subprocess.Popen(
        [*map(str, command), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear,
    )


def wait_for_a_step(process: subprocess.Popen[str], run: Path) -> None:
    """Until the process adds to the run's log."""
    path = run / "metrics.jsonl"
    before = path.stat().st_mtime_ns if path.exists() else 0
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size and path.stat().st_mtime_ns != before:
            return
        time.sleep(0.01)


def test_killed_at_random_times(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """kill -9 while it starts and four times while it trains; resumed to the end it is the run that was never killed."""
    recipe = make_recipe(tiny_encoder, epochs=14)
    path = tmp_path / "small.toml"
    path.write_text(to_toml(recipe), encoding="utf-8")
    times = random.Random(7)
    killed = 0
    for attempt in range(5):
        process = start(path, tmp_path / "run", small_data, "--resume")
        if attempt:
            wait_for_a_step(process, tmp_path / "run")
        time.sleep(times.uniform(0, 0.6 if attempt else 3))
        killed += process.poll() is None
        process.kill()
        process.communicate()
    assert killed == 5, "the run is too short to be killed so often"
    process = start(path, tmp_path / "run", small_data, "--resume")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    train(recipe, out=tmp_path / "whole", data=small_data, device="cpu")
    assert unlike(tmp_path / "run", tmp_path / "whole") == []


SYSTEM_CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def killed_at(call: int, work: Callable[[], object]) -> bool:
    """Do the work in a child that is killed just before its call number `call` that changes the disk.

    Returns:
        False if the work was done before there were so many.
    """
    child = os.fork()
    if child == 0:
        try:
            calls = count(1)

            def dying(original: Callable[..., Any]) -> Callable[..., Any]:
                def either(*arguments: Any, **options: Any) -> Any:
                    if next(calls) == call:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*arguments, **options)

                return either

            for name in SYSTEM_CALLS:
                setattr(os, name, dying(getattr(os, name)))
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_killed_before_every_change_to_the_disk(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """Each fsync, rename and removal of a resumed session's first checkpoints and kept models, one after another."""
    recipe = make_recipe(tiny_encoder, epochs=1, keep=1)  # 9 steps

    def go(run: Path, **options: Any) -> None:
        train(recipe, out=run, data=small_data, device="cpu", resume=run.exists(), **options)

    go(tmp_path / "whole")
    with pytest.raises(Stopped):
        go(tmp_path / "stopped", watcher=Listener(at_step=5))
    points = 0
    for call in count(1):
        run = Path(shutil.copytree(tmp_path / "stopped", tmp_path / f"run-{call}"))
        if not killed_at(call, lambda run=run: go(run)):
            break
        points = call
        copy = Path(shutil.copytree(run, tmp_path / "copy"))
        load_model(copy / "model")  # whole at any moment: the old one or the new one
        shutil.rmtree(copy)
        go(run)
        # Killed after its last checkpoint, it may not have come to remove the one before; that is all
        spare = ("names", "checkpoints/step-00000008/")
        wrong = [name for name in unlike(run, tmp_path / "whole") if not name.startswith(spare)]
        hidden = [str(path) for path in run.rglob(".*")]
        assert wrong + hidden == [], f"killed at {call}"
        shutil.rmtree(run)
    assert points > 40, "so many changes there are between step 5 and the end"


def test_killed_while_snapshots_come_and_go(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """At every other change to the disk of a run's last step, whose snapshot replaces the one before."""
    training = {"epochs": 2, "evaluate_every": 1, "train_sample": 0, "keep": 1, "snapshots": 1}
    recipe = small_recipe(tiny_encoder, "sts", seed=2, training=training)  # 6 steps, each better than the one before

    def go(run: Path) -> None:
        train(recipe, out=run, data=small_data, device="cpu", resume=run.exists())

    go(tmp_path / "whole")
    assert read_results(tmp_path / "whole")["snapshots"][0]["step"] == 6
    with pytest.raises(Stopped):
        train(recipe, out=tmp_path / "stopped", data=small_data, device="cpu", watcher=Listener(at_step=6))
    points = 0
    for call in count(1, 2):
        run = Path(shutil.copytree(tmp_path / "stopped", tmp_path / f"run-{call}"))
        if not killed_at(call, lambda run=run: go(run)):
            break
        points = call
        go(run)
        wrong = [name for name in unlike(run, tmp_path / "whole") if not name.startswith(("names", "checkpoints/"))]
        assert wrong + [str(path) for path in run.rglob(".*")] == [], f"killed at {call}"
        shutil.rmtree(run)
    assert points > 20


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_ctrl_c(tiny_encoder: Path, small_data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Or what a scheduler or a container sends, or a terminal that is closed."""
    recipe = make_recipe(tiny_encoder, epochs=14)
    path = tmp_path / "small.toml"
    path.write_text(to_toml(recipe), encoding="utf-8")
    process = start(path, tmp_path / "run", small_data)
    wait_for_a_step(process, tmp_path / "run")
    time.sleep(0.3)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert output == ""
    assert errors.endswith("stopped; the same command with --resume goes on from the last checkpoint\n")
    assert "Traceback" not in errors
    process = start(path, tmp_path / "run", small_data, "--resume")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "overall:" in output
    train(recipe, out=tmp_path / "whole", data=small_data, device="cpu")
    assert unlike(tmp_path / "run", tmp_path / "whole") == []


def test_the_terminal_is_closed(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """A real one, which can no longer be written to: the step that was under way is saved all the same."""
    import pty

    recipe = make_recipe(tiny_encoder, epochs=1, batch_size=1, checkpoint_every=0, evaluate_every=0, log_every=1)
    path = tmp_path / "small.toml"
    path.write_text(to_toml(recipe), encoding="utf-8")
    words = ["train", path, "--out", tmp_path / "run", "--data", small_data, "--device", "cpu"]
    child, screen = pty.fork()
    if child == 0:
        hear()
        command = [sys.executable, "-m", "minbert", *map(str, words)]
        os.execve(sys.executable, command, {**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not len(lines_of(tmp_path / "run" / "metrics.jsonl")) > 3:
        if select.select([screen], [], [], 0.05)[0]:
            os.read(screen, 4096)
    os.close(screen)
    assert os.waitpid(child, 0)[0] == child
    (saved,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.name.endswith("-stopped") and int(saved.name.split("-")[1]) > 2
    process = start(path, tmp_path / "run", small_data, "--resume")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    train(recipe, out=tmp_path / "whole", data=small_data, device="cpu")
    assert unlike(tmp_path / "run", tmp_path / "whole") == []


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def test_ctrl_c_where_no_checkpoint_is_due(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """It is saved where it is, and the next session goes on from there."""
    recipe = make_recipe(tiny_encoder, epochs=1, batch_size=1, checkpoint_every=0, evaluate_every=0, log_every=1)
    path = tmp_path / "small.toml"
    path.write_text(to_toml(recipe), encoding="utf-8")
    done = 0
    for options in ((), ("--resume",)):
        process = start(path, tmp_path / "run", small_data, *options)
        wait_for_a_step(process, tmp_path / "run")
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        (saved,) = list_checkpoints(tmp_path / "run" / "checkpoints")
        assert saved.name.endswith("-stopped")
        assert int(saved.name.split("-")[1]) > done
        done = int(saved.name.split("-")[1])
    process = start(path, tmp_path / "run", small_data, "--resume")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    train(recipe, out=tmp_path / "whole", data=small_data, device="cpu")
    assert unlike(tmp_path / "run", tmp_path / "whole") == []


# --- full disks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 MB, of which a run needs a third."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a small disk can be mounted only by root")
    if shutil.which("mount") is None:
        pytest.skip("there is no mount to make a small disk with")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


class Filler(Listener):
    """Fills the disk at one step and, at another, makes room again."""

    def __init__(self, disk: Path, full_at: int, free_at: int = 0) -> None:
        super().__init__()
        self.disk, self.full_at, self.free_at = disk, full_at, free_at

    def stepped(self, step: int, record: Any) -> None:
        super().stepped(step, record)
        if step == self.full_at:
            fill(self.disk)
        if step == self.free_at:
            (self.disk / "filler").unlink()


def test_a_full_disk_that_is_freed_again(
    small_disk: Path, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    """Checkpoints, models and lines of the log fail for a while, and each failure is told; training goes on."""
    recipe = make_recipe(tiny_encoder, log_every=1, epochs=4)
    filler = Filler(small_disk, full_at=5, free_at=33)
    run = train(recipe, out=small_disk / "run", data=small_data, device="cpu", watcher=filler)
    assert filler.steps == list(range(1, 37))
    for told in ("checkpoint not saved at step 8", "the model could not be saved", "metrics.jsonl not written at step"):
        assert any(warning.startswith(told) for warning in filler.warnings), told
    assert all("No space left on device" in warning for warning in filler.warnings)
    assert any("the last good one is step-00000004" in warning for warning in filler.warnings), filler.warnings
    whole = train(recipe, out=tmp_path / "whole", data=small_data, device="cpu")
    ends = [(last_checkpoint(one.folder) / "state.safetensors").read_bytes() for one in (run, whole)]
    assert ends[0] == ends[1], "it learnt the same all the while"
    logs = [
        [(line["step"], line["loss"]) for line in read_metrics(one.folder / "metrics.jsonl") if line["kind"] == "train"]
        for one in (run, whole)
    ]
    assert logs[0] == logs[1], "lines that had to wait are there"


def test_a_disk_that_stays_full(small_disk: Path, tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """It ends with one line that says what to do. The last good checkpoint is whole, and with space it goes on."""
    recipe = make_recipe(tiny_encoder)
    filler = Filler(small_disk, full_at=9)
    with pytest.raises(MinbertError, match=r"--resume"):
        train(recipe, out=small_disk / "run", data=small_data, device="cpu", watcher=filler)
    assert filler.steps == list(range(1, 19)), "training went on to the end"
    good = list_checkpoints(small_disk / "run" / "checkpoints")
    assert [path.name for path in good] == ["step-00000006", "step-00000008"]
    (small_disk / "filler").unlink()
    train(recipe, out=small_disk / "run", data=small_data, device="cpu", resume=True)
    train(recipe, out=tmp_path / "whole", data=small_data, device="cpu")
    assert unlike(small_disk / "run", tmp_path / "whole") == []


def test_a_disk_that_is_full_from_the_start(small_disk: Path, tiny_encoder: Path, small_data: Path) -> None:
    fill(small_disk)
    recipe = make_recipe(tiny_encoder, epochs=1)
    with pytest.raises(MinbertError, match=r"run: cannot be written \(No space left on device\)"):
        train(recipe, out=small_disk / "run", data=small_data, device="cpu")
