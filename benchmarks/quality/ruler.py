"""Documents of any length with planted facts, after the tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654).

Filler comes from a real text; everything else is drawn from a seed. Kinds: `niah_single`, `niah_multikey` (many keys,
one asked), `niah_multivalue` (all values of one key), `vartrack` (all names of a value through assignments), `common`
(the words that occur most), `lookup` (a line of key: value).
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.quality.corpus import Question, Text

WORDS = tuple(
    """anchor basket candle dagger engine feather garden hammer island jacket kettle ladder marble needle orange pepper
    quiver ribbon saddle temple umbrella violin window yellow zipper bridge copper dragon falcon guitar harbor insect
    jungle kitten lemon magnet nickel oyster pirate rocket""".split()  # noqa: SIM905 — a list of words reads better so
)


@dataclass(frozen=True, slots=True)
class Length:
    """How long a document is to be.

    Attributes:
        n_tokens: about.
        count: tokens of a text.
    """

    n_tokens: int
    count: Callable[[str], int]


def documents(filler: str, length: Length, seed: int = 0, n_asked: int = 4) -> list[Text]:
    """One document per kind.

    Args:
        filler: real text, cut and repeated as needed.
        length: of each document.
        seed: of everything drawn.
        n_asked: questions per document.
    """
    chance = random.Random(seed)
    made = [
        _needles("niah_single", filler, length, chance, n_keys=n_asked, n_values=1),
        _needles("niah_multikey", filler, length, chance, n_keys=24, n_values=1),
        _needles("niah_multivalue", filler, length, chance, n_keys=n_asked, n_values=3),
        _chains(filler, length, chance, n_asked),
        _common(length, chance),
        _lookup(length, chance),
    ]
    return [Text(text.name, text.text, text.continuation, text.questions[:n_asked]) for text in made]


def _planted(filler: str, sentences: list[str], length: Length, chance: random.Random) -> str:
    """Filler of the wanted length with the sentences spread over it, in order."""
    paragraphs = [part.strip() for part in filler.split("\n\n") if part.strip()]
    room = length.n_tokens - sum(length.count(sentence + "\n\n") for sentence in sentences)
    chosen: list[str] = []
    while room > 0:
        paragraph = paragraphs[len(chosen) % len(paragraphs)]
        size = length.count(paragraph + "\n\n")
        if size > room and chosen:
            break
        chosen.append(paragraph)
        room -= size
    places = sorted(chance.randrange(len(chosen) + 1) for _ in sentences)
    for place, sentence in reversed(list(zip(places, sentences, strict=True))):
        chosen.insert(place, sentence)
    return "\n\n".join(chosen)


def _needles(kind: str, filler: str, length: Length, chance: random.Random, *, n_keys: int, n_values: int) -> Text:
    keys = chance.sample(WORDS, n_keys)
    values = {key: [str(chance.randrange(1000, 10000)) for _ in range(n_values)] for key in keys}
    sentences = [f"One of the special magic numbers for {key} is: {value}." for key in keys for value in values[key]]
    chance.shuffle(sentences)
    asked = "What are all" if n_values > 1 else "What is one of"
    questions = [
        Question(
            f"{kind}-{i}",
            kind,
            f"{asked} the special magic numbers for {key}?",
            f"One of the special magic numbers for {key} is:" if n_values == 1 else "",
            tuple(values[key]),
            every=n_values > 1,
        )
        for i, key in enumerate(keys)
    ]
    return Text(f"ruler-{kind}", _planted(filler, sentences, length, chance), "", tuple(questions))


def _chains(filler: str, length: Length, chance: random.Random, n_chains: int, n_links: int = 3) -> Text:
    names = ["".join(chance.choices(string.ascii_uppercase, k=4)) for _ in range(n_chains * n_links)]
    questions, sentences = [], []
    for index in range(n_chains):
        chain, value = names[index * n_links : (index + 1) * n_links], str(chance.randrange(10000, 100000))
        links = [f"VAR {chain[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(chain))]
        sentences.append(links)
        text = f"Which variables have the value {value}?"
        questions.append(Question(f"vartrack-{index}", "vartrack", text, "", tuple(chain), every=True))
    ordered = [links[step] for step in range(n_links) for links in sentences]  # a variable comes after its source
    return Text("ruler-vartrack", _planted(filler, ordered, length, chance), "", tuple(questions))


def _common(length: Length, chance: random.Random, n_common: int = 3) -> Text:
    common = chance.sample(WORDS, n_common)
    rare = [word for word in WORDS if word not in common]
    words: list[str] = []
    while length.count("\n".join(words)) < length.n_tokens:
        block = common * 4 + chance.sample(rare, 8)
        chance.shuffle(block)
        words += block
    question = Question("common-0", "common", "Which words occur most often?", "", tuple(common), every=True)
    return Text("ruler-common", "\n".join(words), "", (question,))


def _lookup(length: Length, chance: random.Random) -> Text:
    rows: dict[str, str] = {}
    while length.count("\n".join(f"{key}: {value}" for key, value in rows.items())) < length.n_tokens:
        for _ in range(4):
            rows["".join(chance.choices(string.ascii_lowercase, k=6))] = str(chance.randrange(1000, 10000))
    keys = chance.sample(sorted(rows), 12)
    questions = tuple(Question(f"lookup-{i}", "kv", "", f"{key}:", (rows[key],)) for i, key in enumerate(keys))
    return Text("ruler-lookup", "\n".join(f"{key}: {value}" for key, value in rows.items()) + "\n", "", questions)
