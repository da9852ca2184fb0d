"""Texts to calibrate on: given ones, or what every Python has with it; and samples with a fact to be found."""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
import random
from collections.abc import Sequence
from pathlib import Path

from precis.calibration import Sample
from precis.errors import InvalidRequest
from precis.full_cache import Document
from precis.pipeline import document_of
from precis.text import Prompter
from precis.wire.messages import Message

_PLACES = ("harbour", "mill", "library", "quarry", "orchard", "lighthouse", "market", "bakery", "station", "garden")
_MODULES = ("argparse", "heapq", "difflib", "csv", "statistics", "calendar", "configparser", "fractions")
_TABLES = ("{name}: {value}", "{name} = {value}", '{{"name": "{name}", "value": {value}}}', "The {name} is {value}.")
_CHARACTERS = 6000  # of a text that are looked at, from one place
_LEAST = 64  # tokens, below which a text tells nothing


def texts_in(folder: Path) -> list[str]:
    """The texts of a folder's files, in order of name.

    Raises:
        InvalidRequest: if there is no such folder, it is empty, or a file is not UTF-8 text.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    if not files:
        raise InvalidRequest(f"{folder} is no folder with texts: give one with a dozen or more of the kind you upload")
    try:
        return [path.read_text("utf-8") for path in files]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"a file in {folder} cannot be read as UTF-8 text: {error}") from error


def standard_texts() -> list[str]:
    """What there is without asking for more: Python's own manual and source code, and tables of words and numbers."""
    draws = random.Random(2)
    prose = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 2000]
    found = [importlib.util.find_spec(name) for name in _MODULES]
    code = [Path(spec.origin).read_text("utf-8") for spec in found if spec is not None and spec.origin]
    words = sorted({word.lower() for text in prose for word in text.split() if word.isalpha() and len(word) > 3})
    kinds = [prose, code, [_table(form, words, draws) for form in _TABLES]]
    longest = max(map(len, kinds))
    return [kind[index] for index in range(longest) for kind in kinds if index < len(kind)]


def _table(form: str, words: Sequence[str], draws: random.Random) -> str:
    return "\n".join(form.format(name=draws.choice(words), value=draws.randrange(10**6)) for _ in range(200))


def documents_of(prompter: Prompter, texts: Sequence[str], n_documents: int, length: int) -> list[Document]:
    """Documents of up to `length` tokens as uploads see them, evenly from all texts; short texts are left out."""
    pieces: list[list[str]] = [
        [text[start : start + _CHARACTERS] for start in range(0, len(text), _CHARACTERS)] for text in texts
    ]
    found: list[Document] = []
    for turn in range(max(map(len, pieces), default=0)):
        for own in pieces:
            if turn < len(own) and len(found) < n_documents:
                whole = document_of(prompter, prompter.context_part([Message("user", own[turn])]))
                stop = min(whole.n_tokens, length)
                if stop - whole.body[0] >= _LEAST:
                    body = (whole.body[0], min(whole.body[1], stop))
                    found.append(Document(whole.token_ids[:stop], body, (), whole.repeat_first, whole.repeat_next))
    return found


def samples_of(prompter: Prompter, text: str, n_samples: int, length: int) -> list[Sample]:
    """Texts of about `length` tokens with a number hidden at depths from front to back, the same ones every time."""
    draws, found = random.Random(1), []
    sentences = [part.strip() + "." for part in text.replace("\n", " ").split(".") if part.strip()]
    for index in range(n_samples if sentences else 0):
        place = _PLACES[index % len(_PLACES)]
        number = str(draws.randrange(1000, 10000))
        fact = f" The secret number of the {place} is {number}."
        filler: list[str] = []
        n_tokens = 0
        while n_tokens < length:
            filler.append(sentences[(index * 7 + len(filler)) % len(sentences)])
            n_tokens += len(prompter.raw(" " + filler[-1], begins=False))
        at = round(len(filler) * (index + 0.5) / n_samples)
        before, after = " ".join(filler[:at]), " ".join(filler[at:])
        span = (len(prompter.raw(before, begins=True)), len(prompter.raw(before + fact, begins=True)))
        tokens = prompter.raw(f"{before}{fact} {after}", begins=True)
        question = prompter.raw(f"\n\nQuestion: What is the secret number of the {place}?\nAnswer: It is", begins=False)
        answer = prompter.raw(f" {number}", begins=False)
        found.append(Sample(tuple(tokens), span, tuple(question), tuple(answer)))
    return found
