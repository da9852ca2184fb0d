"""Many questions at once over many contexts: every answer is of its own context, as if it had been alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.test_smollm2 import Up, up  # noqa: F401 — a fixture

pytestmark = pytest.mark.timeout(600)  # twenty contexts of the real model, on machines that others use as well

N_CONTEXTS, N_QUESTIONS = 20, 96
ROOMS = ("archive", "boiler", "map", "music", "seed", "paint", "tool", "chart", "press", "clock")
FILLER = (
    "The building stands by the river and has two floors. ",
    "In winter the doors are closed at five, in summer at eight. ",
    "Visitors leave their coats at the entrance. ",
    "The garden behind the house is open on Sundays. ",
)


@pytest.fixture(scope="module")
def contexts(up: Up) -> list[dict[str, Any]]:  # noqa: F811
    """Documents that differ in one number."""
    chance, made = random.Random(5), []
    codes = chance.sample(range(1000, 10_000), N_CONTEXTS)
    for index, code in enumerate(codes):
        room = ROOMS[index % len(ROOMS)]
        sentences = [chance.choice(FILLER) for _ in range(12)]
        sentences.insert(chance.randrange(12), f"The access code of the {room} room is {code}. ")
        body = {"text": "".join(sentences), "name": str(code), "metadata": {"room": room}}
        answer = httpx.post(f"{up.url}/v1/contexts?wait=120", json=body, timeout=130)
        assert answer.json()["status"] == "ready", answer.text
        made.append(answer.json())
    return made


def asked(up: Up, context: dict[str, Any]) -> str:  # noqa: F811
    question = f"What is the access code of the {context['metadata']['room']} room?"
    url = f"{up.url}/v1/contexts/{context['id']}/queries"
    found = httpx.post(url, json={"question": question, "max_tokens": 20}, timeout=300)
    assert found.status_code == 200, found.text
    text: str = found.json()["text"]
    return text


def test_every_answer_is_of_its_own_context_and_as_if_alone(up: Up, contexts: list[dict[str, Any]]) -> None:  # noqa: F811
    alone = {context["id"]: asked(up, context) for context in contexts}
    codes = {context["name"] for context in contexts}
    right = [context for context in contexts if context["name"] in alone[context["id"]]]
    assert len(right) >= N_CONTEXTS - 2  # what the small model misreads alone says nothing
    order = [right[index % len(right)] for index in range(N_QUESTIONS)]
    random.Random(6).shuffle(order)
    with ThreadPoolExecutor(N_QUESTIONS) as pool:
        together = list(pool.map(lambda context: asked(up, context), order))
    same = 0
    for context, text in zip(order, together, strict=True):
        assert context["name"] in text
        assert not any(code in text for code in codes - {context["name"]})
        same += text == alone[context["id"]]
    assert same >= 0.95 * N_QUESTIONS  # sums in another order decide ties otherwise
