"""The page at `/`, the description at `/docs`, and the files they are made of: page/, sent as they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).with_name("page")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing from elsewhere, nothing inline, and no way to make markup of a text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, but asked about: a new version of minbert is seen at once
}


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str
    tag: str


def add_pages(app: FastAPI) -> None:
    """`/`, `/docs` and `/page/NAME`. The files are read once, now."""
    files = {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS}

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _send(files["index.html"], request)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return _send(files["docs.html"], request)

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, "no such part of the page")
        return _send(files[name], request)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, f"{KINDS[path.suffix]}; charset=utf-8", f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def _send(file: _File, request: Request) -> Response:
    headers = HEADERS | {"ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"Content-Type": file.kind})
