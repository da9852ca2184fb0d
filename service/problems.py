"""The one table from error to status, and the two shapes an error has on the wire: RFC 9457, and OpenAI's on OpenAI
routes."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError, ResponseError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from precis import errors
from service import metrics

STATUS: dict[type[errors.PrecisError], int] = {
    errors.PrecisError: 500,
    errors.RequestError: 422,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.QuotaExceeded: 429,
    errors.RateLimited: 429,
    errors.PageNotFound: 404,
    errors.UnsupportedFile: 415,
    errors.UnreadableFile: 422,
    errors.InvalidRequest: 422,
    errors.EmptyDocument: 422,
    errors.BudgetTooSmall: 422,
    errors.BoundNotReached: 422,
    errors.UnsupportedModel: 422,
    errors.ModelNotFound: 404,
    errors.ContextNotFound: 404,
    errors.SessionNotFound: 404,
    errors.ResponseNotFound: 404,
    errors.SessionBusy: 409,
    errors.ContextNotReady: 409,
    errors.ContextFailed: 409,
    errors.ContextExpired: 410,
    errors.ContextTooLong: 413,
    errors.QueryTooLong: 413,
    errors.BodyTooLarge: 413,
    errors.CapacityError: 503,
    errors.QueueFull: 429,
    errors.StoreFull: 507,
    errors.NoWorker: 503,
    errors.ShuttingDown: 503,
    errors.ArtifactMissing: 422,
    errors.ArtifactUnusable: 500,
    errors.SnapshotError: 500,
    errors.SnapshotMissing: 410,
    errors.SnapshotCorrupt: 500,
    errors.SnapshotStale: 409,
    errors.WorkerError: 500,
    errors.OutOfMemory: 503,
    errors.JobLost: 503,
    errors.JobCancelled: 499,
    errors.InternalError: 500,
}
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_GOOGLE_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "FAILED_PRECONDITION",
    410: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    507: "RESOURCE_EXHAUSTED",
}
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_RETRY_S = {errors.NoWorker: 5, errors.ShuttingDown: 2, errors.JobLost: 1}


def is_openai(path: str) -> bool:
    """Whether a route answers in OpenAI's shapes."""
    return path.startswith(("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/models"))


def _is_google(path: str) -> bool:
    return path.startswith("/v1beta/")


def _in_shape(path: str, status: int, code: str, detail: str, extra: dict[str, Any]) -> dict[str, Any]:
    """An error as the clients of a route expect it."""
    if is_openai(path):
        kind = _OPENAI_TYPES.get(status, "invalid_request_error")
        return {"error": {"message": detail, "type": kind, "param": extra.get("param"), "code": code}}
    if _is_google(path):
        told = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": code, "domain": "precis"}]
        named = _GOOGLE_STATUS.get(status, "INVALID_ARGUMENT")
        return {"error": {"code": status, "status": named, "message": detail, "details": told}}
    shown = {name: value for name, value in extra.items() if name != "retry_after_s"}
    title = code.replace("_", " ")
    return {"type": f"urn:precis:{code}", "title": title, "status": status, "detail": detail, "code": code, **shown}


def error_schema(path: str) -> dict[str, Any]:
    """JSON schema of the errors of a route."""
    text, number = {"type": "string"}, {"type": "integer"}
    if is_openai(path):
        fields: dict[str, Any] = {"message": text, "type": text, "param": {"type": ["string", "null"]}, "code": text}
    elif _is_google(path):
        fields = {"code": number, "status": text, "message": text, "details": {"type": "array"}}
    else:
        fields = {"type": text, "title": text, "status": number, "detail": text, "code": text}
        return {"type": "object", "required": list(fields), "properties": fields}
    inner = {"type": "object", "required": list(fields), "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}


def media_type(path: str) -> str:
    """Of the errors of a route."""
    plain = is_openai(path) or _is_google(path)
    return "application/json" if plain else "application/problem+json"


def body_of(error: errors.PrecisError, path: str) -> dict[str, Any]:
    """The body that tells of an error, on any kind of route."""
    return _in_shape(path, STATUS[type(error)], error.code, error.detail, error.extra)


def response_of(error: errors.PrecisError, path: str) -> JSONResponse:
    """The response that tells of an error."""
    metrics.ERRORS.labels(error.code).inc()
    if isinstance(error, (errors.CapacityError, errors.QuotaExceeded, errors.RateLimited)):
        metrics.REJECTED.labels(error.code).inc()
    return JSONResponse(
        body_of(error, path),
        STATUS[type(error)],
        headers=_headers(error),
        media_type=media_type(path),
    )


def _headers(error: errors.PrecisError) -> dict[str, str]:
    retry = error.extra.get("retry_after_s", _RETRY_S.get(type(error)))
    headers = {} if retry is None else {"Retry-After": str(retry)}
    return headers | ({"WWW-Authenticate": "Bearer"} if isinstance(error, errors.Unauthorized) else {})


def install(app: FastAPI) -> None:
    """Give every kind of exception its response."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        return response_of(error if isinstance(error, errors.PrecisError) else _unexpected(error), request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        found = error.errors() if isinstance(error, RequestValidationError) else []
        fields = [{"field": ".".join(map(str, e["loc"][1:])) or "body", "problem": e["msg"]} for e in found]
        detail = "; ".join(f"{f['field']}: {f['problem']}" for f in fields) or "the request is invalid"
        return response_of(errors.InvalidRequest(detail, fields=fields), request.url.path)

    async def http(request: Request, error: Exception) -> JSONResponse:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 413:
            return response_of(errors.BodyTooLarge("the request body is too large"), request.url.path)
        detail = error.detail if isinstance(error, HTTPException) else ""
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
        path = request.url.path
        headers = {"Allow": _allowed(request)} if status == 405 else None
        return JSONResponse(_in_shape(path, status, code, detail, {}), status, headers, media_type(path))

    app.add_exception_handler(errors.PrecisError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RedisError, ours)
    app.add_exception_handler(Exception, ours)


def _allowed(request: Request) -> str:
    """The methods of a path: each has a route of its own, and a route knows but its own methods."""
    asked = [(method, {**request.scope, "method": method}) for method in _METHODS]
    routes = request.app.routes
    return ", ".join(m for m, scope in asked if any(each.matches(scope)[0] == Match.FULL for each in routes))


def _unexpected(error: Exception) -> errors.PrecisError:
    if isinstance(error, RedisError):
        structlog.get_logger("service").error("store_unreachable", error=type(error).__name__)
        if isinstance(error, ResponseError) and str(error).startswith("MISCONF"):
            return errors.CapacityError("the store takes no writes, its disk may be full: try again", retry_after_s=30)
        return errors.CapacityError("the store cannot be reached: try again", retry_after_s=2)
    structlog.get_logger("service").error("unexpected", exc_info=error)
    return errors.InternalError("an unexpected error; it was logged")
