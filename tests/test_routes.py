"""The endpoints beside the answers: which words mattered, the nearest sentences, the card, the files of the page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from minbert.delivery import batching
from minbert.delivery.importance import word_effects
from minbert.delivery.predictor import Predictor
from minbert.delivery.questions import Question, Reply, answer
from minbert.delivery.search import SearchIndex, SentenceEncoder
from minbert.delivery.server import ServeSettings, create_app, serve
from minbert.delivery.service import Limits
from minbert.errors import MinbertError
from minbert.model.saved import save_model
from tests.models import PAIRS, TEXTS, THREE, make
from tests.test_server import error_of


@pytest.fixture(scope="module")
def folder(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, built, manifest = make(tiny_encoder, THREE)
    folder = tmp_path_factory.mktemp("routes") / "model"
    save_model(folder, built, tokenizer, manifest)
    return folder


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return Predictor.load(folder)


@pytest.fixture(scope="module")
def client(predictor: Predictor) -> Iterator[TestClient]:
    with TestClient(create_app(predictor, name="tiny")) as client:
        yield client


# --- which words mattered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("second", "tasks"), [(None, ["sst"]), (PAIRS[2], ["quora", "sts"])])
def test_word_importance_is_that_of_the_predictor(
    client: TestClient, predictor: Predictor, second: str | None, tasks: list[str]
) -> None:
    found = client.post("/v1/importance", json={"text": TEXTS[2], "second": second}).json()
    expected = word_effects(predictor, TEXTS[2], second)
    assert list(found["tasks"]) == list(expected) == tasks
    for name, one in expected.items():
        got = found["tasks"][name]
        assert (got["answer"], got["skipped"]) == (one.answer, 0)
        assert got["value"] == pytest.approx(one.value, abs=1e-5)
        assert [word["text"] for word in got["words"]] == [word.text for word in one.words]
        np.testing.assert_allclose(
            [word["effect"] for word in got["words"]], [word.effect for word in one.words], atol=1e-4
        )
        for word in got["words"]:
            text = second if word["side"] else TEXTS[2]
            assert text is not None
            assert text[word["start"] : word["end"]] == word["text"]


def test_importance_for_a_class_that_was_not_answered(client: TestClient, predictor: Predictor) -> None:
    body = {"text": "a nice bonus", "label": "negative"}
    found = client.post("/v1/importance", json=body).json()["tasks"]["sst"]
    assert found["answer"] == "negative"
    assert found["value"] == pytest.approx(predictor.predict(["a nice bonus"])["sst"][0]["probabilities"]["negative"])
    wrong = error_of(client.post("/v1/importance", json=body | {"label": "nice"}), 422)
    assert 'no class "nice"' in wrong["message"]
    assert (
        "reads pairs" in error_of(client.post("/v1/importance", json={"text": "a", "tasks": ["sts"]}), 422)["message"]
    )


def test_importance_keeps_to_the_limits(predictor: Predictor) -> None:
    with TestClient(create_app(predictor, limits=Limits(texts=4))) as client:
        found = client.post("/v1/importance", json={"text": "the sun came out just now"}).json()
        assert found["encodings"] == 4
        assert [len(found["tasks"]["sst"]["words"]), found["tasks"]["sst"]["skipped"]] == [3, 3]


def test_importance_of_a_long_text_leaves_room_for_others(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variants come in parts, and a question that came later is answered before the last of them."""
    app = create_app(predictor, limits=Limits(budget=2048))
    text, sizes, order = " ".join(f"nice{number}" for number in range(40)), [], []

    def note(predictor: Predictor, questions: Sequence[Question]) -> list[Reply]:
        sizes.append(max(len(question.texts) for question in questions))
        order.extend("other" if question.texts == ("bonus",) else "part" for question in questions)
        return answer(predictor, questions)

    monkeypatch.setattr(batching, "answer", note)

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as clients,
        ):
            long = asyncio.create_task(clients.post("/v1/importance", json={"text": text}))
            while not order:
                await asyncio.sleep(0.001)
            return await clients.post("/v1/predict", json={"texts": ["bonus"]}), await long

    other, long = asyncio.run(ask())
    assert (other.status_code, long.status_code) == (200, 200)
    assert long.json()["encodings"] == 41
    assert sum(sizes) >= 41
    assert max(sizes) <= 2, "a part is a sixteenth of the budget: two texts of 64 tokens"
    assert order.index("other") < len(order) - 3
    expected = word_effects(predictor, text)["sst"]
    got = [word["effect"] for word in long.json()["tasks"]["sst"]["words"]]
    np.testing.assert_allclose(got, [word.effect for word in expected.words], atol=1e-4)


def test_a_client_who_left_gets_no_more_words(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who types on aborts the question before: what is left of it is not computed."""
    asked: list[int] = []

    def note(predictor: Predictor, questions: Sequence[Question]) -> list[Reply]:
        asked.extend(len(question.texts) for question in questions)
        return answer(predictor, questions)

    monkeypatch.setattr(batching, "answer", note)
    app = create_app(predictor, limits=Limits(budget=1024))
    body = json.dumps({"text": " ".join(f"nice{number}" for number in range(40))}).encode()
    said = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return next(said, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> None:
        path = "/v1/importance"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        async with app.router.lifespan_context(app):
            await app(scope | {"headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)

    asyncio.run(ask())
    assert sent[0]["status"] == 499
    assert sum(asked) < 5


# --- the index ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    return SearchIndex.build(tmp_path_factory.mktemp("index") / "index", PAIRS, SentenceEncoder.load(folder))


def test_search_finds_what_the_index_finds(predictor: Predictor, index: SearchIndex) -> None:
    with TestClient(create_app(predictor, index=index)) as client:
        found = client.post("/v1/search", json={"texts": TEXTS[:2], "count": 3}).json()
        expected = index.query(TEXTS[:2], 3)
        assert [[(one["row"], one["text"]) for one in row] for row in found["matches"]] == [
            [(one.row, one.text) for one in row] for row in expected
        ]
        scores = [one["score"] for row in found["matches"] for one in row]
        np.testing.assert_allclose(scores, [one.score for row in expected for one in row], atol=1e-5)
        assert found["encodings"] == 2
        assert client.get("/v1/model").json()["index"] == {"sentences": 5, "kind": "exact"}
        assert "count" in error_of(client.post("/v1/search", json={"texts": ["a"], "count": 0}), 422)["message"]


def test_an_index_of_another_model_is_refused_before_anything_starts(
    folder: Path, index: SearchIndex, tiny_folder: Path, tmp_path: Path
) -> None:
    SearchIndex.build(tmp_path / "other", ["a bird sang"], SentenceEncoder.load(tiny_folder))
    with pytest.raises(MinbertError, match="another space"):
        serve(ServeSettings(folder, index=tmp_path / "other"))
    with pytest.raises(MinbertError, match="minbert search build"):
        serve(ServeSettings(folder, index=tmp_path / "none"))


def test_without_an_index_there_is_nothing_to_search(client: TestClient) -> None:
    found = error_of(client.post("/v1/search", json={"texts": ["a"]}), 404)
    assert (found["type"], "--index" in found["message"]) == ("not_found", True)


# --- the card and the page ------------------------------------------------------------------------------------------


def test_the_card_says_what_the_page_adapts_to(client: TestClient, predictor: Predictor) -> None:
    found = client.get("/v1/model").json()
    tasks = {task["name"]: task for task in found["tasks"]}
    assert {name: task["reads"] for name, task in tasks.items()} == {"sst": "text", "quora": "pair", "sts": "pair"}
    assert tasks["sst"]["classes"] == list(predictor.tasks["sst"].classes)
    assert (tasks["sts"]["classes"], tasks["sts"]["low"], tasks["sts"]["high"]) == ([], 0.0, 5.0)
    assert (found["name"], found["max_tokens"], found["embeddings"], found["index"]) == ("tiny", 64, True, None)
    assert found["allowed"] == {"texts": 256, "body_bytes": 1 << 20, "words": 64}
    assert found["scores"] == []
    assert [row["task"] for row in found["data"]] == ["sst", "quora", "sts"]
    assert any("64 tokens" in line for line in found["limits"])


def test_the_cards_scores_are_the_folders(predictor: Predictor) -> None:
    dev = {"rows": 12, "metric": "accuracy", "metrics": {"accuracy": {"value": 0.5, "low": 0.25, "high": None}}}
    scored = Predictor(predictor.model, predictor.tokenizer, replace(predictor.manifest, scores={"dev": {"sst": dev}}))
    with TestClient(create_app(scored)) as client:
        assert client.get("/v1/model").json()["scores"] == [
            {"task": "sst", "metric": "accuracy", "value": 0.5, "low": 0.25, "high": None, "rows": 12}
        ]


def test_the_page_may_load_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/docs"):
        response = client.get(path)
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        names = re.findall(r'(?:src|href)="([^"#]+)"', response.text)
        assert any(name.endswith(".js") for name in names)
        for name in names:
            assert client.get(name).status_code == 200, name
        again = client.get(path, headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
