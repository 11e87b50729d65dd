"""Files and folders that appear whole or not at all: after an exception, and after an end at any line of the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minbert import atomic
from minbert.atomic import atomic_folder, settle, write_text, written


class PowerCut(BaseException):
    """Nothing after it runs: the tests undo what a `finally` did meanwhile, as no process is there to do it."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, content: str) -> None:
    with atomic_folder(folder) as new:
        (new / "a").write_text(content)
        (new / "inner").mkdir()
        (new / "inner" / "b").write_text(content)


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def whole(text: str) -> dict[str, str]:
    return {"a": text, "inner/b": text}


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_with_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file.txt"
    write_text(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    assert names(path.parent) == ["file.txt"]


def test_a_file_is_replaced_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with written(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("before", [True, False])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path, before: bool) -> None:
    path = tmp_path / "file"
    if before:
        write_text(path, "old")
    with pytest.raises(RuntimeError, match="no more"), written(path) as file:
        file.write(b"half")
        raise RuntimeError("no more")
    assert [path.read_text() for path in tmp_path.iterdir()] == (["old"] if before else [])


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_appears_under_its_name_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "model"
    with atomic_folder(target) as new:
        (new / "a").write_text("x")
        assert not target.exists()
    assert content(target) == {"a": "x"}
    assert names(target.parent) == ["model"]


def test_a_folder_is_replaced_with_all_that_was_in_it(tmp_path: Path) -> None:
    target = tmp_path / "model"
    fill(target, "old")
    (target / "stale").write_text("of the old one")
    fill(target, "new")
    assert content(target) == whole("new")
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("before", [True, False])
def test_an_exception_leaves_the_old_folder_and_nothing_else(tmp_path: Path, before: bool) -> None:
    target = tmp_path / "model"
    if before:
        fill(target, "old")
    with pytest.raises(RuntimeError, match="no more"), atomic_folder(target) as new:
        (new / "a").write_text("half")
        raise RuntimeError("no more")
    assert names(tmp_path) == (["model"] if before else [])
    assert not before or content(target) == whole("old")


def test_what_a_crash_left_half_written_is_not_mixed_in(tmp_path: Path) -> None:
    half = tmp_path / ".model.part"
    half.mkdir()
    (half / "stale").write_text("half")
    fill(tmp_path / "model", "new")
    assert content(tmp_path / "model") == whole("new")
    assert names(tmp_path) == ["model"]


def test_an_error_between_the_two_renames_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    fill(target, "old")
    rename = Path.rename

    def fail_for_the_new(self: Path, to: Path) -> Path:
        if self.name == ".model.part":
            raise OSError(28, "No space left on device")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(OSError, match="No space"):
        fill(target, "new")
    assert content(target) == whole("old")
    assert names(tmp_path) == ["model"]


# --- a swap that was interrupted ------------------------------------------------------------------------------------


def test_settle_brings_the_previous_folder_back(tmp_path: Path) -> None:
    """The old one has left, the new one has not arrived."""
    fill(tmp_path / ".model.previous", "old")
    fill(tmp_path / ".model.part", "new")
    settle(tmp_path / "model")
    assert content(tmp_path / "model") == whole("old")
    fill(tmp_path / "model", "newer")
    assert names(tmp_path) == ["model"]


def test_settle_removes_the_previous_folder_when_the_new_one_is_there(tmp_path: Path) -> None:
    fill(tmp_path / ".model.previous", "old")
    fill(tmp_path / "model", "new")
    settle(tmp_path / "model")
    assert content(tmp_path / "model") == whole("new")
    assert names(tmp_path) == ["model"]


def test_settle_leaves_everything_else_alone(tmp_path: Path) -> None:
    settle(tmp_path / "model")
    assert names(tmp_path) == []
    fill(tmp_path / "model", "old")
    fill(tmp_path / "other", "old")
    settle(tmp_path / "model")
    assert names(tmp_path) == ["model", "other"]


def test_settle_of_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`minbert predict .` inside a model folder: the path has no name of its own."""
    fill(tmp_path / "model", "old")
    fill(tmp_path / ".model.previous", "older")
    monkeypatch.chdir(tmp_path / "model")
    settle(Path())
    assert names(tmp_path) == ["model"]
    settle(Path("/"))


@pytest.mark.parametrize("calls", range(12))
def test_after_a_power_cut_at_any_call_a_reader_finds_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Every rename, sync and removal may be the last thing that happens; nothing is cleaned up after it."""
    target = tmp_path / "model"
    fill(target, "old")
    left = calls
    dead = False

    def mortal(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **more: object) -> object:
            nonlocal left, dead
            if dead:
                return None  # what `finally` does comes too late
            left -= 1
            if left < 0:
                dead = True
                raise PowerCut
            return call(*args, **more)

        return wrapped

    with monkeypatch.context() as patch:
        for place, name in ((Path, "rename"), (atomic, "sync"), (atomic.shutil, "rmtree")):
            patch.setattr(place, name, mortal(getattr(place, name)))
        try:
            fill(target, "new")
        except PowerCut:
            assert dead
    settle(target)
    assert content(target) in (whole("old"), whole("new"))
    if not dead:
        assert content(target) == whole("new")
    fill(target, "newer")
    assert content(target) == whole("newer")
    assert names(tmp_path) == ["model"]


def test_everything_is_synced_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    seen: list[str] = []
    sync, rename = atomic.sync, Path.rename
    monkeypatch.setattr(atomic, "sync", lambda path: (seen.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (seen.append(f"to {to.name}"), rename(self, to))[1])
    fill(target, "new")
    assert seen == ["sync a", "sync inner", "sync b", "sync .model.part", "to model", f"sync {tmp_path.name}"]
