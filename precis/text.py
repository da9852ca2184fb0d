"""Text -> tokens: the two halves of a prompt. No torch.

The seam: a context is rendered once by the model's chat template and ends with the template's end-of-turn token; the
query part is rendered and tokenized on its own and starts right after it. So `tokens(context) + tokens(query)` is the
definition, and no re-tokenization can shift the seam. Text from callers is tokenized with special tokens switched
off, so that a document cannot end its own turn. Models without a template use plain text and a newline as the seam.
"""

from __future__ import annotations

from dataclasses import dataclass

import jinja2
from tokenizers import Tokenizer

from precis.detokenize import Detokenizer
from precis.errors import InvalidRequest, UnsupportedModel
from precis.template import common_start, compiled, marks, split
from precis.wire.messages import Message, ModelCard
from precis.wire.records import around

_REPEAT_FIRST = "Repeat the previous context exactly."
_REPEAT_NEXT = "Repeat the part of the previous context exactly, starting with "
_ACKNOWLEDGED = Message("assistant", "OK.")  # for templates that insist on alternating roles


@dataclass(frozen=True, slots=True)
class ContextPart:
    """The context half of a prompt.

    Attributes:
        token_ids: at most one BOS, ending with the seam.
        body: start and stop of the caller's text inside the template.
        roles: of the messages as rendered; the query part is rendered to fit them.
    """

    token_ids: list[int]
    body: tuple[int, int]
    roles: tuple[str, ...]

    @property
    def protected(self) -> list[tuple[int, int]]:
        """The template's own tokens around the body, which are always kept."""
        return around(self.body, len(self.token_ids))


class Prompter:
    """Renders and tokenizes for one model. Immutable; shared by all requests."""

    def __init__(self, card: ModelCard) -> None:
        self._tokenizer = Tokenizer.from_str(card.tokenizer_json)
        self._plain = Tokenizer.from_str(card.tokenizer_json)
        self._plain.encode_special_tokens = True
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bos, self._eos = card.bos_token, card.eos_token
        self._template = compiled(card.chat_template) if card.chat_template else None
        bos_id = self._tokenizer.token_to_id(card.bos_token) if card.bos_token else None
        with_special = self._tokenizer.encode("a").ids
        self._bos_id = bos_id if bos_id is not None and with_special[:1] == [bos_id] else None

    @property
    def n_vocabulary(self) -> int:
        """Tokens that there are."""
        return self._tokenizer.get_vocab_size()

    def context_part(self, messages: list[Message]) -> ContextPart:
        """Render whole messages with the model's template.

        Raises:
            InvalidRequest: if the template refuses the messages.
        """
        if self._template is None:
            body = self._encode("\n\n".join(m.content for m in messages), plain=True)
            start = self._with_bos([])
            return ContextPart(
                [*start, *body, *self._encode("\n")],
                (len(start), len(start) + len(body)),
                tuple(m.role for m in messages),
            )
        fitted = self._fit(messages)
        roles = tuple(m.role for m in fitted)
        suffix = self._seam(roles)
        rendered = self._render(marks(roles), generate=False)
        pieces = split(rendered, len(fitted))
        tokens = self._with_bos(self._encode(pieces[0]))
        first_body = next((i for i, m in enumerate(fitted) if m.role != "system"), 0)
        body_start = body_stop = len(tokens)
        for index, message in enumerate(fitted):
            if index == first_body:
                body_start = len(tokens)
            tokens += self._encode(message.content, plain=True)
            if message is not _ACKNOWLEDGED:
                body_stop = len(tokens)
            tokens += self._encode(pieces[index + 1] if index + 1 < len(fitted) else suffix)
        return ContextPart(tokens, (body_start, body_stop), roles)

    def appended(self, roles: tuple[str, ...], text: str) -> ContextPart:
        """What lets a context grow by text, from its seam to the next: one more message of the user.

        Args:
            roles: of the context; empty for a raw one, which grows by the text as it is.
            text: not empty.

        Returns:
            The tokens alone, the span of the text in them, and the roles of the whole context then.

        Raises:
            InvalidRequest: if the template takes no further message.
        """
        if not roles:
            tokens = self.raw(text, begins=False)
            return ContextPart(tokens, (0, len(tokens)), ())
        if self._template is None:
            tokens = self._encode(text, plain=True)
            return ContextPart([*tokens, *self._encode("\n")], (0, len(tokens)), (*roles, "user"))
        more = Message("user", text)
        before, problem = self._seam(roles), InvalidRequest("the model's chat template takes no further message")
        for form in ([more], [more, _ACKNOWLEDGED], [_ACKNOWLEDGED, more], [_ACKNOWLEDGED, more, _ACKNOWLEDGED]):
            whole = (*roles, *(m.role for m in form))
            try:
                pieces = split(self._render(marks(whole), generate=False), len(whole))[len(roles) : -1]
                pieces.append(self._seam(whole))
            except InvalidRequest as error:
                problem = error
                continue
            if not pieces[0].startswith(before):
                raise UnsupportedModel("the model's chat template rewrites earlier turns, so that no context can grow")
            tokens, body = self._encode(pieces[0][len(before) :]), (0, 0)
            for message, piece in zip(form, pieces[1:], strict=True):
                start = len(tokens)
                tokens += self._encode(message.content, plain=True)
                body = (start, len(tokens)) if message is more else body
                tokens += self._encode(piece)
            return ContextPart(tokens, body, whole)
        raise problem

    def query_part(self, roles: tuple[str, ...], messages: list[Message]) -> list[int]:
        """Render the messages that follow a context, up to the start of the answer.

        Args:
            roles: of the context, from its `ContextPart`.
            messages: at least one.

        Raises:
            InvalidRequest: if the template refuses the messages.
        """
        if self._template is None:
            return self._encode("\n".join(m.content for m in messages), plain=True) + self._encode("\n")
        pieces = self._query_pieces(roles, [m.role for m in messages])
        tokens = self._encode(pieces[0])
        for message, piece in zip(messages, pieces[1:], strict=True):
            tokens += self._encode(message.content, plain=True) + self._encode(piece)
        return tokens

    def closing(self, roles: tuple[str, ...]) -> list[int]:
        """What ends the last of these messages, where only its content was fed: tokens up to the seam."""
        return self._encode("\n") if self._template is None else self._encode(self._seam(roles))

    def whole(self, messages: list[Message]) -> list[int]:
        """Render a prompt that stands on no context, up to the start of the answer.

        Args:
            messages: at least one.

        Raises:
            InvalidRequest: if the template refuses the messages.
        """
        if self._template is None:
            return self._with_bos(self._encode("\n\n".join(m.content for m in messages) + "\n", plain=True))
        pieces = split(self._render(marks(tuple(m.role for m in messages)), generate=True), len(messages))
        tokens = self._encode(pieces[0])
        for message, piece in zip(messages, pieces[1:], strict=True):
            tokens += self._encode(message.content, plain=True) + self._encode(piece)
        return self._with_bos(tokens)

    def raw(self, text: str, *, begins: bool) -> list[int]:
        """Tokens of text as it is; a BOS if it begins a prompt and the model wants one."""
        tokens = self._encode(text)
        return self._with_bos(tokens) if begins else tokens

    def raw_part(self, text: str) -> ContextPart:
        """A whole context of text as it is."""
        tokens = self.raw(text, begins=True)
        n_bos = 1 if self._bos_id is not None and tokens[:1] == [self._bos_id] else 0
        return ContextPart(tokens, (n_bos, len(tokens)), ())

    def repeat_parts(self, roles: tuple[str, ...]) -> tuple[list[int], tuple[list[int], list[int]]]:
        """Tokens that ask to repeat a context: for its first part, and around the start of a later part.

        Args:
            roles: of the context; empty for a raw one.
        """
        if self._template is None or not roles:
            opening = self._encode("\n\n" + _REPEAT_NEXT)
            return self._encode("\n\n" + _REPEAT_FIRST + "\n"), (opening, self._encode("\n"))
        before, after = self._query_pieces(roles, ["user"])
        opening = self._encode(before) + self._encode(_REPEAT_NEXT, plain=True)
        first = self._encode(before) + self._encode(_REPEAT_FIRST, plain=True) + self._encode(after)
        return first, (opening, self._encode(after))

    def pieces(self, text: str, most: int) -> list[str]:
        """A text cut into pieces of about equal length, of `most` tokens or less, at paragraphs where it has some."""
        offsets = self._plain.encode(text, add_special_tokens=False).offsets
        n_pieces = max(1, -(-len(offsets) // max(1, most * 9 // 10)))  # a tenth of room to find a good place in
        size, found, at, token = -(-len(offsets) // n_pieces), list[str](), 0, 0
        while len(offsets) - token > most:
            latest = offsets[min(token + most, len(offsets)) - 1][0]
            wanted = offsets[token + size - 1][0]
            stop = _good_place(text, at + (wanted - at) * 4 // 5, wanted, latest)
            found.append(text[at:stop])
            at = stop
            token = next(index for index in range(token, len(offsets)) if offsets[index][1] > at)
        return [*found, text[at:]]

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, without special ones."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def piece(self, token_id: int) -> str:
        """Text of one token alone; incomplete characters show as U+FFFD."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """A new one for one answer."""
        return Detokenizer(self._tokenizer)

    def _fit(self, messages: list[Message]) -> list[Message]:
        """The messages in the first form that the template renders with a user's turn after them."""
        system = [m for m in messages if m.role == "system"]
        rest = [m for m in messages if m.role != "system"]
        merged = rest
        if system and rest:
            text = "\n\n".join(m.content for m in [*system, rest[0]])
            merged = [Message(rest[0].role, text), *rest[1:]]
        forms = [messages, [*messages, _ACKNOWLEDGED], merged, [*merged, _ACKNOWLEDGED]]
        problem: Exception | None = None
        for form in forms:
            try:
                self._seam(tuple(m.role for m in form))
            except InvalidRequest as error:
                problem = problem or error
            else:
                return form
        raise problem or InvalidRequest("a context needs at least one message")

    def _seam(self, roles: tuple[str, ...]) -> str:
        """Template text between the context's last content and the seam: what both renderings share, up to the last
        special token in it."""
        alone = split(self._render(marks(roles), generate=False), len(roles))[-1]
        followed = split(self._render(marks((*roles, "user")), generate=True), len(roles) + 1)[len(roles)]
        shared = common_start(alone, followed)
        encoded = self._tokenizer.encode(shared, add_special_tokens=False)
        ends = [end for i, (_, end) in zip(encoded.ids, encoded.offsets, strict=True) if i in self._special]
        return shared[: ends[-1]] if ends else shared

    def _query_pieces(self, roles: tuple[str, ...], query_roles: list[str]) -> list[str]:
        """Template text around the query's contents, from the seam on."""
        n = len(roles)
        pieces = split(self._render(marks((*roles, *query_roles)), generate=True), n + len(query_roles))
        suffix = self._seam(roles)
        if not pieces[n].startswith(suffix):
            raise UnsupportedModel("the model's chat template rewrites earlier turns, so that no context can be reused")
        return [pieces[n][len(suffix) :], *pieces[n + 1 :]]

    def _render(self, messages: list[Message], *, generate: bool) -> str:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self._template.render(  # type: ignore[union-attr]
                messages=plain,
                add_generation_prompt=generate,
                bos_token=self._bos,
                eos_token=self._eos,
                tools=None,
                enable_thinking=False,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error

    def _encode(self, text: str, *, plain: bool = False) -> list[int]:
        tokenizer = self._plain if plain else self._tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def _with_bos(self, tokens: list[int]) -> list[int]:
        if self._bos_id is None or tokens[:1] == [self._bos_id]:
            return tokens
        return [self._bos_id, *tokens]


def _good_place(text: str, first: int, wanted: int, last: int) -> int:
    """Where to cut: after a paragraph, a line, a sentence or a word between `first` and `last`, or else at `wanted`."""
    for end in ("\n\n", "\n", ". ", " "):
        if (found := text.rfind(end, first, last)) >= 0:
            return found + len(end)
    return max(wanted, first + 1)
