"""What the endpoints share: a predictor, its queue, its limits and its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from minbert.delivery.batching import Batcher, BatchReport
from minbert.delivery.importance import LIMIT, Importance, Occlusion
from minbert.delivery.messages import MAX_TEXTS
from minbert.delivery.metrics import SECONDS, SIZES, Counter, Gauge, Histogram, Metric
from minbert.delivery.predictor import Predictor
from minbert.delivery.questions import Question, Reply
from minbert.errors import MinbertError

SHARES = 16
"""A question of many variants goes into the queue in parts of this share of a batch, one after the other: whoever asks
meanwhile waits for one part, not for all."""


@dataclass(frozen=True)
class Limits:
    """What a client may ask for, and how it is batched."""

    body_bytes: int = 1 << 20
    texts: int = MAX_TEXTS
    """Of a request, pairs counted too."""
    max_tokens: int = 0
    """Longer texts are cut, and the answer says so; 0: what the model was trained with."""
    queue: int = 2048
    """Texts and pairs that may wait; more is answered with 503."""
    timeout: float = 30.0
    """Seconds from the first byte of a request to its answer."""
    budget: int = 4096
    """Tokens of a batch, about."""
    wait: float = 0.002
    """Seconds that a batch may wait for more, right after the one before it; 0 after a pause."""
    batching: bool = True

    def __post_init__(self) -> None:
        for name, least in (("body_bytes", 1), ("texts", 1), ("queue", 1), ("budget", 1), ("max_tokens", 0)):
            if getattr(self, name) < least:
                raise MinbertError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if self.texts > MAX_TEXTS:
            raise MinbertError(f"texts is {self.texts}; expected at most {MAX_TEXTS}")
        if not self.timeout > 0 or not self.wait >= 0:
            raise MinbertError(f"timeout is {self.timeout} and wait {self.wait}; expected more than 0, and 0 or more")


class Service:
    """A predictor, its queue and its numbers: what the endpoints share."""

    def __init__(self, predictor: Predictor, limits: Limits, name: str) -> None:
        self.predictor, self.limits, self.name = predictor, limits, name
        if limits.max_tokens:
            predictor.max_tokens = min(predictor.max_tokens, limits.max_tokens)
        self.draining = False
        self.requests, self.encodings, self.tokens = Counter(), Counter(), Counter()
        self.seconds, self.batches, self.batch_seconds = Histogram(SECONDS), Histogram(SIZES), Histogram(SECONDS)
        self.batcher = Batcher(
            predictor,
            budget=limits.budget,
            wait=limits.wait,
            limit=limits.queue,
            together=limits.batching,
            told=self._note_batch,
        )
        self.metrics: dict[str, tuple[str, Metric]] = {
            "minbert_requests_total": ("Requests by path and status.", self.requests),
            "minbert_request_seconds": ("From the first byte to the answer.", self.seconds),
            "minbert_batch_requests": ("Requests that were answered together.", self.batches),
            "minbert_batch_seconds": ("What a batch took.", self.batch_seconds),
            "minbert_encodings_total": ("Texts and pairs that the encoder read.", self.encodings),
            "minbert_tokens_total": ("Tokens of answered requests.", self.tokens),
            "minbert_queue": ("Texts and pairs that wait.", Gauge(lambda: self.batcher.waiting)),
        }

    @property
    def state(self) -> str:
        return "draining" if self.draining else "ok" if self.batcher.alive else "failed"

    def note_request(self, path: str, status: int, seconds: float) -> None:
        self.requests.add(path=path, status=str(status))
        if path.startswith("/v1/"):
            self.seconds.observe(seconds)

    def _note_batch(self, report: BatchReport) -> None:
        self.batches.observe(report.questions)
        self.batch_seconds.observe(report.seconds)
        self.encodings.add(report.encodings)

    async def ask(self, question: Question, request: Request) -> Reply:
        """A reply, waited for without holding anyone up. Who gives up waiting takes the question back."""
        count = len(question.texts) + len(question.pairs)
        request.state.note["texts"] = count
        if count > self.limits.texts:
            raise MinbertError(f"{count} texts and pairs; expected at most {self.limits.texts}")
        reply = await self.batcher.ask(question)
        request.state.note |= {"encodings": reply.encodings, "tokens": reply.tokens}
        self.tokens.add(reply.tokens)
        return reply

    async def vectors(self, texts: Sequence[str], request: Request) -> tuple[Reply, NDArray[np.float32]]:
        """The encoder's vector of each text, (texts, width)."""
        reply = await self.ask(Question(tuple(texts), embed=True), request)
        if reply.vectors is None:
            raise RuntimeError("a question for vectors was answered without")
        return reply, reply.vectors

    @property
    def most_words(self) -> int:
        """Words of a question that are left out in turn: with the whole they are no more texts than a request may have."""
        return max(1, min(LIMIT, self.limits.texts - 1))

    async def explain(
        self, occlusion: Occlusion, tasks: tuple[str, ...], label: str, request: Request
    ) -> tuple[Reply, dict[str, Importance]]:
        """Which words mattered, and what it cost. Nobody is asked for what a client who left would have got."""
        request.state.note["texts"] = len(occlusion.words) + 1
        rows: dict[str, list[dict[str, Any]]] = {task: [] for task in tasks}
        cut: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        encodings = tokens = 0
        for number, part in enumerate(self._parts(occlusion, tasks)):
            if number and await request.is_disconnected():
                raise HTTPException(499, "the client left")
            reply = await self.batcher.ask(part)
            for task, found in reply.answers.items():
                rows[task] += found
            if not number:  # whose first row is the whole text
                cut = tuple(i for i in reply.cut_texts if i == 0), tuple(i for i in reply.cut_pairs if i == 0)
            encodings, tokens = encodings + reply.encodings, tokens + reply.tokens
        request.state.note |= {"encodings": encodings, "tokens": tokens}
        self.tokens.add(tokens)
        effects = {task: occlusion.effects(self.predictor.tasks[task], rows[task], label) for task in tasks}
        return Reply({}, None, encodings, tokens, *cut), effects

    def _parts(self, occlusion: Occlusion, tasks: tuple[str, ...]) -> Iterator[Question]:
        """The variants as questions, each of a share of a batch, or of one variant."""
        part: list[tuple[str, ...]] = []
        spent = 0
        for row in zip(*occlusion.columns(), strict=True):
            price = self.batcher.price(_question([row], tasks))
            if part and spent + price > self.limits.budget // SHARES:
                yield _question(part, tasks)
                part, spent = [], 0
            part.append(row)
            spent += price
        yield _question(part, tasks)

    def cost(self, reply: Reply) -> dict[str, Any]:
        """What every answer says beside the answer."""
        found = {"model": self.name, "encodings": reply.encodings, "tokens": reply.tokens}
        if reply.cut_texts or reply.cut_pairs:
            most = self.predictor.max_tokens
            found["truncated"] = {"texts": reply.cut_texts, "pairs": reply.cut_pairs, "max_tokens": most}
        return found


def _question(rows: Sequence[tuple[str, ...]], tasks: tuple[str, ...]) -> Question:
    """Of rows of one text, or of two."""
    if len(rows[0]) == 1:
        return Question(tuple(row[0] for row in rows), tasks=tasks)
    return Question(pairs=tuple((row[0], row[1]) for row in rows), tasks=tasks)
