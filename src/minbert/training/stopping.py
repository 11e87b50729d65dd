"""Ctrl-C, kept until nothing is half done.

    with Stop() as stop:
        for batch in batches:
            step(batch)
            if stop.asked:
                save()
                break

Leaving the block raises the KeyboardInterrupt that was kept. A second Ctrl-C is not kept: it ends the run at once.

    with asked_to_end():        # what ends a command from outside is Ctrl-C too
        train()
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

ENDING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP
SIGNALS = (signal.SIGINT, *ENDING)  # the latter where somebody has made them a KeyboardInterrupt
Found = TypeVar("Found")


@contextmanager
def asked_to_end() -> Iterator[None]:
    """A KeyboardInterrupt for what a scheduler, a container or a terminal that closes sends, where it would have been the
    end. What is ignored (nohup) or has a handler stays as it is."""
    listens = threading.current_thread() is threading.main_thread()  # others may not change it
    changed = [number for number in ENDING if listens and signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


class Stop:
    """Listens in place of Python's own handler. One that a caller has set, or that ignores the signal, stays."""

    def __init__(self) -> None:
        self.asked = False
        self._waits = True
        self._own: list[signal.Signals] = []

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # others may not change it, and never hear a signal
            for number in SIGNALS:
                if signal.getsignal(number) is signal.default_int_handler:
                    self._own.append(number)
                    signal.signal(number, self._heard)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number in self._own:
            signal.signal(number, signal.default_int_handler)
        if self.asked and kind is None:
            raise KeyboardInterrupt

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again or not self._waits:
            raise KeyboardInterrupt

    def unless_asked(self, work: Callable[[], Found]) -> Found | None:
        """What some work returns that may be broken off anywhere; None if Ctrl-C came before its end."""
        if self.asked:
            return None
        try:
            self._waits = False
            found = work()
            self._waits = True
        except KeyboardInterrupt:
            self.asked = True
            return None
        finally:
            self._waits = True
        return found
