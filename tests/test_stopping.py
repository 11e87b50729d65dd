"""Ctrl-C is kept until the block ends, a second one is not, and nobody else's handler is touched."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from minbert.training.stopping import ENDING, Stop, asked_to_end

pytestmark = pytest.mark.usefixtures("ctrl_c_is_heard")


def press(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


def test_it_is_kept_until_the_block_ends() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        assert not stop.asked
        press()
        done.append(stop.asked)
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_it_nothing_happens() -> None:
    with Stop() as stop:
        assert stop.unless_asked(lambda: 3) == 3
    with pytest.raises(KeyboardInterrupt):
        press()


def test_the_second_is_not_kept() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Stop():
        press()
        done.append(1)
        press()
        done.append(2)
    assert done == [1]


def test_an_error_is_not_hidden_by_it() -> None:
    with pytest.raises(ValueError, match="wrong"), Stop():
        press()
        raise ValueError("wrong")


def test_work_that_may_be_broken_off() -> None:
    done = []

    def work() -> int:
        press()
        done.append("the rest of it")
        return 3

    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        assert stop.unless_asked(work) is None
        assert stop.asked
        assert stop.unless_asked(work) is None, "not even begun"
        done.append("what follows")
    assert done == ["what follows"]


def test_after_such_work_it_is_kept_again() -> None:
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        assert stop.unless_asked(lambda: 3) == 3
        press()
        assert stop.asked
    with Stop() as stop, pytest.raises(ValueError, match="wrong"):
        stop.unless_asked(lambda: int("wrong"))
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        press()
        assert stop.asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_other_handlers_stay(number: signal.Signals) -> None:
    heard: list[int] = []

    def own(number: int, _frame: Any) -> None:
        heard.append(number)

    before = signal.getsignal(number)
    try:
        for handler in (own, signal.SIG_IGN):
            signal.signal(number, handler)
            with Stop() as stop:
                press(number)
                assert not stop.asked
            assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert heard == [number]


def test_sigterm_that_was_made_an_interrupt_is_kept_too() -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Stop() as stop:
            press(signal.SIGTERM)
            assert stop.asked
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", ENDING)
def test_what_ends_a_command_from_outside_is_kept_too(number: signal.Signals) -> None:
    with asked_to_end():
        with pytest.raises(KeyboardInterrupt), Stop() as stop:
            press(number)
            assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            press(number)
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", ENDING)
def test_what_is_ignored_stays_ignored(number: signal.Signals) -> None:
    """As nohup leaves SIGHUP."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with asked_to_end():
            press(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_in_another_thread_it_is_nothing() -> None:
    """Which no signal reaches, and which may not set a handler."""
    found: list[Any] = []

    def work() -> None:
        with Stop() as stop:
            found.append((stop.unless_asked(lambda: 3), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(3, signal.default_int_handler)]
