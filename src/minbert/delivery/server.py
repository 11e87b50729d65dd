"""A model behind HTTP: `minbert serve MODEL`. The endpoints are described at /docs, and in docs/serving.md.

app = create_app(Predictor.load("runs/sample/model"))        # any ASGI server runs it
serve(ServeSettings(Path("runs/sample/model"), precision="int8"))
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from minbert import __version__
from minbert.delivery.about import describe
from minbert.delivery.edge import Edge, JsonLines, read_keys
from minbert.delivery.exported import describe_folder
from minbert.delivery.pages import add_pages
from minbert.delivery.predictor import Predictor
from minbert.delivery.routes import add_endpoints, add_refusals
from minbert.delivery.search import SearchIndex, describe_model
from minbert.delivery.service import Limits, Service
from minbert.machine import available_cores

SETTINGS = "MINBERT_SERVE"  # how the settings reach the processes of --workers
log = logging.getLogger("minbert.serve")


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
    index: Path | None = None
    """A folder of `minbert search build`, of the same model."""
    drain: float = 0.0
    """Seconds between the signal to end and the end of accepting: /readyz says no, everything else goes on."""
    limits: Limits = field(default_factory=Limits)


def create_app(
    predictor: Predictor,
    *,
    limits: Limits | None = None,
    keys: tuple[bytes, ...] = (),
    name: str = "minbert",
    index: SearchIndex | None = None,
    drain: float | None = None,
) -> FastAPI:
    """The application, with its worker thread: started with it, and ended when all that was accepted is answered.

    Args:
        index: what /v1/search searches; it must have been built with the same model.
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
        docs_url=None,  # FastAPI's comes from elsewhere; ours is one of the pages
        redoc_url=None,
        description="One encoder, several tasks: sentiment, paraphrase, similarity and embeddings.",
    )
    app.state.service = service
    add_endpoints(app, service, describe(service, index), index)
    add_pages(app)
    add_refusals(app)
    app.add_middleware(
        Edge,
        keys=keys,
        body_bytes=limits.body_bytes,
        timeout=limits.timeout,
        done=service.note_request,
    )
    return app


# --- running it -----------------------------------------------------------------------------------------------------


def serve(settings: ServeSettings) -> None:
    """Run until a signal ends it: SIGTERM or SIGINT, after which what was accepted is answered."""
    describe_folder(settings.model)  # what is wrong with the folder is said here, once, and not by every process
    read_keys(settings.api_keys)
    if settings.index is not None:
        SearchIndex.load(settings.index).check(describe_model(settings.model))
    os.environ[SETTINGS] = json.dumps(asdict(settings), default=str)  # paths as strings
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
        proxy_headers=False,  # of whom a request comes from nothing here makes use
        timeout_graceful_shutdown=math.ceil(settings.limits.timeout),
    )


def app_of_environment() -> FastAPI:
    """What each process of the server runs."""
    told = json.loads(os.environ[SETTINGS])
    keys, limits = read_keys(told["api_keys"] and Path(told["api_keys"])), Limits(**told["limits"])
    _log_as_json()
    threads = max(1, available_cores() // told["workers"])
    predictor = Predictor.load(told["model"], device=told["device"], precision=told["precision"])
    predictor.use_threads(threads)
    index = SearchIndex.load(told["index"]) if told["index"] else None
    name = _name(Path(told["model"]))
    return create_app(predictor, limits=limits, keys=keys, name=name, index=index, drain=told["drain"])


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
