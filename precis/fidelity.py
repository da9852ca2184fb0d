"""How close a compressed cache is to the full one, measured while the full one is still there.

Two probes are teacher-forced on both caches: the document's last tokens read once more, and its first tokens in
answer to the request to repeat it. Reported are the mean KL(full || compressed) per predicted token, in nats, and how
often both agree on the best token. This says how well the document itself can still be read out of the snapshot. It
does not say whether an answer is right, and it says nothing about text that the two short probes do not touch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill, Snapshot
from precis.engine import step
from precis.families import Model
from precis.full_cache import Document, Overlay
from precis.session import Feed, Session

_PROBE = 64


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What was measured.

    Attributes:
        kl: mean KL(full || compressed), nats per token.
        top1_agreement: share of tokens on whose best guess both caches agree.
        n_tokens: predicted tokens measured.
    """

    kl: float
    top1_agreement: float
    n_tokens: int


def probes(document: Document, room: int) -> list[tuple[list[int], int]]:
    """Token sequences to teacher-force, each with the number of leading tokens that are not measured.

    Args:
        document: with its body and its request to repeat.
        room: tokens that the model has left after the context.
    """
    start, stop = document.body
    tail = document.token_ids[max(start, stop - _PROBE) : stop].tolist()
    head = document.token_ids[start : min(stop, start + _PROBE)].tolist()
    asked = list(document.repeat_first)
    both = [(tail, 0), (asked + head, max(0, len(asked) - 1))]
    return [(tokens[:room], skip) for tokens, skip in both if len(tokens[:room]) > skip + 1]


@torch.inference_mode()
def measure(model: Model, document: Document, full: Prefill, snapshot: Snapshot) -> Fidelity:
    """Compare a snapshot, as it will be loaded, with the full cache it came from."""
    kls, agreements = [], []
    for tokens, skip in probes(document, model.geometry.max_length - document.n_tokens):
        expected = full_logits(model, full, tokens)[skip:-1].log_softmax(-1)
        found = step(model, [Feed(Session.on(snapshot), tokens, all_logits=True)])[0][skip:-1].log_softmax(-1)
        kls.append((expected.exp() * (expected - found)).sum(-1))
        agreements.append(expected.argmax(-1) == found.argmax(-1))
    if not kls:
        return Fidelity(0.0, 1.0, 0)
    kl, agreement = torch.cat(kls), torch.cat(agreements)
    return Fidelity(max(0.0, float(kl.mean())), float(agreement.float().mean()), int(kl.shape[0]))


def full_logits(model: Model, full: Prefill, tokens: list[int]) -> Tensor:
    """Float32 logits [n, vocabulary] of tokens that follow a full cache; the cache is only read."""
    positions = torch.arange(full.n_tokens, full.n_tokens + len(tokens), device=model.device)
    token_ids = torch.tensor(tokens, device=model.device)
    out = model.hf(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, kv_store=Overlay(full))
    return out.logits[0].float()  # type: ignore[no-any-return]
