"""Read a GGUF file and write it as a transformers folder: config, float32 safetensors, tokenizer.

Only what the embedded default needs: Llama models with F32, Q8_0 and Q4_1 tensors and a byte-level BPE tokenizer of the
pre-tokenizer kind
"smollm". transformers' own GGUF path takes over ten seconds for the same file. The file format is that of
ggml-org/ggml's docs/gguf.md.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32  # numbers per quantised block
_CONTROL_TOKEN = 3
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUF:
    """An open GGUF file: its key-value pairs and its tensors."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        self._at = 8
        n_tensors, n_pairs = self._scalar("Q"), self._scalar("Q")
        self.fields = {self._string(): self._value(self._scalar("I")) for _ in range(n_pairs)}
        self.tensors = [self._tensor_info() for _ in range(n_tensors)]
        align = self.fields.get("general.alignment", 32)
        self._base = (self._at + align - 1) // align * align

    def read(self, info: TensorInfo) -> Tensor:
        """A tensor as float32, dequantised.

        Raises:
            ValueError: if it is of a kind that the embedded default does not use.
        """
        n = prod(info.shape)
        start = self._base + info.offset
        if info.kind == _F32:
            flat = np.frombuffer(self._data, "<f4", n, start)
            return torch.from_numpy(flat.copy()).reshape(info.shape)
        if info.kind not in (_Q4_1, _Q8_0):
            raise ValueError(f"tensor {info.name} has the unsupported GGUF kind {info.kind}")
        block_bytes = 20 if info.kind == _Q4_1 else 34
        raw = np.frombuffer(self._data, np.uint8, n // _BLOCK * block_bytes, start).reshape(-1, block_bytes)
        scale = raw[:, :2].copy().view("<f2").astype(np.float32)
        if info.kind == _Q8_0:
            numbers = raw[:, 2:].copy().view(np.int8).astype(np.float32) * scale
        else:
            low = raw[:, 2:4].copy().view("<f2").astype(np.float32)
            codes = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], 1).astype(np.float32)
            numbers = codes * scale + low
        return torch.from_numpy(numbers).reshape(info.shape)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, n = self._scalar("I"), self._scalar("Q")
            return [self._value(inner) for _ in range(n)]
        return self._scalar(_SCALARS[kind])

    def _tensor_info(self) -> TensorInfo:
        name, n_dims = self._string(), self._scalar("I")
        shape = tuple(self._scalar("Q") for _ in range(n_dims))[::-1]
        return TensorInfo(name, shape, self._scalar("I"), self._scalar("Q"))


def convert(source: Path, target: Path, progress: Callable[[int, int], None]) -> None:
    """Write `source` as a transformers folder; whole or not at all.

    Args:
        source: the GGUF file.
        target: the folder to make; must not exist.
        progress: called with tensors done and all.
    """
    gguf = GGUF(source)
    staging = target.with_name(f"{target.name}.partial")
    staging.mkdir(parents=True, exist_ok=True)
    config = model_config(gguf.fields, tied="output.weight" not in {t.name for t in gguf.tensors})
    weights = {}
    for done, info in enumerate(gguf.tensors):
        progress(done, len(gguf.tensors))
        weights[_weight_name(info.name)] = _unpermuted(gguf.read(info), info.name, config).contiguous()
    save_file(weights, staging / "model.safetensors", metadata={"format": "pt"})
    tokenizer(gguf.fields).save(str(staging / "tokenizer.json"))
    for name, content in (("config", config), ("tokenizer_config", tokenizer_config(gguf.fields))):
        (staging / f"{name}.json").write_text(json.dumps(content, indent=2))
    staging.rename(target)
    progress(len(gguf.tensors), len(gguf.tensors))


def model_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The transformers config of a Llama GGUF."""
    n_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": n_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // n_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer, each digit a token of its own."""
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError("only the byte-level BPE tokenizer of SmolLM is supported")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return made


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Special tokens and chat template, as transformers reads them."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _weight_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{suffix}"


def _unpermuted(weight: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    """GGUF keeps the rows of W_q and W_k in pairs; transformers' RoPE wants the halves of each head apart."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return weight
    n_heads = config["num_attention_heads"] if ".attn_q." in name else config["num_key_value_heads"]
    return weight.reshape(n_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
