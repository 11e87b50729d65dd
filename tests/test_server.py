"""The server: its answers are the predictor's, its refusals say why, and its log holds no texts."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from minbert.delivery import batching, edge
from minbert.delivery.edge import JsonLines, is_known, read_keys
from minbert.delivery.predictor import Predictor
from minbert.delivery.questions import Question, Reply, answer
from minbert.delivery.search import SearchIndex, SentenceEncoder
from minbert.delivery.server import ServeSettings, app_of_environment, create_app
from minbert.delivery.service import Limits
from minbert.errors import MinbertError
from minbert.model.saved import save_model
from tests.models import PAIRS, TEXTS, THREE, make


@pytest.fixture(scope="module")
def predictor(tiny_encoder: Path) -> Predictor:
    tokenizer, built, manifest = make(tiny_encoder, THREE)
    return Predictor(built, tokenizer, manifest)


@pytest.fixture(scope="module")
def client(predictor: Predictor) -> Iterator[TestClient]:
    with TestClient(create_app(predictor, name="tiny")) as client:
        yield client


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No batch ends before the event is set."""
    go = threading.Event()

    def wait(predictor: Predictor, questions: Sequence[Question]) -> list[Reply]:
        go.wait(30)
        return answer(predictor, questions)

    monkeypatch.setattr(batching, "answer", wait)
    try:
        yield go
    finally:
        go.set()


def error_of(response: httpx.Response, code: int) -> dict[str, Any]:
    assert response.status_code == code, response.text
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "request_id"}
    assert found["request_id"] == response.headers["x-request-id"]
    return found


# --- answers --------------------------------------------------------------------------------------------------------


def test_predictions_are_the_predictors(client: TestClient, predictor: Predictor) -> None:
    pairs = list(zip(TEXTS, PAIRS, strict=True))
    found = client.post("/v1/predict", json={"texts": TEXTS, "pairs": pairs}).json()
    singles, both = predictor.predict(TEXTS), predictor.predict(TEXTS, PAIRS, tasks=["quora", "sts"])
    for number in range(len(TEXTS)):
        assert found["texts"][number]["sst"]["probabilities"] == pytest.approx(singles["sst"][number]["probabilities"])
        assert found["pairs"][number]["quora"]["label"] == both["quora"][number]["label"]
        assert found["pairs"][number]["sts"]["score"] == pytest.approx(both["sts"][number]["score"], abs=1e-5)
    assert found["model"] == "tiny"
    assert "truncated" not in found


def test_only_the_tasks_asked_for(client: TestClient) -> None:
    found = client.post("/v1/predict", json={"pairs": [["a", "b"]], "tasks": ["sts"]}).json()
    assert [list(row) for row in found["pairs"]] == [["sts"]]
    assert found["texts"] == []


def test_a_long_text_is_cut_and_that_is_said(client: TestClient) -> None:
    found = client.post("/v1/predict", json={"texts": ["nice", "nice " * 100]}).json()
    assert found["truncated"] == {"texts": [1], "pairs": [], "max_tokens": 64}
    assert found["tokens"] == 3 + 64


def test_embeddings_and_their_lengths(client: TestClient, predictor: Predictor) -> None:
    found = client.post("/v1/embed", json={"texts": TEXTS}).json()
    np.testing.assert_allclose(found["embeddings"], predictor.embed(TEXTS), atol=1e-5)
    assert found["width"] == 32
    unit = client.post("/v1/embed", json={"texts": TEXTS, "normalize": True}).json()["embeddings"]
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0, atol=1e-5)


def test_similarities_are_cosines(client: TestClient, predictor: Predictor) -> None:
    vectors = predictor.embed([*TEXTS, *PAIRS])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    with_each_other = client.post("/v1/similarity", json={"texts": TEXTS}).json()
    np.testing.assert_allclose(with_each_other["matrix"], unit[:5] @ unit[:5].T, atol=1e-5)
    assert with_each_other["encodings"] == 5
    with_others = client.post("/v1/similarity", json={"texts": TEXTS[:2], "others": PAIRS}).json()["matrix"]
    np.testing.assert_allclose(with_others, unit[:2] @ unit[5:].T, atol=1e-5)


def test_embeddings_as_openai_has_them(client: TestClient, predictor: Predictor) -> None:
    found = client.post("/v1/embeddings", json={"input": TEXTS, "model": "any"}).json()
    vectors = predictor.embed(TEXTS)
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert [row["index"] for row in found["data"]] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose([row["embedding"] for row in found["data"]], expected, atol=1e-5)
    assert found["usage"]["prompt_tokens"] == predictor.tokenizer.count(TEXTS).sum()
    coded = client.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    vector = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected[0], atol=1e-5)
    wrong = client.post("/v1/embeddings", json={"input": "a", "dimensions": 7})
    assert "7" in error_of(wrong, 422)["message"]


def test_many_clients_each_get_their_own_answers(predictor: Predictor) -> None:
    rng = np.random.default_rng(1)
    words = " ".join(TEXTS + PAIRS).split()
    texts = [" ".join(rng.choice(words, rng.integers(1, 15))) for _ in range(300)]
    alone = [predictor.predict([text])["sst"][0]["probabilities"] for text in texts]
    app = create_app(predictor)

    async def ask_all() -> list[httpx.Response]:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as clients:
                return await asyncio.gather(*(clients.post("/v1/predict", json={"texts": [text]}) for text in texts))

    for response, expected in zip(asyncio.run(ask_all()), alone, strict=True):
        assert response.json()["texts"][0]["sst"]["probabilities"] == pytest.approx(expected, abs=1e-4)
    sizes = app.state.service.batches
    assert sizes._sum == 300
    assert sum(sizes._counts) < 150, "requests were batched"


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({}, 422, "no texts and no pairs"),
        ({"texts": ["a"], "tasks": ["stt"]}, 422, 'did you mean "sts"'),
        ({"texts": ["a"], "tasks": ["sts"]}, 422, "reads pairs"),
        ({"texts": [""]}, 422, "body.texts.0"),
        ({"texts": "a"}, 422, "body.texts"),
        ({"texts": ["a"] * 257}, 422, "257"),
        ({"text": ["a"]}, 422, "body.text"),
        ({"pairs": [["a"]]}, 422, "body.pairs.0"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(client: TestClient, body: Any, code: int, message: str) -> None:
    found = error_of(client.post("/v1/predict", json=body), code)
    assert message in found["message"]
    assert found["type"] == "invalid_request"


def test_no_json_no_such_path_no_such_method(client: TestClient) -> None:
    typed = {"content-type": "application/json"}
    assert "no JSON" in error_of(client.post("/v1/predict", content="{", headers=typed), 400)["message"]
    assert error_of(client.post("/v2/predict", json={}), 404)["type"] == "not_found"
    assert client.get("/v1/predict").headers["allow"] == "POST"
    error_of(client.get("/v1/predict"), 405)
    error_of(client.get("/page/%2e%2e%2fserver.py"), 404)
    error_of(client.get("/page/none.js"), 404)


def test_limits_of_bodies_and_texts(predictor: Predictor) -> None:
    with TestClient(create_app(predictor, limits=Limits(body_bytes=200, texts=2))) as client:
        assert "200" in error_of(client.post("/v1/predict", json={"texts": ["a" * 200]}), 413)["message"]

        def chunks() -> Iterator[bytes]:  # no length is announced
            yield b'{"texts": ["'
            yield b"a" * 300
            yield b'"]}'

        assert error_of(client.post("/v1/predict", content=chunks()), 413)["type"] == "too_large"
        found = error_of(client.post("/v1/predict", json={"texts": ["a", "b"], "pairs": [["a", "b"]]}), 422)
        assert "3 texts and pairs; expected at most 2" in found["message"]


def test_a_full_queue_is_503_with_a_time_to_come_again(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(predictor, limits=Limits(queue=2))

    async def ask() -> list[httpx.Response]:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as clients,
        ):
            with held_up(monkeypatch) as go:
                some = [asyncio.create_task(clients.post("/v1/predict", json={"texts": [str(i)]})) for i in range(6)]
                done, _ = await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED, timeout=20)
                assert done
                go.set()
                return await asyncio.gather(*some)

    answers = asyncio.run(ask())
    codes = [response.status_code for response in answers]
    assert set(codes) == {200, 503}
    assert codes.count(200) >= 2
    refused = answers[codes.index(503)]
    assert int(refused.headers["retry-after"]) >= 1
    assert error_of(refused, 503)["type"] == "overloaded"


def test_what_takes_too_long_is_504(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    with TestClient(create_app(predictor, limits=Limits(timeout=0.2))) as client:
        with held_up(monkeypatch):
            assert error_of(client.post("/v1/predict", json={"texts": ["a"]}), 504)["type"] == "timeout"
        assert client.post("/v1/predict", json={"texts": ["a"]}).status_code == 200


def test_a_mistake_of_the_server_says_nothing_of_the_texts(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Predictor, questions: Sequence[Question]) -> list[Reply]:
        raise RuntimeError(f"cannot answer {questions[0].texts}")

    monkeypatch.setattr(batching, "answer", fail)
    caplog.set_level(logging.INFO, edge.log.name)
    with TestClient(create_app(predictor)) as client:
        response = client.post("/v1/predict", json={"texts": ["a secret"]})
    assert "secret" not in error_of(response, 500)["message"]
    [record] = [one for one in caplog.records if one.message == "request"]
    assert record.fields["error"] == "RuntimeError"  # type: ignore[attr-defined]
    assert "secret" not in JsonLines().format(record)


# --- keys, ids, logs, state -----------------------------------------------------------------------------------------


def test_keys_open_everything_but_the_state(predictor: Predictor) -> None:
    with TestClient(create_app(predictor, keys=(b"one", b"two"))) as client:
        body = {"texts": ["a"]}
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Bearer "}, {"x-api-key": "on"}):
            response = client.post("/v1/predict", json=body, headers=headers)
            assert error_of(response, 401)["type"] == "unauthorized"
            assert response.headers["www-authenticate"] == "Bearer"
        for headers in ({"authorization": "Bearer two"}, {"x-api-key": "one"}):
            assert client.post("/v1/predict", json=body, headers=headers).status_code == 200
        for path in ("/", "/page/page.css", "/healthz", "/readyz", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200, path
        closed = [client.get("/metrics"), client.get("/v1/model"), client.get("/page")]
        closed += [client.post(f"/v1/{name}", json={"text": "a", "texts": ["a"]}) for name in ("importance", "search")]
        assert [response.status_code for response in closed] == [401] * 5
        assert client.get("/page/%2e%2e/v1/model").status_code == 404, "no way around through the open files"


def test_keys_of_the_environment_and_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINBERT_API_KEYS", raising=False)
    assert read_keys() == ()
    monkeypatch.setenv("MINBERT_API_KEYS", "one, two")
    file = tmp_path / "keys"
    file.write_text("# of the page\nthree\n\n")
    assert read_keys(file) == (b"one", b"two", b"three")
    file.write_text("\n")
    with pytest.raises(MinbertError, match="no API key"):
        read_keys(file)
    with pytest.raises(MinbertError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_every_key_is_compared_whatever_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compare = edge.hmac.compare_digest
    monkeypatch.setattr(edge.hmac, "compare_digest", lambda a, b: seen.append(b) or compare(a, b))
    assert is_known(b"one", (b"one", b"two"))
    assert not is_known(b"", (b"one", b"two"))
    assert seen == [b"one", b"two"] * 2


def test_the_servers_own_time_is_told(client: TestClient) -> None:
    found = client.post("/v1/predict", json={"texts": ["nice"]})
    took = re.fullmatch(r"total;dur=([0-9.]+)", found.headers["server-timing"])
    assert took is not None
    assert 0 < float(took[1]) <= found.elapsed.total_seconds() * 1000


def test_request_ids(client: TestClient) -> None:
    assert client.get("/healthz", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = client.get("/healthz", headers={"x-request-id": "a b\x7f"}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", made), "one that could break a log is not taken over"


def test_the_log_is_json_without_texts(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, edge.log.name)
    client.post("/v1/predict", json={"texts": ["a secret", "nice"]}, headers={"x-request-id": "r1"})
    client.post("/v1/predict?texts=secret", json={"texts": ["secret"], "tasks": ["secret"]})
    client.post("/secret", json={})
    client.post("/v1/importance", json={"text": "a secret word"})
    client.post("/v1/importance", json={"text": "a", "label": "secret"})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == edge.log.name]
    assert "secret" not in json.dumps(lines)
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/predict", 200),
        ("/v1/predict", 422),
        ("other", 404),
        ("/v1/importance", 200),
        ("/v1/importance", 422),
    ]
    assert (lines[3]["texts"], lines[3]["encodings"]) == (4, 4)
    first = lines[0]
    assert (first["request_id"], first["texts"], first["encodings"], first["level"]) == ("r1", 2, 2, "info")


def test_metrics_count_what_happened(predictor: Predictor) -> None:
    with TestClient(create_app(predictor)) as client:
        client.post("/v1/predict", json={"texts": ["a", "a", "b"]})
        client.post("/v1/predict", json={})
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    assert 'minbert_requests_total{path="/v1/predict",status="200"} 1' in lines
    assert 'minbert_requests_total{path="/v1/predict",status="422"} 1' in lines
    assert "minbert_encodings_total 2" in lines
    assert "minbert_batch_requests_count 1" in lines
    assert 'minbert_batch_requests_bucket{le="+Inf"} 1' in lines
    assert "minbert_queue 0" in lines


def test_state(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok"}
    service = client.app.state.service  # type: ignore[attr-defined]
    service.draining = True
    try:
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
    finally:
        service.draining = False


def test_in_int8_an_answer_does_not_depend_on_its_company(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeSettings(folder, precision="int8", drain=None)  # type: ignore[arg-type]
    monkeypatch.setenv("MINBERT_SERVE", json.dumps(asdict(settings), default=str))
    texts = [*TEXTS, *PAIRS]
    with TestClient(app_of_environment()) as client:
        together = client.post("/v1/embed", json={"texts": texts}).json()["embeddings"]
        alone = [client.post("/v1/embed", json={"texts": [text]}).json()["embeddings"][0] for text in texts]
        answers = client.post("/v1/predict", json={"texts": texts, "tasks": ["sst"]}).json()["texts"]
        for text, row in zip(texts, answers, strict=True):
            own = client.post("/v1/predict", json={"texts": [text], "tasks": ["sst"]}).json()["texts"][0]
            assert row["sst"]["probabilities"] == pytest.approx(own["sst"]["probabilities"], abs=1e-6)
    assert together == alone


# --- real processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, built, manifest = make(tiny_encoder, THREE)
    folder = tmp_path_factory.mktemp("served") / "model"
    save_model(folder, built, tokenizer, manifest)
    return folder


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "minbert", "serve", str(folder), "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.1)
        else:
            pytest.fail("not ready within a minute")
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


@pytest.mark.slow
def test_a_signal_ends_it_when_everything_accepted_is_answered(folder: Path) -> None:
    with serving(folder, "--no-batching", "--drain", "0.5") as (process, url):
        body = {"texts": [f"{word} {number}" for number in range(250) for word in ["nice"]]}
        answers: list[httpx.Response] = []
        clients = [
            threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/predict", json=body, timeout=60)))
            for _ in range(8)
        ]
        for client in clients:
            client.start()
        while "minbert_batch_requests_count 0" in httpx.get(f"{url}/metrics").text:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert httpx.get(f"{url}/readyz").status_code == 503
        for client in clients:
            client.join(60)
        _, logged = process.communicate(timeout=30)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert all(len(answer.json()["texts"]) == 250 for answer in answers)
    events = [json.loads(line) for line in logged.splitlines() if line.startswith("{")]
    assert events[-1]["event"] == "stopped"


@pytest.mark.slow
def test_several_processes_behind_one_port(folder: Path) -> None:
    with serving(folder, "--workers", "2", MINBERT_API_KEYS="k") as (process, url):
        assert httpx.post(f"{url}/v1/predict", json={"texts": ["a"]}).status_code == 401
        keyed = {"authorization": "Bearer k"}
        for _ in range(20):
            assert httpx.post(f"{url}/v1/predict", json={"texts": ["a"]}, headers=keyed).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    assert sum('"event": "stopped"' in line for line in logged.splitlines()) == 2


@pytest.mark.slow
def test_everything_that_the_openapi_document_allows(predictor: Predictor, folder: Path, tmp_path: Path) -> None:
    index = SearchIndex.build(tmp_path / "index", PAIRS, SentenceEncoder.load(folder))
    app = create_app(predictor, index=index)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    few = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    paths = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        paths.add(operation.path)
        for mode in (
            schemathesis.GenerationMode if operation.method == "post" else [schemathesis.GenerationMode.POSITIVE]
        ):

            @few
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                case.call_and_validate(excluded_checks=[positive_data_acceptance])  # which task reads what is no schema

            ask()
    names = ("predict", "importance", "embed", "similarity", "embeddings", "search", "model")
    assert paths == {"/healthz", "/readyz", "/metrics", *(f"/v1/{name}" for name in names)}
