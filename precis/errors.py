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
    """No key, or one that is not known: send `Authorization: Bearer KEY`."""

    code = "unauthorized"


class Forbidden(RequestError):
    """The key lacks a scope."""

    code = "forbidden"


class QuotaExceeded(RequestError):
    """The tenant has as much as it may: delete contexts, wait for those in work, or ask for a larger quota."""

    code = "quota_exceeded"


class RateLimited(RequestError):
    """Too many requests a minute: come again when `Retry-After` says."""

    code = "rate_limited"


class PageNotFound(RequestError):
    """There is no such page or route."""

    code = "page_not_found"


class InvalidRequest(RequestError):
    """A field is wrong: `fields` or the sentence says which, and what it takes."""

    code = "invalid_request"


class UnsupportedFile(RequestError):
    """A file of a kind that is not read."""

    code = "unsupported_file"


class UnreadableFile(RequestError):
    """A file that is damaged, encrypted, without text, or takes too much to read."""

    code = "unreadable_file"


class SessionNotFound(RequestError):
    """There is no such session, or it has expired."""

    code = "session_not_found"


class ResponseNotFound(RequestError):
    """There is no such stored response, or it has expired."""

    code = "response_not_found"


class SessionBusy(RequestError):
    """Another turn of the session is being answered: wait for its end."""

    code = "session_busy"


class EmptyDocument(RequestError):
    """There is no text to ask about."""

    code = "empty_document"


class BudgetTooSmall(RequestError):
    """What is always kept does not fit: the sentence names the smallest budget that would do."""

    code = "budget_too_small"


class BoundNotReached(RequestError):
    """The codec alone diverges by more than `max_kl`."""

    code = "bound_not_reached"


class UnsupportedModel(RequestError):
    """The model cannot do that: its template or architecture is in the way."""

    code = "unsupported_model"


class ArtifactMissing(RequestError):
    """Something was not measured of the model yet: run `precis calibrate`."""

    code = "artifact_missing"


class ModelNotFound(RequestError):
    """No worker ever served a model of this name, or several are served and none was named."""

    code = "model_not_found"


class ContextNotFound(RequestError):
    """There is no such context, or it is another tenant's."""

    code = "context_not_found"


class ContextNotReady(RequestError):
    """The context is being worked on: wait for `ready`."""

    code = "context_not_ready"


class ContextExpired(RequestError):
    """The context has reached its expiry: upload it again."""

    code = "context_expired"


class ContextFailed(RequestError):
    """The context could not be made; the sentence says why."""

    code = "context_failed"


class ContextTooLong(RequestError):
    """More tokens than the model reads: shorten it, or split it (`overflow`)."""

    code = "context_too_long"


class QueryTooLong(RequestError):
    """The question leaves no room for an answer."""

    code = "query_too_long"


class BodyTooLarge(RequestError):
    """The request has more bytes than the server takes."""

    code = "body_too_large"


class QueueFull(CapacityError):
    """Too much waits: come again when `Retry-After` says."""

    code = "queue_full"


class StoreFull(CapacityError):
    """The store has no room for the snapshot."""

    code = "store_full"


class NoWorker(CapacityError):
    """No worker serves this model now."""

    code = "no_worker"


class ShuttingDown(CapacityError):
    """The process is stopping: ask again, and another one answers."""

    code = "shutting_down"


class SnapshotMissing(SnapshotError):
    """Neither snapshot nor source tokens are there any more: upload the document again."""

    code = "snapshot_missing"


class SnapshotCorrupt(SnapshotError):
    """What is stored is damaged or sealed with another key, and cannot be made again."""

    code = "snapshot_corrupt"


class SnapshotStale(SnapshotError):
    """The context was made for another model, tokenizer or calibration than is served now: upload it again."""

    code = "snapshot_stale"


class ArtifactUnusable(SnapshotError):
    """What was measured of the model cannot be read."""

    code = "artifact_unusable"


class OutOfMemory(WorkerError):
    """The device has no memory for this now."""

    code = "out_of_memory"


class JobLost(WorkerError):
    """The worker died or lost the store while it worked: ask again."""

    code = "job_lost"


class JobCancelled(WorkerError):
    """The work was stopped, by the client or by a deletion."""

    code = "cancelled"


class InternalError(WorkerError):
    """A bug; it was logged."""

    code = "internal_error"


def all_errors(root: type[PrecisError] = PrecisError) -> list[type[PrecisError]]:
    """Every class of the tree, root first."""
    return [root, *(found for child in root.__subclasses__() for found in all_errors(child))]


def from_code(code: str, detail: str) -> PrecisError:
    """The error that `code` names; an unknown code gives `InternalError` with the same detail."""
    leaves = {found.code: found for found in all_errors() if not found.__subclasses__()}
    return leaves.get(code, InternalError)(detail)
