"""A context's model, as long as it is the one that its tokens were made for."""

from __future__ import annotations

from precis.errors import SnapshotStale
from precis.text import Prompter
from precis.wire.messages import ModelCard
from precis.wire.records import ContextRecord
from service.state import State


async def model_of(state: State, record: ContextRecord) -> tuple[ModelCard, Prompter]:
    """A context's model and tokenizer.

    Raises:
        SnapshotStale: if the model now has another tokenizer than the context's tokens were made with.
    """
    card = await state.fleet.card(record.model)
    if card.tokenizer_digest != record.tokenizer_digest:
        raise SnapshotStale(f"{record.model} now has another tokenizer or chat template: upload the context again")
    return card, await state.fleet.prompter(card)
