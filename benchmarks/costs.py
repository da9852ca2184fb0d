"""What a step costs by document length and kept share, measured; and what snapshots of large models come to, on paper.

    python -m benchmarks.costs steps [--dtype bfloat16] [--rounds 9] [--out F]
    python -m benchmarks.costs paper

`steps` times `precis.engine.step` on random entries of the default model's shape: one new token for each of B answers
on one snapshot. Medians are reported, with the smallest time beside them. `paper` computes from the constants below and
runs nothing: weights and kept entries read once per token, a prefill at half of the peak, a snapshot fetched over the
network without decoding it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path

import torch

from benchmarks.model import located
from precis.core import Snapshot, SnapshotHeader
from precis.engine import step
from precis.families import Model
from precis.session import Feed, Session
from workers.models import pick_device, pick_dtype, serve

LENGTHS, SHARES, STREAMS = (1000, 2000, 4000, 7900), (1.0, 0.25, 0.0625), (1, 8)
# Layers, kv heads, query heads, head dim, parameters: the configurations published as Llama 3.1 8B and 70B.
SHAPES = {"8B": (32, 8, 32, 128, 8.03e9), "70B": (80, 8, 64, 128, 70.6e9)}
TOKENS = (128_000, 512_000, 1_000_000)
# H200: 4.8 TB/s and 989 TFLOP/s in bfloat16 by its data sheet; half of the latter assumed. Network: 25 Gbit/s.
BANDWIDTH, FLOPS, NETWORK = 4.8e12, 0.5 * 989e12, 25e9 / 8


def random_snapshot(model: Model, n_tokens: int, share: float) -> Snapshot:
    """A snapshot of `n_tokens` of which every head kept a share, by chance."""
    g, n = model.geometry, int(n_tokens * share)
    n_heads = g.n_layers * g.n_kv_heads
    keys, values = torch.randn(2, n_heads * n, g.head_dim, dtype=model.dtype, device=model.device)
    positions = torch.linspace(0, n_tokens - 1, n).to(torch.int32).repeat(n_heads).to(model.device)
    header = SnapshotHeader("", n_tokens, n_tokens, 0, {})
    return Snapshot(g, header, keys, values, positions, torch.arange(n_heads + 1) * n)


@torch.inference_mode()
def steps(dtype: str, rounds: int) -> list[dict[str, float | int | str]]:
    """One row per length, share and number of answers."""
    device = pick_device("auto")
    model = serve("benchmark", located(""), device, pick_dtype(dtype, device)).model
    cases = list(product(LENGTHS, SHARES, STREAMS))
    times: dict[tuple[int, float, int], list[float]] = {case: [] for case in cases}
    for length, share in product(LENGTHS, SHARES):
        snapshot = random_snapshot(model, length, share)
        for _ in range(rounds):
            for n_streams in STREAMS:
                sessions = [Session.on(snapshot) for _ in range(n_streams)]
                step(model, [Feed(session, [5, 6, 7], last=True) for session in sessions])
                began = time.perf_counter()
                step(model, [Feed(session, [8]) for session in sessions])
                times[length, share, n_streams].append((time.perf_counter() - began) * 1000)
    return [
        {
            "n_tokens": length,
            "kept_share": share,
            "streams": n_streams,
            "step_ms": round(statistics.median(times[length, share, n_streams]), 2),
            "least_ms": round(min(times[length, share, n_streams]), 2),
            "dtype": str(model.dtype),
            "threads": torch.get_num_threads(),
        }
        for length, share, n_streams in cases
    ]


def paper() -> list[dict[str, float | int | str]]:
    """One row per shape and length."""
    rows: list[dict[str, float | int | str]] = []
    for (name, (layers, kv_heads, heads, dim, parameters)), n in product(SHAPES.items(), TOKENS):
        cache = 4.0 * layers * kv_heads * dim * n
        weights = 2 * parameters
        prefill = 2 * parameters * n + 2.0 * layers * heads * dim * n * n  # causal: half of 4 L H D n^2
        rows.append(
            {
                "model": name,
                "n_tokens": n,
                "cache_gb": round(cache / 1e9, 1),
                "stored_16x_gb": round(cache / 16e9, 2),
                "stored_32x_gb": round(cache / 32e9, 2),
                "prefill_s": round(prefill / FLOPS, 1),
                "fetch_16x_s": round(cache / 16 / NETWORK, 2),
                "step_all_kept_ms": round((weights + cache) / BANDWIDTH * 1000, 1),
                "step_quarter_kept_ms": round((weights + cache / 4) / BANDWIDTH * 1000, 1),
            }
        )
    return rows


def main() -> None:
    """Print rows as JSON lines, and write them where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["steps", "paper"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = steps(arguments.dtype, arguments.rounds) if arguments.what == "steps" else paper()
    lines = [json.dumps(row) for row in rows]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
