"""What every request passes on its way in and out: a request id, the key, the limits, the clock, the log.

Plain ASGI: a layer that wraps requests and responses in objects would cost more than the answer to a short text.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from itertools import count
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from minbert.errors import MinbertError, shown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

KEYS = "MINBERT_API_KEYS"
OPEN = ("/", "/healthz", "/readyz", "/docs", "/openapi.json")
PAGES = "/page/"
"""Below it lie the files of the page, which are as open as the page."""
TYPES = {
    401: "unauthorized",
    404: "not_found",
    405: "not_found",
    413: "too_large",
    500: "internal",
    503: "overloaded",
    504: "timeout",
}
GOOD_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger("minbert.serve")


def read_keys(file: Path | None = None) -> tuple[bytes, ...]:
    """The API keys: of MINBERT_API_KEYS, separated by commas, and of a file with one a line. None: no key is needed."""
    found = [key.strip() for key in os.environ.get(KEYS, "").split(",")]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise MinbertError(f"{shown(file)}: cannot be read ({error}); expected one API key a line") from None
        found += (kept := [line for line in lines if line and not line.startswith("#")])
        if not kept:
            raise MinbertError(f"{shown(file)}: no API key; expected one a line")
    return tuple(key.encode() for key in found if key)


def is_known(given: bytes, keys: Iterable[bytes]) -> bool:
    """Whether it is one of the keys. How long that takes says nothing of how much of a key was right."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(given, key)
    return found


def problem(code: int, message: str, request_id: str) -> bytes:
    """An error's body."""
    kind = TYPES.get(code, "invalid_request" if code < 500 else "internal")
    return json.dumps({"error": {"message": message, "type": kind, "request_id": request_id}}).encode()


class Edge:
    """The outermost layer.

    Args:
        app: what is inside.
        keys: API keys; empty: everyone may ask.
        body_bytes: the largest body.
        timeout: seconds from the first byte to the answer.
        done: is told of every request's path, status and seconds.
    """

    def __init__(
        self,
        app: App,
        *,
        keys: tuple[bytes, ...],
        body_bytes: int,
        timeout: float,
        done: Callable[[str, int, float], None],
    ) -> None:
        self.app, self.keys, self.body_bytes, self.timeout, self.done = app, keys, body_bytes, timeout, done
        start = secrets.token_hex(4)  # once: the system's random numbers cost as much as the rest of this layer
        self.ids = (f"{start}{number:08x}" for number in count())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _Exchange(self, scope, receive, send).run()


class _Exchange:
    """One request on its way."""

    def __init__(self, edge: Edge, scope: Message, receive: Receive, send: Send) -> None:
        self.edge, self.scope, self._receive, self._send = edge, scope, receive, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.id = given.decode() if GOOD_ID.fullmatch(given) else next(edge.ids)
        self.started = time.perf_counter()
        self.status = 0
        self.read = 0
        self.notes: dict[str, Any] = {}
        scope.setdefault("state", {})["request_id"] = self.id
        scope["state"]["note"] = self.notes

    async def run(self) -> None:
        try:
            await self._answer()
        finally:
            seconds = time.perf_counter() - self.started
            route = getattr(self.scope.get("route"), "path", "other")
            self.edge.done(route, self.status, seconds)
            log.info(
                "request",
                extra={
                    "fields": {
                        "request_id": self.id,
                        "method": self.scope["method"],
                        "path": route,
                        "status": self.status,
                        "ms": round(seconds * 1000, 2),
                        **self.notes,
                    }
                },
            )

    async def _answer(self) -> None:
        edge = self.edge
        path = self.scope["path"]
        if edge.keys and path not in OPEN and not path.startswith(PAGES) and not is_known(self._key(), edge.keys):
            await self._refuse(401, "no API key, or a wrong one; expected Authorization: Bearer KEY")
            return
        if (length := self.headers.get(b"content-length", b"0")).isdigit() and int(length) > edge.body_bytes:
            await self._refuse(413, f"the body has {int(length):,} bytes; expected at most {edge.body_bytes:,}")
            return
        try:
            async with asyncio.timeout(edge.timeout):
                await edge.app(self.scope, self.receive, self.send)
        except TimeoutError:
            await self._refuse(504, f"no answer within {edge.timeout:g} s")
        except (
            Exception
        ) as error:  # told to whoever runs the server, by its class and place: its message may hold texts
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
            self.notes |= {"error": type(error).__name__, "at": where}
            await self._refuse(500, "a mistake of the server; its log has more under this request id")

    def _key(self) -> bytes:
        kind, _, key = self.headers.get(b"authorization", b"").partition(b" ")
        return key.strip() if kind.lower() == b"bearer" else self.headers.get(b"x-api-key", b"")

    async def _refuse(self, code: int, message: str) -> None:
        if self.status:  # the answer is on its way: all that is left is to break it off
            return
        body = problem(code, message, self.id)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if code == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if code == 413:
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        await self.send({"type": "http.response.start", "status": code, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.read += len(message.get("body", b""))
            if self.read > self.edge.body_bytes:
                said = f"the body has more than {self.edge.body_bytes:,} bytes"
                raise HTTPException(413, said, {"Connection": "close"})  # which FastAPI lets through
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            took = f"total;dur={(time.perf_counter() - self.started) * 1000:.2f}"  # in milliseconds
            own = (b"x-request-id", self.id.encode()), (b"server-timing", took.encode())
            message["headers"] = [*message.get("headers", ()), *own]
        await self._send(message)


class JsonLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        said = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
        if record.exc_info and record.exc_info[0] is not None:
            said["error"] = record.exc_info[0].__name__
        return json.dumps(said, ensure_ascii=False)
