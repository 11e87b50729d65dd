"""Files and folders that appear whole or not at all.

    with atomic_folder(Path("model")) as new:
        (new / "weights").write_bytes(...)

A crash at any moment leaves the old content or the new one, never a mixture. Readers of a folder that is replaced call
`settle` first, which finishes or undoes a swap that a crash interrupted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    with written(path) as file:
        file.write(text.encode())


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, under a temporary name; when the block ends without an error it takes the place of `path`."""
    partial = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill; when the block ends without an error it takes the place of `path`."""
    settle(path)
    partial = path.with_name(f".{path.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in sorted(partial.rglob("*")):
            sync(file)
        sync(partial)
        if path.exists():
            path.rename(_previous(path))
        partial.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        settle(path)


def settle(path: Path) -> None:
    """Bring back the previous folder if an end came between its leaving and the new one's arrival; else remove it."""
    previous = _previous(path)
    if previous.exists() and not path.exists():
        previous.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


def sync(path: Path) -> None:
    """Ask the operating system to put a file, or a folder's list of names, on the disk now; Windows takes no requests."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _previous(path: Path) -> Path:
    place = path.absolute()  # "." has no name of its own
    return place.parent / f".{place.name}.previous"
