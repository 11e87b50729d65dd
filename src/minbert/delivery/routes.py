"""What can be asked over HTTP, and how it is refused. See docs/serving.md."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from numpy.typing import NDArray
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from minbert.delivery.batching import ClosedError, QueueFullError
from minbert.delivery.edge import problem
from minbert.delivery.importance import occlude
from minbert.delivery.messages import (
    ERRORS,
    NO_INDEX,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
    EmbedResponse,
    Health,
    ImportanceRequest,
    ImportanceResponse,
    ModelResponse,
    PredictRequest,
    PredictResponse,
    SearchRequest,
    SearchResponse,
    SimilarityRequest,
    SimilarityResponse,
)
from minbert.delivery.metrics import exposition
from minbert.delivery.questions import Question, choose_tasks
from minbert.delivery.search import SearchIndex, unit
from minbert.delivery.service import Service
from minbert.errors import MinbertError


def add_endpoints(app: FastAPI, service: Service, card: ModelResponse, index: SearchIndex | None = None) -> None:
    """All of /v1, and the state."""
    _add_answers(app, service)
    _add_vectors(app, service, index)
    _add_state(app, service, card)


def _add_answers(app: FastAPI, service: Service) -> None:
    predictor = service.predictor

    @app.post("/v1/predict", response_model=PredictResponse, responses=ERRORS, tags=["answers"])
    async def predict(body: PredictRequest, request: Request) -> Response:
        """Each text's, and each pair's, answers."""
        tasks = choose_tasks(predictor, body.tasks, texts=bool(body.texts), pairs=bool(body.pairs))
        reply = await service.ask(Question(tuple(body.texts), tuple(body.pairs), tasks), request)
        rows: dict[str, list[dict[str, Any]]] = {"texts": [{} for _ in body.texts], "pairs": [{} for _ in body.pairs]}
        for task, answers in reply.answers.items():
            for row, found in zip(
                rows["pairs" if predictor.tasks[task].answers_pairs else "texts"], answers, strict=True
            ):
                row[task] = found
        return _json(service.cost(reply) | rows)

    @app.post("/v1/importance", response_model=ImportanceResponse, responses=ERRORS, tags=["answers"])
    async def importance(body: ImportanceRequest, request: Request) -> Response:
        """Which words mattered: each is left out in turn, and the change of the answer is its effect."""
        paired = body.second is not None
        tasks = choose_tasks(predictor, body.tasks, texts=not paired, pairs=paired)
        occlusion = occlude(body.text, body.second, limit=service.most_words)
        reply, effects = await service.explain(occlusion, tasks, body.label or "", request)
        found = {name: asdict(one) for name, one in effects.items()}
        for one in found.values():
            del one["task"]
        return _json(service.cost(reply) | {"tasks": found})


def _add_vectors(app: FastAPI, service: Service, index: SearchIndex | None) -> None:
    @app.post("/v1/embed", response_model=EmbedResponse, responses=ERRORS, tags=["vectors"])
    async def embed(body: EmbedRequest, request: Request) -> Response:
        """The encoder's vector of each text."""
        reply, vectors = await service.vectors(body.texts, request)
        vectors = unit(vectors) if body.normalize else vectors
        return _json(service.cost(reply) | {"width": vectors.shape[1], "embeddings": _plain(vectors)})

    @app.post("/v1/similarity", response_model=SimilarityResponse, responses=ERRORS, tags=["vectors"])
    async def similarity(body: SimilarityRequest, request: Request) -> Response:
        """How alike texts are: the cosine of their embeddings, each with each."""
        reply, vectors = await service.vectors([*body.texts, *(body.others or ())], request)
        vectors = unit(vectors)
        rows, columns = vectors[: len(body.texts)], vectors if body.others is None else vectors[len(body.texts) :]
        return _json(service.cost(reply) | {"matrix": _plain(np.clip(rows @ columns.T, -1.0, 1.0))})

    @app.post("/v1/embeddings", response_model=EmbeddingsResponse, responses=ERRORS, tags=["vectors"])
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        """Embeddings as clients of the OpenAI API ask for them."""
        reply, vectors = await service.vectors([body.input] if isinstance(body.input, str) else body.input, request)
        if body.dimensions not in (None, vectors.shape[1]):
            raise MinbertError(f"dimensions is {body.dimensions}; this model's vectors have {vectors.shape[1]}")
        vectors = unit(vectors)
        shown: Sequence[Any] = _plain(vectors)
        if body.encoding_format == "base64":
            shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        return _json(
            {
                "object": "list",
                "data": [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(shown)],
                "model": service.name,
                "usage": {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens},
            }
        )

    @app.post("/v1/search", response_model=SearchResponse, responses=NO_INDEX, tags=["vectors"])
    async def search(body: SearchRequest, request: Request) -> Response:
        """The sentences of the server's index that are nearest to each text."""
        if index is None:
            raise HTTPException(404, "no index here; expected a server that was started with --index FOLDER")
        reply, vectors = await service.vectors(body.texts, request)
        matches = await asyncio.to_thread(index.matches, vectors, body.count)
        return _json(service.cost(reply) | {"matches": [[asdict(one) for one in found] for found in matches]})


def _add_state(app: FastAPI, service: Service, card: ModelResponse) -> None:
    shown = to_json(card)

    @app.get("/v1/model", response_model=ModelResponse, responses={401: ERRORS[401]}, tags=["state"])
    async def model() -> Response:
        """The model's card: its tasks, scores, data and limits."""
        return Response(shown, media_type="application/json")

    @app.get("/healthz", response_model=Health, tags=["state"])
    async def healthz() -> Response:
        """Is the process alive?"""
        return _json({"status": "ok"})

    @app.get("/readyz", response_model=Health, responses={503: {"model": Health}}, tags=["state"])
    async def readyz() -> Response:
        """May it be asked? Not while it shuts down."""
        return _json({"status": service.state}, 200 if service.state == "ok" else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses={401: ERRORS[401]}, tags=["state"])
    async def metrics() -> Response:
        """Numbers for Prometheus, of this process."""
        return PlainTextResponse(exposition(service.metrics), media_type="text/plain; version=0.0.4")


def add_refusals(app: FastAPI) -> None:
    """Every error is {"error": {...}}."""

    def refuse(request: Request, code: int, message: str, headers: dict[str, str] | None = None) -> Response:
        body = problem(code, message, request.state.request_id)
        return Response(body, code, headers=headers, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return refuse(request, 400, "the body is no JSON")
        where = ".".join(map(str, first["loc"]))  # but never what was found there
        return refuse(request, 422, f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return refuse(request, error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(QueueFullError)
    async def full(request: Request, error: QueueFullError) -> Response:
        return refuse(request, 503, str(error), {"Retry-After": str(error.retry_after)})

    @app.exception_handler(ClosedError)
    async def closed(request: Request, error: ClosedError) -> Response:
        return refuse(request, 503, str(error), {"Retry-After": "1"})

    @app.exception_handler(MinbertError)
    async def mistake(request: Request, error: MinbertError) -> Response:
        return refuse(request, 422, str(error))


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def _plain(numbers: NDArray[np.float32]) -> list[Any]:
    """Seven decimals, a float32's own: the digits beyond would double what is sent."""
    return np.round(numbers.astype(np.float64), 7).tolist()
