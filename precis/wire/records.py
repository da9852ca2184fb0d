"""What is known of a context and of a worker, as msgspec structs in the store."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from precis.wire.presets import Compression

DEFAULT_TENANT = "default"  # whose everything is where no keys are in use
Status = Literal["queued", "prefilling", "compressing", "storing", "ready", "failed"]


class Problem(msgspec.Struct, frozen=True):
    """Why a context failed."""

    code: str
    detail: str


class FidelityRecord(msgspec.Struct, frozen=True):
    """See `precis.fidelity`."""

    kl: float
    top1_agreement: float
    n_tokens: int


class ApiKey(msgspec.Struct, frozen=True):
    """Who may do what. The key itself is nowhere: it is looked up by its SHA-256.

    Attributes:
        id: to name it by.
        scopes: of "ask", "write", "admin".
        expire_at: Unix time, seconds, or None for never.
    """

    id: str
    tenant: str
    scopes: list[str]
    name: str
    created_at: float
    expire_at: float | None = None


class Quota(msgspec.Struct, frozen=True):
    """What a tenant may take; 0 = no bound of its own.

    Attributes:
        max_bytes: stored, estimated while a context is being compressed.
        max_active: contexts waiting or being compressed.
        requests_per_minute: on average; as many may come at once.
    """

    max_contexts: int = 0
    max_bytes: int = 0
    max_active: int = 0
    requests_per_minute: int = 0


class Source(msgspec.Struct, frozen=True):
    """The file that a context was made of.

    Attributes:
        kind: "text", "pdf", "docx" or "html".
        n_bytes: of the file.
        page_starts: where each page begins in the text, in characters.
    """

    kind: str
    n_bytes: int
    page_starts: list[int] = []


class ContextRecord(msgspec.Struct, frozen=True):
    """A context as stored: one hash, one JSON value per field, so that service and worker can each set their own.

    Attributes:
        tenant: whose it is; others find nothing under its id.
        queued_at: Unix time, seconds, of the last change that has to be worked on; 0: its creation.
        reserved_bytes: what counts against the tenant's quota until it is stored.
        beginning: digest of the messages, by which a chat that begins with them finds the context; empty for raw.
        template: "chat" or "raw".
        roles: of the rendered messages; empty for raw.
        body: span of the caller's text in the tokens.
        expire_at: Unix time, seconds; None = pinned, never.
        head_counts: [L][K] kept entries.
        head_bytes: [L][K] bytes of them, without padding.
        layer_bytes: [L] stored bytes.
        parts: ids of the contexts that the rest of the document is in, if it was split.
        part_of: id of the context that names this one among its parts, or empty.
    """

    id: str
    model: str
    tokenizer_digest: str
    fingerprint: str
    compression: Compression
    template: str
    roles: list[str]
    body: tuple[int, int]
    n_tokens: int
    created_at: float
    tenant: str = DEFAULT_TENANT
    reserved_bytes: int = 0
    beginning: str = ""
    queued_at: float = 0.0
    status: Status = "queued"
    name: str = ""
    metadata: dict[str, str] = {}
    pinned: bool = False
    expire_at: float | None = None
    last_used_at: float | None = None
    processed: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    fidelity: FidelityRecord | None = None
    timings: dict[str, float] = {}
    head_counts: list[list[int]] = []
    head_bytes: list[list[int]] = []
    layer_bytes: list[int] = []
    error: Problem | None = None
    source: Source | None = None
    parts: list[str] = []
    part_of: str = ""

    @property
    def protected(self) -> list[tuple[int, int]]:
        """The template's own tokens around the body, which are always kept."""
        return around(self.body, self.n_tokens)


class SessionState(msgspec.Struct, frozen=True):
    """A conversation on top of a context, as it was fed.

    Attributes:
        roles: of the messages after the context, in order.
        turns: that were answered.
        ttl_s: seconds that it lives after its last turn.
        fed: tokens after the context whose entries its deltas hold, little-endian int32.
        pending: the last token of the last answer, where it was not fed, or -1.
        deltas: for each stored delta, the turn that it was stored in, and the tokens that it holds.
    """

    context_id: str
    tenant: str
    roles: list[str]
    turns: int
    ttl_s: int
    fed: bytes = b""
    pending: int = -1
    deltas: list[tuple[int, int]] = []

    @property
    def n_fed(self) -> int:
        """Tokens that its deltas hold."""
        return len(self.fed) // 4

    def expires_at(self) -> float:
        """Unix time, seconds, if this is its last turn."""
        return time.time() + self.ttl_s


def around(body: tuple[int, int], n_tokens: int) -> list[tuple[int, int]]:
    """What lies before and after a span."""
    return [(start, stop) for start, stop in ((0, body[0]), (body[1], n_tokens)) if start < stop]


class WorkerRecord(msgspec.Struct, frozen=True):
    """A live worker; its key expires when it stops beating.

    Attributes:
        load: answers being decoded.
        slots: answers that it decodes at once.
        hot: ids of contexts whose snapshots it holds, on its device or beside it.
    """

    id: str
    pid: int
    host: str
    role: str
    model: str
    device: str
    load: int
    slots: int
    hot: list[str]
    started_at: float
