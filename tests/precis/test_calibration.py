"""The tables of a model, against attention and logits of plain transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from precis import artifacts
from precis.artifacts import Artifact
from precis.calibration import Sample, ablated, calibrate, retrieved, suffered
from precis.engine import step
from precis.errors import ArtifactUnusable
from precis.families import Rotary
from precis.observations.window import WindowQueries
from precis.scorers.compresskv import CompressKV
from precis.session import Feed, Session
from precis.wire.presets import HEADS
from tests.precis.build import attached, cut, read, tokens
from tests.tiny import tiny

TEXT, QUESTION, ANSWER = tokens(120), tokens(5, 2), tokens(3, 3)
SAMPLE = Sample(tuple(TEXT.tolist()), (50, 60), tuple(QUESTION.tolist()), tuple(ANSWER.tolist()))
EVERY = torch.cat([TEXT, QUESTION, ANSWER[:-1]])


def test_retrieval_is_the_attention_paid_to_the_fact_by_rows_that_answer_rightly() -> None:
    full = read(attached(), EVERY, WindowQueries(3))
    right = torch.tensor([True, False, True])
    plain = tiny()
    with torch.no_grad():
        attentions = plain(input_ids=EVERY[None], output_attentions=True).attentions
    rows = torch.tensor([len(EVERY) - 3, len(EVERY) - 1])
    expected = torch.stack([found[0, :, rows, 50:60].sum((1, 2)) for found in attentions])
    torch.testing.assert_close(retrieved(full, SAMPLE, right), expected, atol=1e-5, rtol=1e-4)


def test_importance_is_what_the_answer_loses_when_a_head_sees_the_ends_only() -> None:
    model = attached()
    whole = cut(read(model, TEXT))
    asked = [*SAMPLE.question, *SAMPLE.answer[:-1]]
    expected = step(model, [Feed(Session.on(whole), asked, all_logits=True)])[0][4:]
    found = ablated(model, whole, SAMPLE, expected)
    assert found.shape == (4, 2)
    keep = torch.ones(4, 2, 120, dtype=torch.bool)
    keep[2, 1, 16 : 120 - 64] = False
    logs = expected.log_softmax(-1)
    other = step(model, [Feed(Session.on(cut(read(model, TEXT), keep)), asked, all_logits=True)])[0][4:].log_softmax(-1)
    kl = float((logs.exp() * (logs - other)).sum(-1).mean())
    assert float(found[2, 1]) == pytest.approx(kl, rel=1e-3, abs=1e-8)
    assert len(set(found.flatten().tolist())) == 8


def test_layers_that_lose_nothing_have_no_error() -> None:
    full, text = read(attached(), EVERY, WindowQueries(3)), read(attached(), TEXT, *CompressKV().needs)
    errors = suffered(full, text, torch.rand(4, 4), 3)
    assert bool((errors > 0).all())
    silent = full.values.clone()
    silent[2, :, :120] = 0
    nothing_there = replace(full, values=silent)
    assert not torch.equal(suffered(nothing_there, text, torch.rand(4, 4), 3), errors)


def test_an_artifact_survives_its_bytes_and_nothing_else_does() -> None:
    model = attached()
    told: list[int] = []
    made = calibrate(model, Rotary(model, 512), [SAMPLE, SAMPLE], ["a", "b"], lambda _, done, __: told.append(done))
    assert told == [0, 1, 2]
    data = made.to_bytes()
    again = artifacts.read(data)
    assert again.fingerprint == made.fingerprint
    assert again.weights == ("a", "b")
    again.check("b", model.geometry)
    for wrong in (b"", data[:40], data[:-1], data + b"x", b"\xff" * 16):
        with pytest.raises(ArtifactUnusable):
            artifacts.read(wrong)
    for at in range(len(data) - 200, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(ArtifactUnusable):
            artifacts.read(bytes(flipped))
    with pytest.raises(ArtifactUnusable, match="another model"):
        again.check("c", model.geometry)
    with pytest.raises(ArtifactUnusable, match="another model"):
        Artifact(HEADS, ("a",), {"retrieval": torch.zeros(4, 4)}, {}).check("a", model.geometry)


def test_compresskv_keeps_what_the_best_heads_look_at() -> None:
    model = attached()
    full = read(model, TEXT, WindowQueries(8))
    scores = CompressKV(n_voters=2).score(full)
    with torch.no_grad():
        attentions = tiny()(input_ids=TEXT[None], output_attentions=True).attentions
    for layer in range(4):
        voters = model.tables["retrieval"][layer].topk(2).indices
        seen = attentions[layer][0, voters, -8:, :-8].mean((0, 1))
        pooled = torch.nn.functional.avg_pool1d(seen[None], 5, stride=1, padding=2)[0]
        for head in range(2):
            torch.testing.assert_close(scores[layer, head, :-8], pooled, atol=1e-6, rtol=1e-4)
