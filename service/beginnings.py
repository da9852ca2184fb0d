"""What a chat begins with, as a digest by which its context is found."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from precis.wire.messages import Message


def digests_of(messages: Sequence[Message]) -> list[str]:
    """Per message, the digest of all up to it. Equal digests are equal messages, so equal tokens of one tokenizer."""
    state, found = hashlib.blake2b(digest_size=16), []
    for message in messages:
        for part in (message.role.encode(), message.content.encode()):
            state.update(len(part).to_bytes(8, "little") + part)
        found.append(state.hexdigest())
    return found
