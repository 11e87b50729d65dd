"""A model behind HTTP: `minbert serve MODEL`. The endpoints are described at /docs, and in docs/serving.md.

app = create_app(Predictor.load("runs/sample/model"))        # any ASGI server runs it
serve(ServeSettings(Path("runs/sample/model"), precision="int8"))
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from numpy.typing import NDArray
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from minbert import __version__
from minbert.delivery.batching import Batcher, BatchReport, ClosedError, QueueFullError
from minbert.delivery.edge import Edge, JsonLines, problem, read_keys
from minbert.delivery.exported import describe_folder
from minbert.delivery.messages import (
    ERRORS,
    MAX_TEXTS,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
    EmbedResponse,
    Health,
    PredictRequest,
    PredictResponse,
    SimilarityRequest,
    SimilarityResponse,
)
from minbert.delivery.metrics import SECONDS, SIZES, Counter, Gauge, Histogram, Metric, exposition
from minbert.delivery.predictor import Predictor
from minbert.delivery.questions import Question, Reply, choose_tasks
from minbert.errors import MinbertError
from minbert.machine import available_cores

SETTINGS = "MINBERT_SERVE"  # how the settings reach the processes of --workers
PAGE = Path(__file__).with_name("page.html")
log = logging.getLogger("minbert.serve")


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


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `minbert serve` is told."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    precision: str = "fp32"
    device: str = "cpu"
    api_keys: Path | None = None
    drain: float = 0.0
    """Seconds between the signal to end and the end of accepting: /readyz says no, everything else goes on."""
    limits: Limits = field(default_factory=Limits)


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
        reply = await asyncio.wrap_future(self.batcher.submit(question))
        request.state.note |= {"encodings": reply.encodings, "tokens": reply.tokens}
        self.tokens.add(reply.tokens)
        return reply

    def cost(self, reply: Reply) -> dict[str, Any]:
        """What every answer says beside the answer."""
        found = {"model": self.name, "encodings": reply.encodings, "tokens": reply.tokens}
        if reply.cut_texts or reply.cut_pairs:
            most = self.predictor.max_tokens
            found["truncated"] = {"texts": reply.cut_texts, "pairs": reply.cut_pairs, "max_tokens": most}
        return found


def create_app(
    predictor: Predictor,
    *,
    limits: Limits | None = None,
    keys: tuple[bytes, ...] = (),
    name: str = "minbert",
    drain: float | None = None,
) -> FastAPI:
    """The application, with its worker thread: started with it, and ended when all that was accepted is answered.

    Args:
        drain: seconds between SIGTERM and the server's end, in which /readyz says no; None: the signal is not ours.
    """
    limits = limits or Limits()
    service = Service(predictor, limits, name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with service.batcher:
            service.draining = False
            if drain is not None:
                _drain_on_signal(service, drain)
            log.info("ready", extra={"fields": {"model": name, "tasks": list(predictor.tasks)}})
            yield
            service.draining = True
            await asyncio.to_thread(service.batcher.close)
        log.info("stopped")

    app = FastAPI(
        title="minbert",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        description="One encoder, several tasks: sentiment, paraphrase, similarity and embeddings.",
    )
    app.state.service = service
    _add_endpoints(app, service)
    _add_refusals(app)
    app.add_middleware(
        Edge,
        keys=keys,
        body_bytes=limits.body_bytes,
        timeout=limits.timeout,
        done=service.note_request,
    )
    return app


def _add_endpoints(app: FastAPI, service: Service) -> None:
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

    @app.post("/v1/embed", response_model=EmbedResponse, responses=ERRORS, tags=["vectors"])
    async def embed(body: EmbedRequest, request: Request) -> Response:
        """The encoder's vector of each text."""
        reply, vectors = await vectors_of(body.texts, request)
        vectors = _unit(vectors) if body.normalize else vectors
        return _json(service.cost(reply) | {"width": vectors.shape[1], "embeddings": _plain(vectors)})

    @app.post("/v1/similarity", response_model=SimilarityResponse, responses=ERRORS, tags=["vectors"])
    async def similarity(body: SimilarityRequest, request: Request) -> Response:
        """How alike texts are: the cosine of their embeddings, each with each."""
        reply, vectors = await vectors_of([*body.texts, *(body.others or ())], request)
        unit = _unit(vectors)
        rows, columns = unit[: len(body.texts)], unit if body.others is None else unit[len(body.texts) :]
        return _json(service.cost(reply) | {"matrix": _plain(np.clip(rows @ columns.T, -1.0, 1.0))})

    @app.post("/v1/embeddings", response_model=EmbeddingsResponse, responses=ERRORS, tags=["vectors"])
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        """Embeddings as clients of the OpenAI API ask for them."""
        reply, vectors = await vectors_of([body.input] if isinstance(body.input, str) else body.input, request)
        if body.dimensions not in (None, vectors.shape[1]):
            raise MinbertError(f"dimensions is {body.dimensions}; this model's vectors have {vectors.shape[1]}")
        unit = _unit(vectors)
        shown: Sequence[Any] = _plain(unit)
        if body.encoding_format == "base64":
            shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in unit]
        return _json(
            {
                "object": "list",
                "data": [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(shown)],
                "model": service.name,
                "usage": {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens},
            }
        )

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

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        if not PAGE.exists():
            raise HTTPException(404, "there is no page here; /docs describes what can be asked")
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def vectors_of(texts: list[str], request: Request) -> tuple[Reply, NDArray[np.float32]]:
        reply = await service.ask(Question(tuple(texts), embed=True), request)
        if reply.vectors is None:
            raise RuntimeError("a question for vectors was answered without")
        return reply, reply.vectors


def _add_refusals(app: FastAPI) -> None:
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


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _plain(numbers: NDArray[np.float32]) -> list[Any]:
    """Seven decimals, a float32's own: the digits beyond would double what is sent."""
    return np.round(numbers.astype(np.float64), 7).tolist()


# --- running it -----------------------------------------------------------------------------------------------------


def serve(settings: ServeSettings) -> None:
    """Run until a signal ends it: SIGTERM or SIGINT, after which what was accepted is answered."""
    describe_folder(settings.model)  # what is wrong with the folder is said here, once, and not by every process
    read_keys(settings.api_keys)
    told = asdict(settings) | {"model": str(settings.model), "api_keys": settings.api_keys and str(settings.api_keys)}
    os.environ[SETTINGS] = json.dumps(told)
    _log_as_json()
    uvicorn.run(
        "minbert.delivery.server:app_of_environment",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.limits.timeout),
    )


def app_of_environment() -> FastAPI:
    """What each process of the server runs."""
    told = json.loads(os.environ[SETTINGS])
    keys, limits = read_keys(told["api_keys"] and Path(told["api_keys"])), Limits(**told["limits"])
    _log_as_json()
    threads = max(1, available_cores() // told["workers"])
    predictor = Predictor.load(told["model"], device=told["device"], precision=told["precision"])
    predictor.steady(threads)
    return create_app(predictor, limits=limits, keys=keys, name=_name(Path(told["model"])), drain=told["drain"])


def _name(folder: Path) -> str:
    """runs/sample/model is "sample"."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "model" else folder.name


def _log_as_json() -> None:
    """One line of JSON for each event, on standard error. A handler of the name is replaced, not added to."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("minbert.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "minbert.serve" else logging.WARNING)


def _drain_on_signal(service: Service, seconds: float) -> None:
    """At SIGTERM say first that it is not ready any more; the server's own way to end comes after that time."""
    end, loop = signal.getsignal(signal.SIGTERM), asyncio.get_running_loop()

    def drain(number: int, frame: FrameType | None) -> None:
        again, service.draining = service.draining, True
        if callable(end):
            loop.call_soon_threadsafe(loop.call_later, 0 if again else seconds, end, number, frame)

    signal.signal(signal.SIGTERM, drain)
