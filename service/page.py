"""The page at `/`: static files out of the package, under a policy that lets nothing else in. It needs no key itself;
what it shows comes from the API, with the key that the visitor gives."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import Response

from precis.errors import PageNotFound

router = APIRouter(include_in_schema=False)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES = {
    path.name: path.read_bytes() for path in Path(__file__).with_name("static").iterdir() if path.suffix in _TYPES
}
_TAGS = {name: f'"{hashlib.sha256(data).hexdigest()[:16]}"' for name, data in _FILES.items()}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.api_route("/", methods=["GET", "HEAD"])
async def page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The page."""
    return _file("index.html", if_none_match)


@router.get("/favicon.ico")
async def icon(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """What browsers ask for unasked."""
    return _file("icon.svg", if_none_match)


@router.get("/static/{name}")
async def static(name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """A file of the page."""
    return _file(name, if_none_match)


def _file(name: str, known: str | None) -> Response:
    if name not in _FILES:
        raise PageNotFound(f"there is no file {name}")
    headers = {**_HEADERS, "ETag": _TAGS[name]}
    if known == _TAGS[name]:
        return Response(status_code=304, headers=headers)
    return Response(_FILES[name], media_type=_TYPES[Path(name).suffix], headers=headers)
