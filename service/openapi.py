"""What the API says of itself: FastAPI's schema, with the errors as they are on each route, and how a key is sent."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from service.problems import error_schema, media_type
from service.schemas import ContextIn

_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "as OpenAI's clients send it"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "google": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
}
_GUARDED = ("/v1/", "/v1beta/")


def described(app: FastAPI) -> dict[str, Any]:
    """The whole schema."""
    if app.openapi_schema is None:
        app.openapi_schema = _completed(FastAPI.openapi(app))
    return app.openapi_schema


def _completed(schema: dict[str, Any]) -> dict[str, Any]:
    known = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which no route sends
        known.pop(name, None)
    # the upload's body is read by hand, since it may be a file
    found = ContextIn.model_json_schema(ref_template="#/components/schemas/{model}")
    known |= {name: part for name, part in found.pop("$defs").items() if name not in known} | {"ContextIn": found}
    for path, methods in schema["paths"].items():
        for told in methods.values():
            told["responses"].pop("422", None)
            if path.startswith(_GUARDED):
                told["responses"] |= _errors(path)
                told["security"] = [{}, *({name: []} for name in _KEYS)]  # none is needed where no keys are set up
    schema["components"]["securitySchemes"] = _KEYS
    return schema


def _errors(path: str) -> dict[str, Any]:
    content = {media_type(path): {"schema": error_schema(path)}}
    return {
        "4XX": {"description": "the request cannot be served as it is; `code` says why", "content": content},
        "5XX": {"description": "the service cannot serve it now; `code` says why", "content": content},
    }
