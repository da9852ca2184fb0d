"""Tokens -> text as they come: never half a character, never a stop string. No torch."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Token by token to text, never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._text = ""

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._text += text
        return text

    def finish(self) -> str:
        """Text still held back at the end, incomplete characters as U+FFFD."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""


class StopText:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string was reached; it is not shown itself."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            return self._held[: min(found)], True
        n_kept = max((self._overlap(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - n_kept], self._held[len(self._held) - n_kept :]
        return shown, False

    def finish(self) -> str:
        """Text held back at the end."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins the stop string."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)
