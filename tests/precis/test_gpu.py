"""The library on a GPU equals the library on the CPU. Run with `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from precis.attention import triton_runs
from precis.attention.plug import attach
from precis.attention.ragged import New, runs_of
from precis.engine import step
from precis.families import Rotary
from precis.pipeline import answer, compress
from precis.reader import load
from precis.sampling import Sampler
from precis.session import Feed, Session
from precis.views.sage import SageView
from precis.wire.presets import CODEC_NAMES, PRESETS, Compression
from tests.precis.build import N_CONTEXT, asked, attached, cut, document, read, tokens, with_tables
from tests.precis.test_ragged import case, expected_of
from tests.tiny import FAMILIES, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_the_gpu_equal_those_on_the_cpu(family: str) -> None:
    token_ids = tokens(N_CONTEXT + 8)
    query = token_ids[N_CONTEXT:].tolist()
    on_cpu = attached(family)
    expected = step(on_cpu, [Feed(Session.on(cut(read(on_cpu, token_ids[:N_CONTEXT]))), query, all_logits=True)])[0]
    on_gpu = attach(tiny(family).cuda())
    snapshot = compress(on_gpu, Rotary(on_gpu, 512), document(token_ids[:N_CONTEXT]), Compression("full", 1.0, "raw16"))
    found = step(on_gpu, [Feed(Session.on(snapshot.snapshot), query, all_logits=True)])[0]
    torch.testing.assert_close(found.cpu(), expected, atol=2e-2, rtol=0)  # raw16 of a float32 model rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
def test_the_triton_kernels_equal_torch(head_dim: int, dtype: torch.dtype) -> None:
    for options in ({}, {"window": 400}, {"softcap": 2.0}, {"sinks": True}, {"bias": True}, {"causal": True}):
        made = case(1, head_dim, 24, lengths=(980, 25), dtype=dtype, **options)
        expected, n_kv_heads = expected_of(made), made.new.key.shape[0]
        own = made.new
        new = New(own.query.cuda(), own.key.cuda(), own.value.cuda(), own.positions.cuda())
        bias = [part.bias if part.bias is None else part.bias.cuda() for part in made.segments]
        there = [
            replace(part, keys=part.keys.cuda(), values=part.values.cuda(), positions=part.positions.cuda(), bias=extra)
            for part, extra in zip(made.segments, bias, strict=True)
        ]
        rows, size = 24 * new.query.shape[0] // n_kv_heads, head_dim * dtype.itemsize
        [units] = triton_runs.units_of([runs_of(there)], rows, n_kv_heads, size, new.key.device)
        sinks = None if made.sinks is None else made.sinks.cuda()
        found = triton_runs.attend(new, units, sinks=sinks, **made.options).float().cpu()  # type: ignore[arg-type]
        close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(found, expected, atol=close, rtol=close)


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("policy", PRESETS)
def test_every_policy_keeps_the_same_entries_and_reloads(policy: str, codec: str) -> None:
    cpu, gpu = attached(), with_tables(attach(tiny().cuda()))
    how = asked(cpu, policy, 0.6 if PRESETS[policy].evicts else 1.0, codec)
    on_cpu = compress(cpu, Rotary(cpu, 512), document(tokens(N_CONTEXT)), how)
    on_gpu = compress(gpu, Rotary(gpu, 512), document(tokens(N_CONTEXT)), how)
    assert torch.equal(on_gpu.snapshot.positions.cpu(), on_cpu.snapshot.positions)
    again = load(gpu, Rotary(gpu, 512), on_gpu.packed, on_gpu.snapshot.header.fingerprint)
    assert torch.equal(again.keys, on_gpu.snapshot.keys)
    found = [s.token_id for s in answer(gpu, again, [5, 6, 7], Sampler(), 8, SageView(budget=40))]
    assert len(found) == 8
