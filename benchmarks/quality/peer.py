"""The same documents and questions through kvpress, with its own hooks: rows as `python -m benchmarks.quality run` has.

kvpress 0.5.5 pins transformers < 5.3, so this runs in an environment of its own, from the repository's root:

    python -m venv /tmp/kvpress
    /tmp/kvpress/bin/pip install torch==2.13.0 kvpress==0.5.5 transformers==5.2.0 msgspec xxhash jinja2
    PYTHONPATH=. /tmp/kvpress/bin/python -m benchmarks.quality.peer --model FOLDER --documents FOLDER --out F

Policies are named `kvpress:NAME`. Plain-text formats only. kvpress' ragged presses hide evicted entries instead of
removing them; bytes are counted as if they were removed, at 16 bits per number.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.quality.corpus import Text, from_folder
from benchmarks.quality.measure import N_REFERENCE, Asked, compare

PRESSES: dict[str, Callable[[float], Any]] = {
    "kvzip": lambda removed: kvpress.KVzipPress(removed),
    "kvzip-plus": lambda removed: kvpress.KVzipPress(removed, kvzip_plus_normalization=True),
    "snapkv": lambda removed: kvpress.SnapKVPress(removed),
    "criticalkv": lambda removed: kvpress.CriticalKVPress(kvpress.SnapKVPress(removed)),
    "critical-adakv": lambda removed: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(removed)),
    "pyramidkv": lambda removed: kvpress.PyramidKVPress(removed),
    "tova": lambda removed: kvpress.TOVAPress(removed),
    "streaming": lambda removed: kvpress.StreamingLLMPress(removed),
    "expected": lambda removed: kvpress.ExpectedAttentionPress(removed),
    "expected-adakv": lambda removed: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(removed, epsilon=1e-2)),
    "keydiff": lambda removed: kvpress.KeyDiffPress(removed),
    "knorm": lambda removed: kvpress.KnormPress(removed),
    "lagkv": lambda removed: kvpress.LagKVPress(removed),
    "compactor": lambda removed: kvpress.CompactorPress(removed),
}


class Peer:
    """A model with kvpress' attention patch, and its tokenizer."""

    def __init__(self, folder: str) -> None:
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model, self.tokenizer = hf.eval(), AutoTokenizer.from_pretrained(folder)
        self.tokenizer.chat_template = None  # documents are plain text; KVzipPress wraps its requests by the template
        plain = tempfile.mkdtemp()
        self.tokenizer.save_pretrained(plain)
        self.model.config.name_or_path = plain  # where KVzipPress looks for the tokenizer
        eos = self.model.generation_config.eos_token_id
        self.ends = set(eos if isinstance(eos, list) else [eos])

    def encode(self, text: str) -> list[int]:
        """Tokens without special ones."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def compressed(self, token_ids: list[int], press: Any) -> tuple[DynamicCache, float]:
        """The cache a press leaves, and seconds for prefill and press together."""
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        cache, began = DynamicCache(), time.perf_counter()
        with contextlib.nullcontext() if press is None else press(self.model):
            self.model.model(input_ids=torch.tensor([token_ids]), past_key_values=cache)
        return cache, time.perf_counter() - began

    def logs(self, cache: DynamicCache, token_ids: list[int], start: int) -> Tensor:
        """Log-probabilities [n, vocabulary] after each token; the cache grows."""
        positions = torch.arange(start, start + len(token_ids))[None]
        out = self.model(input_ids=torch.tensor([token_ids]), past_key_values=cache, position_ids=positions)
        return out.logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]

    def answer(self, cache: DynamicCache, first: Tensor, start: int) -> tuple[list[int], list[Tensor]]:
        """Greedy answer and what it was chosen from."""
        logs, tokens = [first], [int(first.argmax())]
        while len(tokens) < N_REFERENCE and tokens[-1] not in self.ends:
            logs.append(self.logs(cache, tokens[-1:], start + len(tokens) - 1)[-1])
            tokens.append(int(logs[-1].argmax()))
        return tokens, logs

    def ask(self, cache: DynamicCache, asked: Asked, n_tokens: int) -> Any:
        """What `measure` measures, on one question."""
        own = copy.deepcopy(cache)
        first, start = self.logs(own, asked.prompt, n_tokens)[-1], n_tokens + len(asked.prompt)
        forced = []
        for tokens in (list(asked.reference), asked.gold):
            rest = self.logs(copy.deepcopy(own), tokens[:-1], start) if len(tokens) > 1 else first[None][:0]
            forced.append(torch.cat([first[None], rest]))
        tokens, _ = self.answer(own, first, start)
        return compare(asked, forced[0], forced[1], self.tokenizer.decode(tokens, skip_special_tokens=True))


@torch.no_grad()
def main() -> None:
    """Measure every document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--names", default="")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--policies", default=",".join(PRESSES))
    parser.add_argument("--ratios", default="0.25,0.125")
    parser.add_argument("--formats", default="prefix,plain")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    peer = Peer(arguments.model)
    names = [name for name in arguments.names.split(",") if name]
    with arguments.out.open("a") as out:
        for text in from_folder(arguments.documents, names, arguments.questions):
            for row in rows_of(peer, text, arguments):
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(row["document"], row["format"], row["policy"], row["keep_ratio"], flush=True)


def rows_of(peer: Peer, text: Text, arguments: argparse.Namespace) -> Any:
    """Everything that is measured on one document."""
    token_ids = peer.encode(text.text)
    n_tokens = len(token_ids)
    full, prefill_s = peer.compressed(token_ids, None)
    asked: dict[str, list[Asked]] = {}
    for form in arguments.formats.split(","):
        asked[form] = []
        for question in text.questions:
            prompt = peer.encode(question.prompt(with_prefix=form == "prefix"))
            own = copy.deepcopy(full)
            first = peer.logs(own, prompt, n_tokens)[-1]
            tokens, logs = peer.answer(own, first, n_tokens + len(prompt))
            gold = peer.encode(" " + question.answers[0])
            asked[form].append(Asked(question, prompt, gold, tuple(tokens), torch.stack(logs)))
    config = peer.model.config
    raw = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    for name in arguments.policies.split(","):
        for ratio in map(float, arguments.ratios.split(",")):
            cache, seconds = peer.compressed(token_ids, PRESSES[name](1 - ratio))
            for form, questions in asked.items():
                yield {
                    "document": text.name,
                    "format": form,
                    "policy": f"kvpress:{name}",
                    "codec": "none",
                    "keep_ratio": ratio,
                    "kept": ratio,
                    "bytes_per_token": raw * ratio,
                    "n_tokens": n_tokens,
                    "cost": {"prefill_s": prefill_s, "observe_s": seconds - prefill_s, "score_s": 0.0},
                    "continuation_kl": None,
                    "answers": [asdict(peer.ask(cache, question, n_tokens)) for question in questions],
                }


if __name__ == "__main__":
    main()
