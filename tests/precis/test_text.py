"""The seam of a prompt, exactly one BOS, and text that never comes in half characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precis.detokenize import Detokenizer, StopText
from precis.errors import InvalidRequest
from precis.text import Prompter
from precis.wire.messages import Message
from tests.words import TEMPLATES, byte_tokenizer, card

BOS = 256
TEXTS = [
    "plain",
    "ends with space ",
    "digits 123",
    "日本語テキスト",
    "emoji 👩‍👩‍👧‍👦",
    "\r\n\r\n",
    "tab\tand\u00a0space",
    "<|im_end|><s>",
]


def seam(template: str, *, adds_bos: bool = False) -> Prompter:
    return Prompter(card(template, adds_bos=adds_bos))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_context_and_query_tokens_make_one_prompt_with_one_bos_at_most(
    template: str, adds_bos: bool, text: str
) -> None:
    prompter = seam(template, adds_bos=adds_bos)
    part = prompter.context_part([Message("user", text)])
    query = prompter.query_part(part.roles, [Message("user", "Why?")])
    wants_bos = adds_bos or template in ("llama3", "gemma")
    assert (part.token_ids + query).count(BOS) == int(wants_bos)
    assert (part.token_ids[0] == BOS) == wants_bos
    start, stop = part.body
    assert prompter.decode(part.token_ids[start:stop]) == text
    assert "Why?" in prompter.decode(query)


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", "phi3"])
def test_the_context_ends_at_a_special_token_and_the_whole_is_what_the_template_renders(template: str) -> None:
    prompter = seam(template)
    part = prompter.context_part([Message("user", "A document.")])
    query = prompter.query_part(part.roles, [Message("user", "Why?")])
    assert part.token_ids[-1] > BOS
    messages = [Message("user", "A document.")]
    if template == "gemma":  # its roles must alternate
        messages.append(Message("assistant", "OK."))
    rendered = prompter._render([*messages, Message("user", "Why?")], generate=True)
    assert byte_tokenizer().decode(part.token_ids + query, skip_special_tokens=False) == rendered


@pytest.mark.parametrize("template", ["chatml", "llama3", "phi3"])
@given(text=st.text(min_size=1, max_size=40), question=st.text(min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_no_text_can_shift_the_seam_or_end_its_turn(template: str, text: str, question: str) -> None:
    prompter = seam(template)
    part = prompter.context_part([Message("user", text + "<|im_end|>")])
    query = prompter.query_part(part.roles, [Message("user", question + "<|eot_id|>")])
    plain = prompter.context_part([Message("user", "x")])
    n_special = sum(token >= BOS for token in part.token_ids)
    assert n_special == sum(token >= BOS for token in plain.token_ids)
    assert sum(t >= BOS for t in query) == sum(
        t >= BOS for t in prompter.query_part(part.roles, [Message("user", "x")])
    )


def test_instructions_are_protected_and_merged_where_there_is_no_system_role() -> None:
    messages = [Message("system", "Be brief."), Message("user", "A document.")]
    part = seam("chatml").context_part(messages)
    prompter = seam("chatml")
    start, stop = part.body
    assert prompter.decode(part.token_ids[start:stop]) == "A document."
    assert part.protected == [(0, start), (stop, len(part.token_ids))]
    merged = seam("gemma").context_part(messages)
    assert merged.roles == ("user", "assistant")
    assert "Be brief.\n\nA document." in seam("gemma").decode(merged.token_ids)


def test_a_conversation_can_be_a_context() -> None:
    messages = [Message("user", "one"), Message("assistant", "two"), Message("user", "three")]
    part = seam("chatml").context_part(messages)
    start, stop = part.body
    body = seam("chatml").decode(part.token_ids[start:stop])
    assert body.startswith("one")
    assert body.endswith("three")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_context_grows_by_a_message_and_is_what_the_template_renders_of_all(template: str, text: str) -> None:
    prompter = seam(template)
    part = prompter.context_part([Message("user", "A document.")])
    more = prompter.appended(part.roles, text)
    start, stop = more.body
    assert prompter.decode(more.token_ids[start:stop]) == text
    query = prompter.query_part(more.roles, [Message("user", "Why?")])
    tokens = part.token_ids + more.token_ids + query
    assert tokens.count(BOS) == part.token_ids.count(BOS)
    if template in ("chatml", "llama3", "gemma", "phi3") and "<" not in text and text == text.strip():
        said = {"user": iter(["A document.", text]), "assistant": iter(["OK."] * 9)}
        messages = [Message(role, next(said[role])) for role in more.roles]
        rendered = prompter._render([*messages, Message("user", "Why?")], generate=True)
        assert byte_tokenizer().decode(tokens, skip_special_tokens=False) == rendered
    again = prompter.appended(more.roles, "And more.")
    assert len(again.roles) > len(more.roles)


def test_a_raw_context_grows_by_its_text_alone() -> None:
    prompter = seam("chatml")
    more = prompter.appended((), "more <s>")
    assert (prompter.decode(more.token_ids), more.body, more.roles) == ("more ", (0, len(more.token_ids)), ())


def test_raw_text_is_taken_as_it_is() -> None:
    prompter = seam("chatml", adds_bos=True)
    part = prompter.raw_part("Once upon")
    assert part.token_ids[0] == BOS
    assert part.body == (1, 10)
    assert prompter.decode(part.token_ids + prompter.raw(" a time", begins=False)) == "Once upon a time"


def test_repeat_parts_enclose_the_tokens_to_start_with() -> None:
    prompter = seam("chatml")
    part = prompter.context_part([Message("user", "doc")])
    first, (opening, closing) = prompter.repeat_parts(part.roles)
    assert "Repeat the previous context exactly." in prompter.decode(first)
    assert prompter.decode(opening).endswith("starting with ")
    assert prompter.decode(closing).endswith("assistant\n")


def test_a_template_that_refuses_is_told_to_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="alternate"):
        seam("gemma").query_part(("user", "assistant"), [Message("assistant", "x")])


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_detokenizing_step_by_step_gives_the_whole_text_and_never_half_a_character(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True  # text that spells a special token is text
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_emoji_and_cjk_come_whole() -> None:
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode("日👍🏽é").ids]
    assert [p for p in pieces if p] == ["日", "👍", "🏽", "é"]


def test_an_answer_cut_inside_a_character_ends_with_a_replacement() -> None:
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer)
    shown = "".join(stream.push(token) for token in tokenizer.encode("ab日").ids[:-1])
    assert shown == "ab"
    assert stream.finish() == "\ufffd"


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
@settings(max_examples=200, deadline=None)
def test_stop_strings_cut_where_a_search_of_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    checker, shown, stopped = StopText(stops), "", False
    for piece in pieces:
        part, stopped = checker.push(piece)
        shown += part
        if stopped:
            break
    else:
        shown += checker.finish()
    assert stopped == bool(ends)
    if not ends:
        assert shown == whole
    else:
        assert whole.startswith(shown)
        assert not any(stop in shown for stop in stops)
