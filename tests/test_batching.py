"""The queue: everything that is asked is answered, alone or together, with the same words."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minbert.delivery import batching
from minbert.delivery.batching import Batcher, BatchReport, ClosedError, QueueFullError
from minbert.delivery.predictor import Predictor
from minbert.delivery.questions import Question, Reply, answer, choose_tasks
from minbert.errors import MinbertError
from tests.models import PAIRS, TEXTS, make

TASKS: dict[str, dict[str, Any]] = {
    "sst": {},
    "quora": {"head": "linear"},
    "sts": {"head": "cosine"},
    "lower": {"like": "sst", "normalise": True},
}
BOTH = tuple(zip(TEXTS, PAIRS, strict=True))


@pytest.fixture(scope="module")
def predictor(tiny_encoder: Path) -> Predictor:
    tokenizer, built, manifest = make(tiny_encoder, TASKS)
    return Predictor(built, tokenizer, manifest)


class Slow:
    """Holds up every batch until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.batches = threading.Event(), []
        monkeypatch.setattr(batching, "answer", self)

    def __call__(self, predictor: Predictor, questions: Sequence[Question]) -> list[Reply]:
        self.batches.append(len(questions))
        assert self.go.wait(30)
        return answer(predictor, questions)

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.batches) < count and time.monotonic() < deadline:
            time.sleep(0.001)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def test_answers_are_the_predictors_own(predictor: Predictor) -> None:
    asked = Question(tuple(TEXTS), BOTH, ("sst", "quora", "sts"), embed=True)
    [reply] = answer(predictor, [asked])
    expected = predictor.predict(TEXTS, tasks=["sst"]) | predictor.predict(TEXTS, PAIRS, tasks=["quora", "sts"])
    assert reply.answers == expected
    np.testing.assert_allclose(reply.vectors, predictor.embed(TEXTS), atol=1e-6)


def test_a_task_that_learnt_from_normalised_texts_is_asked_with_them(predictor: Predictor) -> None:
    [reply] = answer(predictor, [Question(("Isn't it Nice?",), tasks=("lower",))])
    assert reply.answers["lower"] == predictor.predict(["isn 't it nice ?"], tasks=["lower"])["lower"]


def test_the_price_of_a_question_is_its_distinct_inputs(predictor: Predictor) -> None:
    price = {
        Question(("a", "b", "a"), tasks=("sst",)): 2,
        Question(("a", "b"), tasks=("sst",), embed=True): 2,  # the same inputs
        Question(pairs=(("a", "b"), ("b", "a")), tasks=("sts",)): 2,  # apart
        Question(pairs=(("a", "b"), ("b", "a")), tasks=("quora",)): 2,  # as one input, in either order
        Question(("a",), (("a", "b"),), ("sst", "sts", "quora")): 3,
    }
    for question, expected in price.items():
        [reply] = answer(predictor, [question])
        assert reply.encodings == expected, question


def test_a_text_that_several_callers_ask_about_is_encoded_once(predictor: Predictor) -> None:
    reports: list[BatchReport] = []
    questions = [Question(("a nice bonus",), tasks=("sst",)), Question(("a nice bonus", "nice"), embed=True)] * 3
    with Batcher(predictor, told=reports.append) as batcher:
        first = batcher.submit(Question(tuple(TEXTS), tasks=("sst",)))  # while it runs, the others gather
        for future in [batcher.submit(question) for question in questions]:
            future.result(30)
        first.result(30)
    assert sum(report.encodings for report in reports) <= len(TEXTS) + 2 * (len(reports) - 1)


def test_what_was_cut_is_told(predictor: Predictor) -> None:
    long = "nice " * 100
    [reply] = answer(predictor, [Question(("nice", long), ((long, "nice"), ("nice", "nice")), ("sst", "quora"))])
    assert (reply.cut_texts, reply.cut_pairs) == ((1,), (0,))
    [reply] = answer(predictor, [Question(("nice " * 62,), tasks=("sst",))])  # with two special tokens exactly 64
    assert reply.cut_texts == ()
    assert reply.tokens == 64


def test_many_callers_each_get_their_own_answers(predictor: Predictor) -> None:
    rng = np.random.default_rng(0)
    words = " ".join(TEXTS + PAIRS).split()

    def ask(number: int) -> tuple[Question, Reply]:
        texts = tuple(" ".join(words[i] for i in rows) for rows in drawn[number])
        question = Question(texts, tuple(zip(texts, texts[::-1], strict=True)), ("sst", "quora", "sts"), embed=True)
        return question, batcher.submit(question).result(60)

    drawn = [
        [rng.integers(len(words), size=rng.integers(1, 12)) for _ in range(number % 3 + 1)] for number in range(200)
    ]
    with Batcher(predictor, budget=200) as batcher, ThreadPoolExecutor(32) as callers:
        found = list(callers.map(ask, range(200)))
    for question, reply in found:
        [alone] = answer(predictor, [question])
        np.testing.assert_allclose(reply.vectors, alone.vectors, atol=1e-4)
        for task, rows in alone.answers.items():
            for one, other in zip(reply.answers[task], rows, strict=True):
                assert one.keys() == other.keys()
                values = (one.get("probabilities") or one), (other.get("probabilities") or other)
                assert list(values[0].values()) == pytest.approx(list(values[1].values()), abs=1e-4)


def test_what_waits_is_answered_together_up_to_the_budget(predictor: Predictor, slow: Slow) -> None:
    question = Question(("nice",), tasks=("sst",))  # 4 tokens, by the estimate
    with Batcher(predictor, budget=12) as batcher:
        futures = [batcher.submit(question)]
        slow.wait_for(1)
        futures += [batcher.submit(question) for _ in range(5)]
        slow.go.set()
        for future in futures:
            future.result(30)
    assert slow.batches == [1, 3, 2]


def test_without_batching_one_question_comes_after_the_other(predictor: Predictor, slow: Slow) -> None:
    with Batcher(predictor, together=False) as batcher:
        futures = [batcher.submit(Question(("nice",), tasks=("sst",))) for _ in range(4)]
        slow.go.set()
        for future in futures:
            future.result(30)
    assert slow.batches == [1, 1, 1, 1]


def test_a_full_queue_refuses_and_says_when_to_come_again(predictor: Predictor, slow: Slow) -> None:
    with Batcher(predictor, limit=3) as batcher:
        running = batcher.submit(Question(("one",), tasks=("sst",)))
        slow.wait_for(1)
        waiting = [batcher.submit(Question((f"{number}",), tasks=("sst",))) for number in range(3)]
        with pytest.raises(QueueFullError, match="3 texts wait") as caught:
            batcher.submit(Question(("another",), tasks=("sst",)))
        assert caught.value.retry_after >= 1
        slow.go.set()
        assert all(future.result(30).answers["sst"] for future in [running, *waiting]), "what was accepted is answered"


def test_closing_answers_what_was_accepted_and_nothing_more(predictor: Predictor, slow: Slow) -> None:
    batcher = Batcher(predictor, together=False).__enter__()
    futures = [batcher.submit(Question((f"{number}",), tasks=("sst",))) for number in range(4)]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    while batcher.alive:
        time.sleep(0.001)
    with pytest.raises(ClosedError):
        batcher.submit(Question(("late",), tasks=("sst",)))
    assert not any(future.done() for future in futures)
    slow.go.set()
    closing.join(30)
    assert all(future.done() and future.result().answers["sst"] for future in futures)


def test_a_question_that_is_taken_back_is_not_answered(predictor: Predictor, slow: Slow) -> None:
    with Batcher(predictor, limit=2) as batcher:
        running = batcher.submit(Question(("one",), tasks=("sst",)))
        slow.wait_for(1)
        waiting = batcher.submit(Question(("two",), tasks=("sst",)))
        assert waiting.cancel()
        slow.go.set()
        running.result(30)
    assert slow.batches == [1]
    assert batcher.waiting == 0


def test_a_question_that_fails_spoils_no_other(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(predictor: Predictor, questions: Sequence[Question]) -> list[Reply]:
        if any("bad" in question.texts for question in questions):
            raise ValueError("bad")
        return answer(predictor, questions)

    monkeypatch.setattr(batching, "answer", fail)
    with Batcher(predictor) as batcher:
        futures = [batcher.submit(Question((text,), tasks=("sst",))) for text in ("good", "bad", "fine", "bad")]
        errors = [type(future.exception(30)) for future in futures]
    assert errors == [type(None), ValueError, type(None), ValueError]


def test_tasks_are_those_that_read_what_is_there(predictor: Predictor) -> None:
    assert choose_tasks(predictor, None, texts=True, pairs=False) == ("sst", "lower")
    assert choose_tasks(predictor, None, texts=False, pairs=True) == ("quora", "sts")
    assert choose_tasks(predictor, ["sts", "sts", "sst"], texts=True, pairs=True) == ("sts", "sst")
    for wanted, texts, pairs, message in (
        (["sts"], True, False, 'the task "sts" reads pairs; found texts'),
        (["sst"], True, True, "no task that reads pairs was asked for"),
        (["stst"], True, True, 'did you mean "sts"'),
    ):
        with pytest.raises(MinbertError, match=message):
            choose_tasks(predictor, wanted, texts=texts, pairs=pairs)
