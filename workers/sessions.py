"""Conversations that outlive their worker: after each turn, the entries of what was fed are stored beside the context.

A session's delta is a snapshot of its tail alone, in 16 bits, under the session's id; the session's state names the
tokens it is of. If the two do not fit, or the delta is gone or damaged, the tokens are fed again, and that is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import redis
import structlog
import torch

from precis.container import CODECS, pack
from precis.core import Snapshot, SnapshotHeader
from precis.errors import SessionBusy, SessionNotFound, SnapshotError
from precis.fingerprint import digest
from precis.manifest import open_manifest
from precis.reader import check_manifest, unpack
from precis.session import Session
from precis.tail import Tail
from precis.wire import keys
from precis.wire.codec import decode, encode
from precis.wire.messages import AnswerJob
from precis.wire.records import SessionState
from precis.wire.vault import Vault
from workers import metrics
from workers.models import Served
from workers.snapshots import SnapshotStore

_CODEC = "raw16"
# A turn is stored only on top of the turn that it was made on.
_ADVANCE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that is being answered.

    Attributes:
        stored: the state as it lies in the store, which must not have changed when the turn ends.
        before: tokens that have to be fed before the turn's own.
        n_resumed: tokens whose entries were loaded.
    """

    state: SessionState
    stored: bytes
    before: list[int]
    n_resumed: int


class Sessions:
    """Takes conversations up, and stores them after each turn."""

    def __init__(
        self, served: Served, client: redis.Redis, store: SnapshotStore, seal_key: bytes, vault: Vault
    ) -> None:
        self._served, self._redis, self._store, self._key = served, client, store, seal_key
        self._vault = vault
        self._advance = client.register_script(_ADVANCE)

    def resume(self, job: AnswerJob, session: Session) -> Turn:
        """Put what was said before into a new session's tail.

        Raises:
            SessionNotFound, SessionBusy: if it has expired, or another turn was answered meanwhile.
        """
        stored: Any = self._redis.get(keys.session(job.session))
        if stored is None:
            raise SessionNotFound(f"there is no session {job.session}, or it has expired")
        state = decode(self._vault.unseal(bytes(stored), job.session, "state"), SessionState)
        if state.turns != job.turn:
            raise SessionBusy("another turn of this session was answered meanwhile: ask again")
        fed, pending = np.frombuffer(state.fed, "<i4").tolist(), [] if state.pending < 0 else [state.pending]
        if not fed:
            return Turn(state, stored, pending, 0)
        try:
            session.tail = self._load(job.session, state, session.snapshot)
        except (SnapshotError, ValueError) as error:
            metrics.RECOMPUTED.labels("session").inc()
            structlog.get_logger("sessions").warning("fed_again", session=job.session, why=str(error))
            return Turn(state, stored, [*fed, *pending], 0)
        return Turn(state, stored, pending, len(fed))

    def keep(self, job: AnswerJob, turn: Turn, session: Session, fed: list[int], pending: int) -> None:
        """Store a finished turn: first its entries, then the state that names them.

        Args:
            job: of the turn.
            turn: from `resume`.
            session: whose tail holds what was fed, and nothing else.
            fed: tokens that were fed in this turn, in order.
            pending: the last token of the answer, where it was not fed, or -1.

        Raises:
            SessionBusy: if another turn was stored meanwhile; nothing of this one is then.
            StoreFull: if there is no room for it.
        """
        before = turn.state
        tokens = (before.fed if turn.n_resumed else b"") + np.array(fed, "<i4").tobytes()
        state = SessionState(
            before.context_id, before.tenant, job.session_roles, before.turns + 1, before.ttl_s, tokens, pending
        )
        if session.tail.n_tokens != state.n_fed:
            raise ValueError("the tail does not hold what was fed")
        delta = self._delta(state, session)
        self._store.put(job.session, pack(delta, CODECS[_CODEC], self._served.rotary, self._key), before.expires_at())
        args: list[Any] = [turn.stored, self._vault.seal(encode(state), job.session, "state"), before.ttl_s]
        if not self._advance(keys=[keys.session(job.session)], args=args):
            raise SessionBusy("another turn of this session was answered meanwhile: ask again")

    def _delta(self, state: SessionState, session: Session) -> Snapshot:
        tail, g = session.tail, session.snapshot.geometry
        n, n_heads, header = tail.n_tokens, g.n_layers * g.n_kv_heads, session.snapshot.header
        total = header.next_position + n
        keys_, values = (part[:, :, :n].reshape(n_heads * n, g.head_dim) for part in (tail.keys, tail.values))
        positions = tail.positions[:, :, :n].reshape(-1)
        marked = SnapshotHeader(_mark(header.fingerprint, state.fed), total, total, 0, {"session": 1})
        return Snapshot(g, marked, keys_, values, positions, torch.arange(n_heads + 1) * n)

    def _load(self, session_id: str, state: SessionState, context: Snapshot) -> Tail:
        model, g, n = self._served.model, context.geometry, state.n_fed
        manifest = open_manifest(self._store.manifest(session_id), self._key)
        check_manifest(manifest, g, _mark(context.header.fingerprint, state.fed))
        if any(count != n for layer in manifest.counts for count in layer):
            raise ValueError("the delta does not hold what was fed")
        blobs = self._store.blobs(session_id, manifest.blob_bytes)
        found = unpack(manifest, blobs, model, self._served.rotary)
        tail = Tail.empty(g, context.keys)
        tail.make_room(n)
        shape = (g.n_layers, g.n_kv_heads, n)
        tail.keys[:, :, :n] = found.keys.view(*shape, g.head_dim)
        tail.values[:, :, :n] = found.values.view(*shape, g.head_dim)
        tail.positions[:, :, :n] = found.positions.view(shape)
        tail.counts[:] = n
        tail.n_tokens = n
        return tail


def _mark(context_fingerprint: str, fed: bytes) -> str:
    """Fingerprint of a delta: what it is of, on top of what."""
    return digest(context=context_fingerprint.encode(), fed=fed)
