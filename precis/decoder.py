"""Packed steps of a whole decoder in C++, on the CPU, for models of Llama's kind. `precis/native/decoder.cpp`

transformers computes a step as hundreds of small operations, each of which waits for the one before; here all threads
go through the layers together, weights are streamed once, and attention reads entries where they lie. Larger steps are
left to transformers, whose matrix products are as good.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from precis.attention import ragged
from precis.families import Model, Rotary
from precis.native import level, library
from precis.packing import Tables

_LARGEST_STEP = 48  # tokens from which transformers' products in float32 are faster; measured with AVX-512
_LARGEST_TILED = 512  # with matrix tiles in bfloat16 no step that a worker makes is
_KINDS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_COLUMNS = 18
_NO_MEMORY = 2
_INT, _POINTER = ctypes.c_int, ctypes.c_void_p


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "inner")),
        *((name, ctypes.c_int32) for name in ("vocabulary", "n_positions", "bfloat16")),
        *((name, ctypes.c_float) for name in ("epsilon", "scaling", "softcap")),
    )


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights, as the C++ code finds them. They are not copied, but for norms, biases and RoPE.

    Attributes:
        shape: sizes and constants.
        layers: [L, 18] int64 addresses.
        embedding, head: [vocabulary, hidden].
        last_norm: [hidden] float32.
        kept: tensors that the addresses are of.
    """

    shape: _Shape
    layers: NDArray[np.int64]
    embedding: Tensor
    head: Tensor
    last_norm: Tensor
    kept: tuple[Tensor, ...]

    @staticmethod
    def of(model: Model, rotary: Rotary) -> Decoder | None:
        """For a model of a known kind, on the CPU, in float32 or bfloat16; else None."""
        layers = list(getattr(model.decoder, "layers", []))
        head = model.hf.get_output_embeddings()
        if not ragged.usable(torch.empty(0, model.geometry.head_dim, dtype=model.dtype, device=model.device)):
            return None
        if not layers or head is None or head.bias is not None or not all(map(_known, layers)):
            return None
        g = model.geometry
        if len({*g.scaling}) > 1 or any(g.softcap) or not all(map(rotary.turns_halves, range(g.n_layers))):
            return None
        kept: list[Tensor] = []
        table = np.zeros((len(layers), _COLUMNS), np.int64)
        for index, layer in enumerate(layers):
            cos, sin = rotary.table(index)
            if cos.shape[1] != g.head_dim:
                return None
            parts = [*_parts(layer), cos, sin]
            kept += [part for part in parts if part is not None]
            table[index, :-1] = [0 if part is None else part.data_ptr() for part in parts]
            table[index, -1] = g.windows[index] or 0
        embedding, last = model.decoder.embed_tokens.weight, model.decoder.norm
        inner, hidden = layers[0].mlp.gate_proj.weight.shape
        shape = _Shape(g.n_layers, hidden, g.n_heads, g.n_kv_heads, g.head_dim, inner, embedding.shape[0])
        shape.n_positions = rotary.n_positions
        shape.bfloat16, shape.scaling = int(model.dtype == torch.bfloat16), g.scaling[0]
        shape.epsilon = last.variance_epsilon
        weights = [*kept, embedding, head.weight]
        if embedding.shape != head.weight.shape or not all(part.is_contiguous() for part in weights):
            return None
        return Decoder(shape, table, embedding, head.weight, last.weight.float().contiguous(), tuple(kept))

    @property
    def max_tokens(self) -> int:
        """Tokens of a step beyond which transformers is faster."""
        return _LARGEST_TILED if level() == "amx" and self.shape.bfloat16 else _LARGEST_STEP

    def step(self, token_ids: Sequence[int], positions: Tensor, tables: Tables, wanted: Sequence[int]) -> Tensor:
        """One packed forward.

        Args:
            token_ids: of all sessions, one after the other.
            positions: [n] int32.
            tables: of the step.
            wanted: rows after which logits are wanted.

        Returns:
            [wanted, vocabulary] float32.

        Raises:
            ValueError: if a token, a position or a run is out of bounds.
        """
        ids, rows = np.array(token_ids, np.int64), np.array(wanted, np.int32)
        logits = torch.empty(len(rows), self.shape.vocabulary)
        failed = library().precis_decode(  # type: ignore[union-attr]
            ctypes.byref(self.shape),
            _POINTER(self.layers.ctypes.data),
            *(_POINTER(part.data_ptr()) for part in (self.embedding, self.head, self.last_norm)),
            _POINTER(ids.ctypes.data),
            _POINTER(positions.data_ptr()),
            _INT(len(ids)),
            _POINTER(tables.runs.ctypes.data),
            _INT(tables.runs.shape[1]),
            _POINTER(tables.places.ctypes.data),
            _POINTER(rows.ctypes.data),
            _INT(len(rows)),
            _POINTER(logits.data_ptr()),
            _INT(torch.get_num_threads()),
        )
        if failed == _NO_MEMORY:
            raise MemoryError("there is no memory for a step")
        if failed:
            raise ValueError(f"{len(ids)} tokens and {tables.runs.shape[1]} runs do not fit together")
        return logits


def _known(layer: Any) -> bool:
    """Whether a decoder layer computes what the C++ code computes."""
    if type(layer).__name__ not in _KINDS:
        return False
    mlp = layer.mlp
    linear = [layer.self_attn.q_proj, layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    plain = all(type(part) is nn.Linear for part in linear)  # not quantised or adapted
    return plain and mlp.gate_proj.bias is None and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _parts(layer: Any) -> list[Tensor | None]:
    """A layer's weights in the order of the C++ table, RoPE excepted."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    return [
        _wide(layer.input_layernorm.weight),
        *(projection.weight for projection in projections),
        *(_wide(projection.bias) for projection in projections),
        *(None if norm is None else _wide(norm.weight) for norm in norms),
        attention.o_proj.weight,
        _wide(attention.o_proj.bias),
        _wide(layer.post_attention_layernorm.weight),
        *(part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
    ]


def _wide(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.detach().float().contiguous()
