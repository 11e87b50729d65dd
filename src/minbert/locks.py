"""One process at a time in a folder.

    with held(Path("runs/mine")):
        train()

The lock is the system's own, on the folder itself: it leaves no file behind, and it is gone with the process that held it,
however that ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minbert.errors import MinbertError, shown


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder and keep others out of it; an error if another process is in it.

    Where folders cannot be locked (Windows, some network disks) nobody is kept out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MinbertError(f"{shown(folder)}: cannot be written ({error.strerror}); expected room for a run") from error
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MinbertError(
                f"{shown(folder)}: another process is training here; expected it to have ended, or another folder"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
