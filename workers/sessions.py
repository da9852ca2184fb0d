"""Conversations that outlive their worker: after each turn, the entries of what it fed are stored beside the context.

A delta is a snapshot of what one turn added, in 8 bits, under the session's id and the turn; the session's state names
the deltas and the tokens they are of. If they do not fit, or one is gone or damaged, all tokens are fed again, and that
is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
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

_CODEC = "int8"
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
        before, start = turn.state, turn.n_resumed
        deltas = [*(before.deltas if start else []), (before.turns, session.tail.n_tokens - start)]
        tokens = (before.fed if start else b"") + np.array(fed, "<i4").tobytes()
        state = SessionState(
            before.context_id, before.tenant, job.session_roles, before.turns + 1, before.ttl_s, tokens, pending, deltas
        )
        if session.tail.n_tokens != state.n_fed:
            raise ValueError("the tail does not hold what was fed")
        expire_at = before.expires_at()
        if state.n_fed > start:
            packed = pack(self._delta(state, session, start), CODECS[_CODEC], self._served.rotary, self._key)
            self._store.put(keys.delta(job.session, before.turns), packed, expire_at)
        else:
            state = msgspec.structs.replace(state, deltas=deltas[:-1])
        for earlier, _ in state.deltas[:-1]:
            self._store.extend(keys.delta(job.session, earlier), expire_at)
        sealed = self._vault.seal(encode(state), job.session, "state")
        args: list[Any] = [turn.stored, sealed, before.ttl_s]
        if not self._advance(keys=[keys.session(job.session)], args=args):
            raise SessionBusy("another turn of this session was answered meanwhile: ask again")

    def _delta(self, state: SessionState, session: Session, start: int) -> Snapshot:
        """The entries of the tail from `start` on."""
        tail, g, stop = session.tail, session.snapshot.geometry, session.tail.n_tokens
        n, n_heads, header = stop - start, g.n_layers * g.n_kv_heads, session.snapshot.header
        keys_, values = (part[:, :, start:stop].reshape(n_heads * n, g.head_dim) for part in (tail.keys, tail.values))
        positions = tail.positions[:, :, start:stop].reshape(-1)
        total = header.next_position + stop
        marked = SnapshotHeader(_mark(header.fingerprint, state.fed, start), total, total, 0, {"session": 1})
        return Snapshot(g, marked, keys_, values, positions, torch.arange(n_heads + 1) * n)

    def _load(self, session_id: str, state: SessionState, context: Snapshot) -> Tail:
        """All deltas, one behind the other."""
        if sum(n for _, n in state.deltas) != state.n_fed:
            raise ValueError("the deltas do not hold what was fed")
        g, tail, start = context.geometry, Tail.empty(context.geometry, context.keys), 0
        tail.make_room(state.n_fed)
        for turn, n in state.deltas:
            stop = start + n
            marked = _mark(context.header.fingerprint, state.fed[: 4 * stop], start)
            found = self._read(keys.delta(session_id, turn), marked, n)
            shape = (g.n_layers, g.n_kv_heads, n)
            tail.keys[:, :, start:stop] = found.keys.view(*shape, g.head_dim)
            tail.values[:, :, start:stop] = found.values.view(*shape, g.head_dim)
            tail.positions[:, :, start:stop] = found.positions.view(shape)
            start = stop
        tail.counts[:] = start
        tail.n_tokens = start
        return tail

    def _read(self, delta_id: str, fingerprint: str, n: int) -> Snapshot:
        model = self._served.model
        manifest = open_manifest(self._store.manifest(delta_id), self._key)
        check_manifest(manifest, model.geometry, fingerprint)
        if any(count != n for layer in manifest.counts for count in layer):
            raise ValueError("the delta does not hold what was fed")
        return unpack(manifest, self._store.blobs(delta_id, manifest.blob_bytes), model, self._served.rotary)


def _mark(context_fingerprint: str, fed: bytes, start: int) -> str:
    """Fingerprint of a delta: what it is of, on top of what."""
    return digest(context=context_fingerprint.encode(), fed=fed, start=start)
