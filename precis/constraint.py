"""An answer bound to a JSON schema: which tokens may come next. The grammar work is the library llguidance's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from precis.errors import InvalidRequest

# One space after commas and colons, and none elsewhere: small models would go on with white space for ever.
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Constraints for one model's tokenizer, which is prepared when the first is asked for."""

    def __init__(self, tokenizer_json: str, eos_id: int) -> None:
        self._tokenizer_json, self._eos_id = tokenizer_json, eos_id

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer_json, eos_token=self._eos_id)

    def of_schema(self, schema: str) -> Constraint:
        """A new constraint.

        Args:
            schema: a JSON schema, as JSON.

        Raises:
            InvalidRequest: if it is none, or asks for what cannot be enforced.
        """
        try:
            matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(schema, _COMPACT))
        except ValueError as error:
            raise InvalidRequest(f"the JSON schema cannot be used: {error}") from error
        if matcher.is_error():
            raise InvalidRequest(f"the JSON schema cannot be used: {matcher.get_error().splitlines()[0]}")
        return Constraint(matcher)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Where one answer is in its grammar."""

    matcher: LLMatcher

    def masked(self, logits: Tensor) -> Tensor:
        """[vocabulary] float32 -> the same, minus infinity where a token may not come next."""
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = torch.from_numpy(np.unpackbits(mask, bitorder="little")[: logits.shape[0]].astype(bool))
        closed = torch.zeros(logits.shape[0] - allowed.shape[0], dtype=torch.bool)  # places that are no tokens
        return logits.masked_fill(~torch.cat([allowed, closed]), float("-inf"))

    def take(self, token_id: int) -> bool:
        """Go on by a token; True if the answer is complete with it.

        Raises:
            ValueError: if the token may not come next.
        """
        if not self.matcher.consume_token(token_id):
            raise ValueError("the answer left its grammar")
        return bool(self.matcher.is_stopped())
