"""Many callers, one worker thread: what waits is answered together, up to a token budget.

    with Batcher(predictor) as batcher:
        reply = batcher.submit(Question(texts=("Good.",), tasks=("sst",))).result()
        reply = await batcher.ask(Question(texts=("Good.",), tasks=("sst",)))              # on an event loop

While a batch runs, the next one gathers by itself. A caller who comes while nothing runs is answered at once; right after
a batch, whose callers are likely to ask again, the worker waits for up to `wait` seconds for more.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from minbert.delivery.predictor import Predictor
from minbert.delivery.questions import Question, Reply, answer
from minbert.errors import MinbertError


class QueueFullError(MinbertError):
    """Too much waits already."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} texts wait for an answer already; try again in {retry_after} s")
        self.retry_after = retry_after


class ClosedError(MinbertError):
    """Nothing more is accepted."""


@dataclass(frozen=True)
class BatchReport:
    """How a batch went, for the metrics."""

    questions: int
    encodings: int
    tokens: int
    seconds: float


@dataclass(eq=False)
class _Job:
    question: Question
    inputs: set[Any]
    tokens: int
    """An estimate, before anything is tokenized."""
    arrived: float
    future: Future[Reply] | asyncio.Future[Reply] = field(default_factory=Future)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits; who does cannot take the question back any more, or is not heard."""
        if isinstance(self.future, asyncio.Future):
            return not self.future.cancelled()
        return self.future.set_running_or_notify_cancel()


Outcome = Reply | Exception


class Batcher:
    """A bounded queue and the thread that empties it.

    Args:
        predictor: answers.
        budget: tokens of a batch, about; a question that has more is a batch of its own.
        wait: seconds that a batch may wait for more after the one before it.
        limit: texts and pairs that may wait; a question is refused if it would make them more, unless none waits.
        together: False answers one question after the other.
        told: is told of every batch, in the worker's thread.
    """

    def __init__(
        self,
        predictor: Predictor,
        *,
        budget: int = 4096,
        wait: float = 0.002,
        limit: int = 2048,
        together: bool = True,
        told: Callable[[BatchReport], None] | None = None,
    ) -> None:
        self.predictor, self.budget, self.wait, self.limit, self.together = predictor, budget, wait, limit, together
        self._told = told
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._waiting = 0  # texts and pairs of the jobs in the queue
        self._closed = False
        self._rate = 0.0  # encodings a second, of the last batches
        self._ended = -math.inf  # when the last batch did
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Batcher:
        """Start the thread; after `close` again."""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="minbert-batches", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Texts and pairs in the queue."""
        return self._waiting

    @property
    def alive(self) -> bool:
        """Whether questions are answered: the thread runs and has not been told to end."""
        return self._thread is not None and self._thread.is_alive() and not self._closed

    def submit(self, question: Question) -> Future[Reply]:
        """The reply to come. A future that is cancelled while it waits costs nothing.

        Raises:
            QueueFullError: too much waits already.
            ClosedError: `close` was called.
        """
        future: Future[Reply] = Future()
        self._queue(question, future)
        return future

    async def ask(self, question: Question) -> Reply:
        """The same on an event loop, which is told of all replies of a batch at once: that wakes it once, and waking it
        costs more than the reply."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._queue(question, future)
        return await future

    def _queue(self, question: Question, future: Future[Reply] | asyncio.Future[Reply]) -> None:
        inputs = question.inputs(self.predictor)
        job = _Job(question, inputs, self._estimate(inputs), time.perf_counter(), future)
        with self._changed:
            if self._closed:
                raise ClosedError("the server is shutting down; expected a request before that")
            if self._waiting and self._waiting + len(inputs) > self.limit:
                raise QueueFullError(self._waiting, self._retry_after())
            self._jobs.append(job)
            self._waiting += len(inputs)
            self._changed.notify()

    def price(self, question: Question) -> int:
        """About how many tokens of a batch's budget a question takes."""
        return self._estimate(question.inputs(self.predictor))

    def close(self) -> None:
        """Accept nothing more, answer what was accepted, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _estimate(self, inputs: set[Any]) -> int:
        """About four letters a token; what is longer than the encoder reads is cut."""
        most = self.predictor.max_tokens
        return sum(min(most, 3 + len(row if isinstance(row, str) else "".join(map(str, row))) // 4) for row in inputs)

    def _retry_after(self) -> int:
        return max(1, min(60, math.ceil(self._waiting / self._rate))) if self._rate else 1

    # --- the worker -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while jobs := self._next():
            started = time.perf_counter()
            self._answer(jobs)
            self._ended = time.perf_counter()
            seconds, encodings = self._ended - started, len(set().union(*(job.inputs for job in jobs)))
            rate = encodings / max(seconds, 1e-6)
            self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
            if self._told is not None:
                self._told(BatchReport(len(jobs), encodings, sum(job.tokens for job in jobs), seconds))

    def _next(self) -> list[_Job]:
        """What the next batch is made of, oldest first; empty when all is done and nothing more comes."""
        with self._changed:
            while True:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                self._gather()
                taken: list[_Job] = []
                tokens = 0
                while self._jobs and (not taken or (self.together and tokens + self._jobs[0].tokens <= self.budget)):
                    job = self._jobs.popleft()
                    self._waiting -= len(job.inputs)
                    if job.is_wanted:
                        taken.append(job)
                        tokens += job.tokens
                if taken or (self._closed and not self._jobs):
                    return taken

    def _gather(self) -> None:
        """Right after a batch, wait a little for its callers to ask again."""
        deadline = self._ended + self.wait
        while self.together and not self._closed and sum(job.tokens for job in self._jobs) < self.budget:
            left = deadline - time.perf_counter()
            if left <= 0 or not self._changed.wait(left):
                return

    def _answer(self, jobs: list[_Job]) -> None:
        outcomes = self._outcomes(jobs)
        loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Reply], Outcome]]] = {}
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(job.future, asyncio.Future):
                loops.setdefault(job.future.get_loop(), []).append((job.future, outcome))
            else:
                _settle(job.future, outcome)
        for loop, settled in loops.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle_all, settled)

    def _outcomes(self, jobs: list[_Job]) -> Sequence[Outcome]:
        """A reply for each, or what was wrong."""
        try:
            return answer(self.predictor, [job.question for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                return [error]
            return [
                outcome for job in jobs for outcome in self._outcomes([job])
            ]  # one must not spoil the others' answers


def _settle_all(settled: Sequence[tuple[asyncio.Future[Reply], Outcome]]) -> None:
    for future, outcome in settled:
        if not future.done():
            _settle(future, outcome)


def _settle(future: Future[Reply] | asyncio.Future[Reply], outcome: Outcome) -> None:
    with suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
