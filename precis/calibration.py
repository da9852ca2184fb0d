"""Measure a model once: which heads retrieve, which kv heads must see everything, which layers suffer.

Samples are texts with a fact in the middle, a question about it, and its answer. All is read off the model's own
attention and logits; nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from precis.artifacts import Artifact
from precis.attention.dense import attention_weights
from precis.core import Prefill, Selection, Snapshot, SnapshotHeader
from precis.engine import step
from precis.families import Model, Rotary
from precis.full_cache import Between, Document, silent
from precis.observations.window import WindowQueries
from precis.prefill import prefill
from precis.ranking import rank_per_head
from precis.scorers.compresskv import CompressKV
from precis.selection import gather
from precis.session import Feed, Session
from precis.wire.presets import HEADS

_SINKS, _RECENT = 16, 64  # what an ablated head still sees
_PACK = 16  # ablated heads in one forward
_KEPT = 1 / 8  # of the document, for the layers' errors


@dataclass(frozen=True, slots=True)
class Sample:
    """A text with a fact, and a question about it.

    Attributes:
        token_ids: of the text.
        fact: start and stop of the fact inside it.
        question: tokens up to the answer's start.
        answer: its tokens, at least one.
    """

    token_ids: tuple[int, ...]
    fact: tuple[int, int]
    question: tuple[int, ...]
    answer: tuple[int, ...]


@torch.no_grad()
def calibrate(
    model: Model, rotary: Rotary, samples: Sequence[Sample], weights: Sequence[str], between: Between = silent
) -> Artifact:
    """Tables of a model, averaged over samples.

    Args:
        model: from `attention.plug.attach`.
        rotary: of the model.
        samples: at least one; of those whose answers the model does not find, only importance and errors count.
        weights: digests of the weights that the tables will be used with.
        between: called after each sample with ("calibrate", done, total).
    """
    g = model.geometry
    retrieval = torch.zeros(g.n_layers, g.n_heads)
    importance, errors = torch.zeros(g.n_layers, g.n_kv_heads), torch.zeros(g.n_layers)
    n_right = 0
    between("calibrate", 0, len(samples))
    for done, sample in enumerate(samples, 1):
        text = torch.tensor(sample.token_ids)
        read = prefill(model, rotary, Document(text, (0, len(text))), CompressKV().needs)
        whole = _whole(read)
        expected = _answered(model, [Session.on(whole)], sample)[0]
        right = expected.argmax(-1).cpu() == torch.tensor(sample.answer)
        full = _read_through(model, rotary, sample)
        retrieval += retrieved(full, sample, right)
        n_right += int(right.sum())
        importance += ablated(model, whole, sample, expected)
        errors += suffered(full, read, retrieval, len(sample.answer))
        between("calibrate", done, len(samples))
    tables = {
        "retrieval": retrieval / max(1, n_right),
        "importance": importance / len(samples),
        "layer_errors": errors / len(samples),
    }
    n_answered = sum(len(sample.answer) for sample in samples)
    made = {"samples": str(len(samples)), "right": f"{n_right} of {n_answered} tokens"}
    return Artifact(HEADS, tuple(weights), tables, made)


def retrieved(full: Prefill, sample: Sample, right: Tensor) -> Tensor:
    """Attention that each query head pays to the fact while the answer is given, summed over rightly given tokens.

    As CompressKV's identification (arXiv:2508.02401): all of the fact counts, not only the token that is copied.

    Args:
        full: of text, question and answer, with the answer's queries.
        sample: whose fact it is.
        right: [answer] bool.

    Returns:
        [L, H] float32.
    """
    found = torch.zeros(full.geometry.n_layers, full.geometry.n_heads)
    for layer in range(full.geometry.n_layers):
        weights = _rows(full, layer, len(sample.answer)).flatten(0, 1)  # [H, answer, n]
        mass = weights[..., sample.fact[0] : sample.fact[1]].sum(-1).cpu()
        found[layer] = mass[:, right].sum(-1)
    return found


def ablated(model: Model, whole: Snapshot, sample: Sample, expected: Tensor) -> Tensor:
    """What is lost where one kv head sees the text's ends only: KL over the answer, nats per token, [L, K] float32.

    Differs from DuoAttention and PruLong, which train gates for all heads together: here one head at a time is cut as
    a snapshot would cut it.
    """
    g = model.geometry
    heads = [(layer, head) for layer in range(g.n_layers) for head in range(g.n_kv_heads)]
    found = torch.zeros(g.n_layers, g.n_kv_heads)
    logs = expected.log_softmax(-1)
    for start in range(0, len(heads), _PACK):
        some = heads[start : start + _PACK]
        sessions = [Session.on(whole) for _ in some]
        for session, (layer, head) in zip(sessions, some, strict=True):
            keys, values, positions, _ = whole.entries(layer, head)
            ends = (positions < _SINKS) | (positions >= whole.header.n_tokens - _RECENT)
            session.seen[layer, head] = (keys[ends], values[ends], positions[ends], None)
        for (layer, head), logits in zip(some, _answered(model, sessions, sample), strict=True):
            found[layer, head] = (logs.exp() * (logs - logits.log_softmax(-1))).sum(-1).mean().cpu()
    return found.clamp_min(0)


def suffered(full: Prefill, text: Prefill, retrieval: Tensor, n_rows: int) -> Tensor:
    """Relative error of each layer's attention output at the answer, with an eighth of the text kept: [L] float32.

    Args:
        full: of text, question and answer, with the answer's queries.
        text: of the text alone, with what CompressKV reads.
        retrieval: [L, H] so far; its best heads vote.
        n_rows: tokens of the answer.
    """
    g, n_text = full.geometry, text.n_tokens
    scores = CompressKV().score(Prefill(g, text.keys, text.values, text.observed, {"retrieval": retrieval}))
    ends = torch.arange(n_text, device=scores.device) >= n_text - CompressKV().n_window
    keep = ends | (rank_per_head(scores, ends) < int(n_text * _KEPT))
    found = torch.zeros(g.n_layers)
    for layer in range(g.n_layers):
        weights = _rows(full, layer, n_rows)
        values = full.values[layer].float()[:, None]
        whole = weights @ values
        cut = weights.clone()
        cut[..., :n_text] *= keep[layer][:, None, None]
        cut /= cut.sum(-1, keepdim=True).clamp_min(1e-30)
        found[layer] = ((cut @ values - whole).norm() / whole.norm().clamp_min(1e-30)).cpu()
    return found


def _whole(full: Prefill) -> Snapshot:
    g, n_tokens = full.geometry, full.n_tokens
    keep = torch.ones(g.n_layers, g.n_kv_heads, n_tokens, dtype=torch.bool, device=full.keys.device)
    for layer in range(g.n_layers):
        keep[layer, :, : g.first_visible(layer, n_tokens)] = False
    return gather(full, Selection.from_mask(keep), SnapshotHeader("calibration", n_tokens, n_tokens, 0, {}))


def _answered(model: Model, sessions: Sequence[Session], sample: Sample) -> list[Tensor]:
    """Per session, the logits [answer, vocabulary] that predict the answer."""
    tokens = [*sample.question, *sample.answer[:-1]]
    logits = step(model, [Feed(session, tokens, all_logits=True) for session in sessions])
    return [found[len(sample.question) - 1 :] for found in logits]


def _read_through(model: Model, rotary: Rotary, sample: Sample) -> Prefill:
    tokens = torch.tensor([*sample.token_ids, *sample.question, *sample.answer[:-1]])
    return prefill(model, rotary, Document(tokens, (0, len(tokens))), [WindowQueries(len(sample.answer))])


def _rows(full: Prefill, layer: int, n_rows: int) -> Tensor:
    """[K, G, rows, n] attention of the last rows."""
    g, n_tokens = full.geometry, full.n_tokens
    places = torch.arange(n_tokens, device=full.keys.device)[None]
    return attention_weights(
        full.seen(WindowQueries(n_rows))[layer],
        full.keys[layer],
        places[:, n_tokens - n_rows :].T,
        places,
        scaling=g.scaling[layer],
        softcap=g.softcap[layer],
        window=g.windows[layer],
    )
