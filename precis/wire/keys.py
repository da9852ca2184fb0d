"""Every Redis key and its lifetime. Keys that are used together in a script carry the hash tag {precis}.

On the queue instance (policy noeviction): all but snapshots. On the store instance (policy volatile-lru): snapshots.
"""

from __future__ import annotations

GROUP = "workers"  # the consumer group on every job stream

EXPIRY = "{precis}:expiry"  # zset id -> Unix time at which the context expires; no expiry
TOMBSTONES = "{precis}:tombstones"  # zset id -> Unix time at which an expired context's record goes; no expiry
DEAD = "{precis}:dead"  # stream of jobs that killed two workers; capped at 1000
WORKERS = "{precis}:workers"  # hash worker id -> model, dead ones until they are cleaned up; no expiry
MODELS = "{precis}:models"  # set of model names ever announced; no expiry
TOTALS = "{precis}:totals"  # hash: raw_bytes and stored_bytes over ready contexts; no expiry
API_KEYS = "{precis}:apikeys"  # hash SHA-256 of a key -> ApiKey; no expiry
API_KEY_IDS = "{precis}:apikeys:ids"  # hash id of a key -> its SHA-256; no expiry
QUOTAS = "{precis}:quotas"  # hash tenant -> Quota; no expiry
ARCHIVED = "{precis}:archived"  # set of ids of contexts with an archived snapshot; no expiry
UNARCHIVED = "{precis}:unarchived"  # set of ids of contexts that are gone, whose archived snapshot has to go; no expiry
AUDIT = "{precis}:audit"  # stream of who changed what; capped at 10,000


def contexts(tenant: str) -> str:
    """Zset id -> created_at of a tenant's contexts; no expiry."""
    return f"{{precis}}:contexts:{tenant}"


def usage(tenant: str) -> str:
    """Hash of what a tenant's contexts take: contexts, bytes (estimated until stored), active; no expiry."""
    return f"{{precis}}:usage:{tenant}"


def rate(tenant: str) -> str:
    """Hash of a tenant's token bucket of requests; gone when it is full again."""
    return f"{{precis}}:rate:{tenant}"


def compress_jobs(model: str) -> str:
    """Stream of CompressJobs; an entry goes when its job is finished."""
    return f"{{precis}}:jobs:compress:{model}"


def answer_jobs(model: str) -> str:
    """Stream of AnswerJobs, ScoreJobs and PrefetchJobs; an entry goes when its job is finished."""
    return f"{{precis}}:jobs:answer:{model}"


def worker_jobs(worker_id: str) -> str:
    """Stream of answer jobs for the worker that holds their snapshot; goes with the worker."""
    return f"{{precis}}:jobs:worker:{worker_id}"


def artifact(weights: str, kind: str) -> str:
    """String: what was measured of a model once, for all of its workers; no expiry."""
    return f"{{precis}}:artifact:{weights}:{kind}"


def context(context_id: str) -> str:
    """Hash of a ContextRecord; until deleted, or a day after expiry."""
    return f"{{precis}}:context:{context_id}"


def tokens(context_id: str) -> str:
    """String of the context's tokens, the source to recompute from; as long as the context lives."""
    return f"{{precis}}:tokens:{context_id}"


def session(session_id: str) -> str:
    """String of a SessionState; until its time to live after the last turn is over. Its deltas are snapshots."""
    return f"{{precis}}:session:{session_id}"


def delta(session_id: str, turn: int) -> str:
    """Id of the snapshot that holds what a turn of a session added."""
    return f"{session_id}.{turn}"


def sessions(context_id: str) -> str:
    """Zset of ids of a context's sessions -> created_at; goes with the context, or a month after the last."""
    return f"{{precis}}:sessions:{context_id}"


def response(response_id: str) -> str:
    """String of a stored response, JSON; as long as contexts live by default."""
    return f"{{precis}}:response:{response_id}"


def turn(session_id: str) -> str:
    """Flag: a turn of this session is being answered; two minutes, or until it ends."""
    return f"{{precis}}:turn:{session_id}"


def retention(context_id: str) -> str:
    """String: `k` or `p`, then per token the share of heads that kept it or its precision, a byte each; lives as the
    context does."""
    return f"{{precis}}:retention:{context_id}"


def beginning(tenant: str, model: str, digest: str) -> str:
    """Set of ids of a tenant's contexts whose messages have this digest; goes with the last of them."""
    return f"{{precis}}:beginning:{tenant}:{model}:{digest}"


def seen(tenant: str, model: str, digest: str) -> str:
    """How often a tenant sent chats that begin with these messages; an hour after the last."""
    return f"{{precis}}:seen:{tenant}:{model}:{digest}"


def fingerprint(tenant: str, value: str) -> str:
    """String: id of the tenant's context with this fingerprint; as long as it lives and has not failed."""
    return f"{{precis}}:fingerprint:{tenant}:{value}"


def events(job_id: str) -> str:
    """Stream of Events of a query or a context; capped, and gone two minutes after the last event."""
    return f"{{precis}}:events:{job_id}"


def cancelled(job_id: str) -> str:
    """Flag: stop this query or compression; ten minutes."""
    return f"{{precis}}:cancelled:{job_id}"


def queued(job_id: str) -> str:
    """Flag: this job was enqueued, so that a repeated enqueue does nothing; ten minutes."""
    return f"{{precis}}:queued:{job_id}"


def worker(worker_id: str) -> str:
    """String of a WorkerRecord; three beats."""
    return f"{{precis}}:worker:{worker_id}"


def api(api_id: str) -> str:
    """Flag: this API process lives; ten seconds."""
    return f"{{precis}}:api:{api_id}"


def wake(api_id: str) -> str:
    """Stream of one entry that interrupts an API process' blocked read; ten seconds."""
    return f"{{precis}}:wake:{api_id}"


def model(name: str) -> str:
    """Hash: `digest`, and `card`, a ModelCard; no expiry, so that tokenizing works while workers restart."""
    return f"{{precis}}:model:{name}"


def snapshot(context_id: str, part: int = 0) -> str:
    """Hash of a snapshot: field `m` the sealed manifest, then blobs in slices; expires with the context."""
    return f"snapshot:{{{context_id}}}" + (f":{part}" if part else "")


def staging(context_id: str, token: str, part: int = 0) -> str:
    """A snapshot while it is being written; ten minutes, then gone whatever happened."""
    return f"staging:{{{context_id}}}:{token}:{part}"
