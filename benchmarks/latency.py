"""What a question costs: plain transformers that reads the document again, and a snapshot reloaded from its bytes.

    python -m benchmarks.latency DOCUMENT [--model FOLDER] [--repeats 5] [--policy P] [--keep-ratio R] [--codec C]

Both sides answer the same question in the same process, in turns, so that a busy machine slows both. Reported are
medians and, of each pair, the ratio; and bytes of the full cache in 16 bits against bytes stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.model import located
from precis.attempt import Compressed
from precis.families import Model
from precis.pipeline import answer, compress, document_of
from precis.reader import load
from precis.sampling import Sampler
from precis.text import ContextPart
from precis.wire.messages import Message
from precis.wire.presets import resolve
from workers.models import Served, pick_device, pick_dtype, serve

QUESTION = "What is this text about?"
N_DECODED = 16


def plain(hf: Any, context: list[int], query: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and per token after it, of transformers with SDPA and its dynamic cache."""
    began = time.perf_counter()
    ids = torch.tensor([context + query], device=hf.device)
    out = hf(input_ids=ids, cache=DynamicCache(config=hf.config), use_cache=True, logits_to_keep=1)
    token = out.logits[0, -1].argmax()
    first = time.perf_counter()
    for _ in range(N_DECODED):
        out = hf(input_ids=token.reshape(1, 1), cache=out.cache, use_cache=True)
        token = out.logits[0, -1].argmax()
    return first - began, (time.perf_counter() - first) / N_DECODED


def reloaded(served: Served, made: Compressed, query: list[int]) -> tuple[float, float, float]:
    """Seconds to load the bytes, to the first token, and per token after it."""
    began = time.perf_counter()
    snapshot = load(served.model, served.rotary, made.packed, made.snapshot.header.fingerprint)
    loaded = time.perf_counter()
    tokens = answer(served.model, snapshot, query, Sampler(), N_DECODED + 1)
    next(tokens)
    first = time.perf_counter()
    for _ in tokens:
        pass
    return loaded - began, first - began, (time.perf_counter() - first) / N_DECODED


def median_of(runs: list[Any], pick: Callable[[Any], float]) -> float:
    """Median over runs."""
    return statistics.median(pick(run) for run in runs)


@torch.inference_mode()
def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("document", type=Path)
    parser.add_argument("--model", default="", help="a folder; by default the embedded model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--keep-ratio", type=float, default=None)
    parser.add_argument("--codec", default=None)
    parser.add_argument("--dtype", default="float32", help="of both; auto is what a worker takes here")
    arguments = parser.parse_args()
    device = pick_device("auto")
    dtype = pick_dtype(arguments.dtype, device)
    folder = located(arguments.model)
    served = serve("benchmark", folder, device, dtype)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    part = served.prompter.context_part([Message("user", arguments.document.read_text())])
    query = served.prompter.query_part(part.roles, [Message("user", QUESTION)])
    how = resolve(arguments.policy, arguments.keep_ratio, arguments.codec)
    began = time.perf_counter()
    made = compress(served.model, served.rotary, document_of(served.prompter, part), how)
    compress_s = time.perf_counter() - began
    plain(hf, part.token_ids[:64], query)
    reloaded(served, made, query)
    pairs = [(plain(hf, part.token_ids, query), reloaded(served, made, query)) for _ in range(arguments.repeats)]
    print(json.dumps(report(served.model, made, part, how.parameters(), compress_s, pairs), indent=2))


def report(
    model: Model, made: Compressed, part: ContextPart, how: dict[str, Any], compress_s: float, pairs: list[Any]
) -> dict[str, Any]:
    """Everything measured, with what it was measured on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {
        "commit": commit.strip(),
        "device": str(model.device),
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
        "n_tokens": len(part.token_ids),
        "policy": how,
        "repeats": len(pairs),
        "compress_s": round(compress_s, 2),
        "plain_first_token_s": round(median_of(pairs, lambda p: p[0][0]), 3),
        "precis_load_s": round(median_of(pairs, lambda p: p[1][0]), 4),
        "precis_first_token_s": round(median_of(pairs, lambda p: p[1][1]), 3),
        "first_token_ratio": round(median_of(pairs, lambda p: p[0][0] / p[1][1]), 1),
        "plain_decode_s_per_token": round(median_of(pairs, lambda p: p[0][1]), 4),
        "precis_decode_s_per_token": round(median_of(pairs, lambda p: p[1][2]), 4),
        "decode_ratio": round(median_of(pairs, lambda p: p[0][1] / p[1][2]), 2),
        "raw_bytes": made.raw_bytes,
        "stored_bytes": made.packed.n_bytes,
        "bytes_ratio": round(made.raw_bytes / made.packed.n_bytes, 2),
        "kl": round(made.fidelity.kl, 4),
    }


if __name__ == "__main__":
    main()
