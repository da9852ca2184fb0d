"""Every error the product knows, each with a stable `code` and a sentence that a user can act on.

PrecisError
├─ RequestError            the caller can fix it
│  ├─ Unauthorized · Forbidden · QuotaExceeded · RateLimited
│  ├─ PageNotFound · UnsupportedFile · UnreadableFile
│  ├─ InvalidRequest · EmptyDocument · BudgetTooSmall · UnsupportedModel · ModelNotFound
│  ├─ ArtifactMissing
│  ├─ SessionNotFound · SessionBusy · ResponseNotFound
│  ├─ ContextNotFound · ContextNotReady · ContextExpired · ContextFailed
│  └─ ContextTooLong · QueryTooLong · BodyTooLarge
├─ CapacityError           try again later
│  └─ QueueFull · StoreFull · NoWorker · ShuttingDown
├─ SnapshotError           the stored thing cannot be used
│  └─ SnapshotMissing · SnapshotCorrupt · SnapshotStale · ArtifactUnusable
└─ WorkerError             the machine failed, or the work was stopped
   └─ OutOfMemory · JobLost · JobCancelled · InternalError
"""

from __future__ import annotations


class PrecisError(Exception):
    """Base of all errors of the product.

    Attributes:
        code: stable, snake_case, the same on the wire, in metrics and in problem bodies.
        extra: further fields for the problem body, e.g. `{"limit": 8192}`.
    """

    code = "internal_error"

    def __init__(self, detail: str, **extra: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra = extra


class RequestError(PrecisError):
    """The caller can fix it."""

    code = "invalid_request"


class CapacityError(PrecisError):
    """Try again later."""

    code = "over_capacity"


class SnapshotError(PrecisError):
    """A stored snapshot cannot be used."""

    code = "snapshot_unusable"


class WorkerError(PrecisError):
    """The machine failed, or the work was stopped."""

    code = "worker_failed"


class Unauthorized(RequestError):
    code = "unauthorized"


class Forbidden(RequestError):
    code = "forbidden"


class QuotaExceeded(RequestError):
    code = "quota_exceeded"


class RateLimited(RequestError):
    code = "rate_limited"


class PageNotFound(RequestError):
    code = "page_not_found"


class InvalidRequest(RequestError):
    code = "invalid_request"


class UnsupportedFile(RequestError):
    code = "unsupported_file"


class UnreadableFile(RequestError):
    code = "unreadable_file"


class SessionNotFound(RequestError):
    code = "session_not_found"


class ResponseNotFound(RequestError):
    code = "response_not_found"


class SessionBusy(RequestError):
    code = "session_busy"


class EmptyDocument(RequestError):
    code = "empty_document"


class BudgetTooSmall(RequestError):
    code = "budget_too_small"


class BoundNotReached(RequestError):
    code = "bound_not_reached"


class UnsupportedModel(RequestError):
    code = "unsupported_model"


class ArtifactMissing(RequestError):
    code = "artifact_missing"


class ModelNotFound(RequestError):
    code = "model_not_found"


class ContextNotFound(RequestError):
    code = "context_not_found"


class ContextNotReady(RequestError):
    code = "context_not_ready"


class ContextExpired(RequestError):
    code = "context_expired"


class ContextFailed(RequestError):
    code = "context_failed"


class ContextTooLong(RequestError):
    code = "context_too_long"


class QueryTooLong(RequestError):
    code = "query_too_long"


class BodyTooLarge(RequestError):
    code = "body_too_large"


class QueueFull(CapacityError):
    code = "queue_full"


class StoreFull(CapacityError):
    code = "store_full"


class NoWorker(CapacityError):
    code = "no_worker"


class ShuttingDown(CapacityError):
    code = "shutting_down"


class SnapshotMissing(SnapshotError):
    code = "snapshot_missing"


class SnapshotCorrupt(SnapshotError):
    code = "snapshot_corrupt"


class SnapshotStale(SnapshotError):
    code = "snapshot_stale"


class ArtifactUnusable(SnapshotError):
    code = "artifact_unusable"


class OutOfMemory(WorkerError):
    code = "out_of_memory"


class JobLost(WorkerError):
    code = "job_lost"


class JobCancelled(WorkerError):
    code = "cancelled"


class InternalError(WorkerError):
    code = "internal_error"


def all_errors(root: type[PrecisError] = PrecisError) -> list[type[PrecisError]]:
    """Every class of the tree, root first."""
    return [root, *(found for child in root.__subclasses__() for found in all_errors(child))]


def from_code(code: str, detail: str) -> PrecisError:
    """The error that `code` names; an unknown code gives `InternalError` with the same detail."""
    leaves = {found.code: found for found in all_errors() if not found.__subclasses__()}
    return leaves.get(code, InternalError)(detail)
