"""What a chat begins with, as a digest by which its context is found."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from precis.wire.messages import Message

_FIRST = 32  # tokens


def digests_of(messages: Sequence[Message]) -> list[str]:
    """Per message, the digest of all up to it. Equal digests are equal messages, so equal tokens of one tokenizer."""
    state, found = hashlib.blake2b(digest_size=16), []
    for message in messages:
        for part in (message.role.encode(), message.content.encode()):
            state.update(len(part).to_bytes(8, "little") + part)
        found.append(state.hexdigest())
    return found


def digest_of_tokens(token_ids: Sequence[int]) -> str | None:
    """Of the first tokens of a raw text, by which contexts it may begin with are looked up; None of a short one."""
    if len(token_ids) < _FIRST:
        return None
    first = b"".join(token.to_bytes(4, "little") for token in token_ids[:_FIRST])
    return "raw" + hashlib.blake2b(first, digest_size=16).hexdigest()
