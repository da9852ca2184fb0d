"""Routes that show what a snapshot kept: per head, and per token of the document."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from precis.text import Prompter
from service.access import CallerDep
from service.models import model_of
from service.state import StateDep

router = APIRouter(prefix="/v1/contexts/{context_id}", tags=["contexts"])


@router.get("/heads")
async def get_heads(context_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Kept entries and bytes per layer and kv head."""
    record = await state.ready_context(context_id, caller.tenant)
    layers = [
        {
            "layer": layer,
            "stored_bytes": record.layer_bytes[layer],
            "heads": [
                {"kv_head": head, "n_kept": n_kept, "bytes": n_bytes, "keep_ratio": round(n_kept / record.n_tokens, 4)}
                for head, (n_kept, n_bytes) in enumerate(zip(counts, record.head_bytes[layer], strict=True))
            ],
        }
        for layer, counts in enumerate(record.head_counts)
    ]
    return {"id": record.id, "n_tokens": record.n_tokens, "layers": layers}


@router.get("/retention")
async def get_retention(
    context_id: str,
    state: StateDep,
    caller: CallerDep,
    start: Annotated[int, Query(ge=0, description="first token")] = 0,
    limit: Annotated[int, Query(ge=1, le=1 << 20, description="tokens at most")] = 1 << 20,
) -> dict[str, Any]:
    """The document token by token, as [text, share].

    `kind` says what a share is: `kept`, of the kv heads that kept the token; or `precision`, where everything is kept
    and some tokens are stored more finely, 0 for the coarsest and 1 for the finest.
    """
    record = await state.ready_context(context_id, caller.tenant)
    _, prompter = await model_of(state, record)
    token_ids, told = await state.records.retention(record)
    first, last = max(start, record.body[0]), min(record.body[1], max(start, record.body[0]) + limit)
    shares = told[1 + first : 1 + last]
    return {
        "id": record.id,
        "object": "retention",
        "kind": "precision" if told[:1] == b"p" else "kept",
        "start": first,
        "n_tokens": record.n_tokens,
        "tokens": shaded(prompter, token_ids[first:last], shares),
    }


def shaded(prompter: Prompter, token_ids: list[int], shares: bytes) -> list[tuple[str, float]]:
    """Text and share of each token; one that is part of a character comes with those that complete it, at their
    mean."""
    detokenizer, found, held = prompter.detokenizer(), [], []
    for token_id, share in zip(token_ids, shares, strict=True):
        held.append(share)
        if text := detokenizer.push(token_id):
            found.append((text, round(sum(held) / len(held) / 255, 3)))
            held = []
    if text := detokenizer.finish():
        found.append((text, round(sum(held) / max(1, len(held)) / 255, 3)))
    return found
