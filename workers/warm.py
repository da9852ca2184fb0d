"""What a worker's first question would wait for, done before it says that it is ready.

Libraries choose and compile their code when they are first called, for the sizes that they are called with: the first
snapshot that a worker loads would take twice as long as the second (measured).
"""

from __future__ import annotations

import torch

from precis.container import CODECS, pack
from precis.core import Snapshot, SnapshotHeader
from precis.engine import step
from precis.manifest import open_manifest
from precis.rates import Coding
from precis.reader import unpack
from precis.session import Feed, Session
from precis.synthesis import prepare
from workers.cache import SnapshotCache
from workers.models import Served

_TOKENS, _QUESTION, _RATIO = 2048, 30, 16


@torch.inference_mode()
def warm(served: Served, cache: SnapshotCache) -> None:
    """Code random entries, load them, and ask them a question."""
    model, g = served.model, served.model.geometry
    n = min(_TOKENS, g.max_length - 2 * _QUESTION)
    keys, values = torch.randn(2, g.n_layers * g.n_kv_heads * n, g.head_dim, dtype=model.dtype, device=model.device)
    positions = torch.arange(n, dtype=torch.int32, device=model.device).repeat(g.n_layers * g.n_kv_heads)
    offsets = torch.arange(g.n_layers * g.n_kv_heads + 1) * n
    snapshot = Snapshot(g, SnapshotHeader("", n, n, 0, {}), keys, values, positions, offsets)
    if model.transform is None:
        packed = pack(snapshot, CODECS["int4-hadamard"], served.rotary)
    else:
        classes = torch.zeros(g.n_layers // model.transform.block_layers, n, dtype=torch.int64)
        coding = Coding.of(snapshot, model.transform, classes, served.rotary)
        packed = coding.at(coding.step_near(g.raw_bytes(n) // _RATIO))
        if model.device.type == "cpu" and model.dtype == torch.bfloat16:
            prepare(model.transform)
    for _ in range(2):
        loaded = unpack(open_manifest(packed.manifest), packed.blobs, model, served.rotary, cache.codecs, cache.take)
        session = Session.on(loaded)
        step(model, [Feed(session, [0] * _QUESTION, last=True)])
        step(model, [Feed(session, [0])])
