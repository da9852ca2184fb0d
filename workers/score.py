"""Handle a ScoreJob: log-probabilities of given continuations on the compressed cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from precis.core import Snapshot
from precis.engine import step
from precis.session import Feed, Session
from precis.text import Prompter
from precis.wire.messages import ItemScore, ScoreItem, ScoreJob
from workers.models import Served

PACK_TOKENS = 512  # per forward: bounds the logits that are held at once

Tokens = tuple[list[int], list[int]]  # prompt, continuation


def score(served: Served, snapshot: Snapshot, job: ScoreJob, between: Callable[[], None]) -> list[ItemScore]:
    """Score every item on a tail of its own, several in one packed forward.

    Args:
        served: the model.
        snapshot: of the context; it is only read.
        job: items with at least one prompt token and one continuation token each.
        between: called between forwards; raises to stop.
    """
    scores: list[ItemScore] = []
    for group in packs([_tokens_of(item) for item in job.items], PACK_TOKENS):
        between()
        feeds = [
            Feed(Session.on(snapshot), [*prompt, *continuation[:-1]], all_logits=True) for prompt, continuation in group
        ]
        for (prompt, continuation), logits in zip(group, step(served.model, feeds), strict=True):
            scores.append(item_score(served.prompter, logits[len(prompt) - 1 :], continuation))
    return scores


def item_score(prompter: Prompter, logits: Tensor, continuation: list[int]) -> ItemScore:
    """Score a continuation of n tokens by the logits [n, vocabulary] that predict them."""
    wanted = torch.tensor(continuation, device=logits.device)
    found = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return ItemScore(
        tokens=[prompter.piece(token) for token in continuation],
        logprobs=found.tolist(),
        greedy=(logits.argmax(-1) == wanted).tolist(),
    )


def packs(items: list[Tokens], limit: int) -> Iterator[list[Tokens]]:
    """Runs of items with at most `limit` tokens together; a longer item stands alone."""
    run: list[Tokens] = []
    for item in items:
        if run and sum(len(p) + len(c) for p, c in [*run, item]) > limit:
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _tokens_of(item: ScoreItem) -> Tokens:
    prompt, continuation = (np.frombuffer(part, "<i4").tolist() for part in (item.prompt, item.continuation))
    return prompt, continuation
