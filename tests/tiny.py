"""Tiny models with seeded random weights for every supported family. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.words import CHATML, byte_tokenizer

VOCABULARY = 199
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"sliding_window": 40, "head_dim": 16, "query_pre_attn_scalar": 16}
_GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-odd-head": ("llama", {"head_dim": 20}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 40}),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**_GEMMA, "layer_types": _GEMMA3_LAYERS}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-window": ("phi3", {"sliding_window": 40}),
}


def tiny(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A transformers model of this family in float32 with eager attention, the same one every time."""
    kind, extra = FAMILIES.get(family, (family, {}))
    config = AutoConfig.for_model(kind, **{**_BASE, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    torch.manual_seed(seed)
    for parameter in model.parameters():  # larger weights, so that attention is not flat
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.08)
    return model


def save_tiny(folder: Path, *, seed: int = 0, **changes: Any) -> None:
    """A Llama of about 50,000 weights with a byte tokenizer and the ChatML template, as a transformers folder."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>", chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)
    base = {"vocab_size": 300, "max_position_embeddings": 65536, "bos_token_id": 256, "eos_token_id": 257}
    model = tiny("llama", seed=seed, **{**base, **changes})
    for parameter in model.parameters():  # large weights, so that answers differ between questions
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    model.generation_config.eos_token_id = 257
    model.save_pretrained(folder)
