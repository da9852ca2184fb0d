"""Handle a ScoreJob: log-probabilities of given continuations on the compressed cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from precis.core import Snapshot
from precis.engine import Feed, Session, step
from precis.wire.messages import ItemScore, ScoreItem, ScoreJob
from workers.models import Served


def score(served: Served, snapshot: Snapshot, job: ScoreJob, between: Callable[[], None]) -> list[ItemScore]:
    """Score every item on a tail of its own.

    Args:
        served: the model.
        snapshot: of the context; it is only read.
        job: items with at least one prompt token and one continuation token each.
        between: called between items; raises to stop.
    """
    scores = []
    for item in job.items:
        between()
        scores.append(score_item(served, snapshot, item))
    return scores


def score_item(served: Served, snapshot: Snapshot, item: ScoreItem) -> ItemScore:
    """Teacher-force prompt and continuation; the row before a token predicts it."""
    prompt, continuation = (np.frombuffer(part, "<i4").tolist() for part in (item.prompt, item.continuation))
    tokens = [*prompt, *continuation[:-1]]
    logits = step(served.model, [Feed(Session.on(snapshot), tokens, all_logits=True)])[0][len(prompt) - 1 :]
    logprobs = logits.log_softmax(-1)
    wanted = torch.tensor(continuation, device=logits.device)
    found = logprobs[torch.arange(len(continuation), device=logits.device), wanted]
    return ItemScore(
        tokens=[served.prompter.piece(token) for token in continuation],
        logprobs=found.tolist(),
        greedy=(logits.argmax(-1) == wanted).tolist(),
    )
