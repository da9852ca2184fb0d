"""What a running API process holds, made once in `create_app`, and how handlers get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from precis import errors
from precis.wire.records import ContextRecord
from precis.wire.vault import Vault
from service.access import Access
from service.events import Follower
from service.fleet import Fleet
from service.jobs import Jobs
from service.records import Records, expired
from service.settings import Settings
from service.store import Stores


@dataclass(slots=True)
class State:
    """The parts of one API process."""

    settings: Settings
    stores: Stores
    records: Records
    jobs: Jobs
    fleet: Fleet
    follower: Follower
    access: Access
    vault: Vault
    draining: bool = field(default=False)

    async def ready_context(self, context_id: str, tenant: str) -> ContextRecord:
        """A context that can be asked.

        Raises:
            ContextNotFound, ContextExpired, ContextFailed, ContextNotReady: whichever it is.
        """
        record = await self.records.get(context_id, tenant)
        if expired(record):
            raise errors.ContextExpired(f"context {context_id} has expired: upload it again")
        if record.status == "failed":
            why = record.error.detail if record.error else "unknown"
            raise errors.ContextFailed(f"context {context_id} failed: {why}")
        if record.status != "ready":
            raise errors.ContextNotReady(
                f"context {context_id} is {record.status}: wait for status ready", status_now=record.status
            )
        return record

    async def ready_contexts(self, context_ids: list[str], tenant: str) -> list[ContextRecord]:
        """Contexts that can be asked together, in this order.

        Raises:
            InvalidRequest: if one is named twice, or they are of different models or templates.
            ContextNotFound, ContextExpired, ContextFailed, ContextNotReady: whichever it is.
        """
        found = [await self.ready_context(context_id, tenant) for context_id in context_ids]
        first = found[0]
        if len(set(context_ids)) < len(found):
            raise errors.InvalidRequest("a context is named twice")
        for record in found[1:]:
            if (record.model, record.template, record.tokenizer_digest) != (
                first.model,
                first.template,
                first.tokenizer_digest,
            ):
                raise errors.InvalidRequest(f"context {record.id} has another model or template than {first.id}")
        return found


def _state(request: Request) -> State:
    state: State = request.app.state.precis
    if state.draining:
        raise errors.ShuttingDown("the server is shutting down: ask again")
    return state


StateDep = Annotated[State, Depends(_state)]
