"""Where the snapshot of an answer comes from: held, loaded, made again, or put together of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from precis.compose import Part
from precis.core import Snapshot
from precis.errors import ContextNotFound, ContextNotReady, SnapshotError
from precis.full_cache import Between
from precis.policies import TRIMS, VIEWS
from precis.trims import Trim
from precis.views import View
from precis.views.sage import SageView
from precis.wire.messages import AnswerJob, ScoreJob
from workers.cache import SnapshotCache
from workers.compress import Compressor
from workers.recompute import make_again
from workers.records import Records

_COSTS = ("hit; memory", "hit; host", "hit; store", "hit; archive")  # what is made again costs more


@dataclass(frozen=True, slots=True)
class Found:
    """What an answer stands on.

    Attributes:
        cache: what is said of it.
        n_again: tokens of it that were read for this answer.
    """

    snapshot: Snapshot
    cache: str
    n_again: int = 0


@dataclass(slots=True)
class Sources:
    """Finds snapshots, one way or another.

    Attributes:
        busy: whether something is being compressed, so that nothing else can be.
    """

    records: Records
    cache: SnapshotCache
    compressor: Compressor
    busy: bool = False

    def of(self, job: AnswerJob | ScoreJob, between: Between) -> Found | None:
        """What a job stands on; None if that has to be made again, and nothing can be made now.

        Raises:
            ContextNotFound, ContextNotReady: if a context was deleted or changed meanwhile.
            PrecisError: if it cannot be made again.
        """
        if not job.context_id:
            return Found(self.cache.nothing, "miss")
        ids = [job.context_id, *(job.also if isinstance(job, AnswerJob) else [])]
        parts, said = list[Part](), list[str]()
        for context_id in ids:
            found = self._one(context_id, between)
            if found is None:
                return None
            said.append(found[1])
            tokens = found[2]() if len(ids) > 1 else b""
            parts.append(Part(found[0], np.frombuffer(tokens, "<i4").tolist()))
        worst = max(said, key=lambda each: _COSTS.index(each) if each in _COSTS else len(_COSTS))
        if len(parts) == 1:
            return Found(parts[0].snapshot, worst)
        snapshot, n_again = self.cache.together(ids, parts)
        return Found(snapshot, worst, n_again)

    def _one(self, context_id: str, between: Between) -> tuple[Snapshot, str, Callable[[], bytes]] | None:
        """A context's snapshot, what to say of it, and how to get its tokens."""
        if (record := self.records.get(context_id)) is None:
            raise ContextNotFound(f"there is no context {context_id}")
        if record.status != "ready":
            raise ContextNotReady(f"context {context_id} is being changed: ask again when it is ready")

        def tokens() -> bytes:
            return self.records.raw_tokens(record)

        try:
            snapshot, origin = self.cache.find(record)
        except SnapshotError as error:
            if self.busy:
                return None
            self.busy = True
            try:
                return (*make_again(self.cache, self.compressor, record, error, between), tokens)
            finally:
                self.busy = False
        self.records.touch(record)
        return snapshot, f"hit; {origin}", tokens


def choices_of(job: AnswerJob) -> tuple[View | None, Trim | None]:
    """What the answer reads of the snapshot, and what it keeps of itself."""
    trim = TRIMS[job.trim](budget=job.trim_budget) if job.trim_budget else None
    if job.view_budget and job.view_slides:
        return SageView(budget=job.view_budget, slides=True), trim
    return VIEWS[job.view](budget=job.view_budget) if job.view_budget else None, trim
