"""The only file that knows model classes: which are supported, and how their geometry, W_o and RoPE are reached."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from precis.core import Geometry
from precis.errors import UnsupportedModel
from precis.rope import turn_halves
from precis.transform import Transform

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Model:
    """A transformers causal language model that was found fit, with what the library needs to know of it.

    Attributes:
        hf: the transformers model, in eval mode, with the precis attention function set.
        decoder: its decoder, without the language-model head.
        attentions: per layer, the attention module.
        digest: hash over weights, config and dtype.
        tables: of heads and layers, measured once of this model (`precis.artifacts`), or none.
        transform: measured once of this model, or None.
        artifacts: fingerprints of both, by kind.
        native: a `precis.decoder.Decoder`, for steps of few tokens, or None.
    """

    hf: Any
    decoder: Any
    attentions: tuple[nn.Module, ...]
    geometry: Geometry
    digest: str
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    transform: Transform | None = None
    artifacts: Mapping[str, str] = field(default_factory=dict)
    native: Any = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(next(self.hf.parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of keys and values."""
        found: torch.dtype = next(self.hf.parameters()).dtype
        return found


def refuse_unsupported(hf: Any) -> None:
    """Check that a model keeps a plain causal KV cache per head.

    Raises:
        UnsupportedModel: with the true reason, in plain words.
    """
    config = hf.config.get_text_config(decoder=True)
    name = type(hf).__name__
    for broken, reason in _reasons(hf, config):
        if broken:
            raise UnsupportedModel(f"{name} is not supported: {reason}.")


def _reasons(hf: Any, config: Any) -> list[tuple[bool, str]]:
    kinds = sorted(set(getattr(config, "layer_types", None) or []) - _PLAIN_LAYERS)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = list(rope.values()) if rope and all(isinstance(r, dict) for r in rope.values()) else [rope]
    sharing = getattr(config, "kv_sharing_modes", None) or []
    n_layers = getattr(config, "num_hidden_layers", 0)
    return [
        (bool(getattr(config, "is_encoder_decoder", False)), "it is an encoder-decoder"),
        (bool(getattr(config, "kv_lora_rank", None)), "it keeps a latent (MLA) cache, not keys and values per head"),
        (bool(kinds), f"its layers of kind {', '.join(kinds)} keep no plain cache of keys and values"),
        (
            bool(getattr(config, "num_kv_shared_layers", 0)) or "reuse" in sharing,
            "some of its layers share the keys and values of another layer",
        ),
        (bool(getattr(config, "attention_chunk_size", None)), "it attends in chunks"),
        (
            not getattr(config, "is_causal", True) or bool(getattr(config, "use_bidirectional_attention", False)),
            "it is not causal",
        ),
        (
            any(r.get("rope_type") == "dynamic" for r in ropes),
            "its dynamic RoPE changes with the length, so that stored keys would go stale",
        ),
        (
            not getattr(hf, "_supports_attention_backend", False),
            "its attention cannot be replaced (no attention backend)",
        ),
        (
            sorted(_attentions(hf)) != list(range(n_layers)),
            "not every layer has one attention module with an output projection",
        ),
        (
            not getattr(config, "num_key_value_heads", None) or not getattr(config, "num_attention_heads", None),
            "it does not say how many query and kv heads it has",
        ),
    ]


def _attentions(hf: Any) -> dict[int, nn.Module]:
    found = {}
    for module in hf.modules():
        layer = getattr(module, "layer_idx", None)
        if layer is not None and hasattr(module, "scaling") and output_projection(module) is not None:
            found[layer] = module
    return found


def output_projection(attention: Any) -> nn.Linear | None:
    """The module that holds W_o, whatever the family calls it."""
    return next((getattr(attention, n) for n in ("o_proj", "dense", "out_proj") if hasattr(attention, n)), None)


def inspect_model(hf: Any) -> tuple[Geometry, Any, tuple[nn.Module, ...]]:
    """Read geometry, decoder and attention modules of a supported model.

    Raises:
        UnsupportedModel: see `refuse_unsupported`.
    """
    refuse_unsupported(hf)
    config = hf.config.get_text_config(decoder=True)
    attentions = tuple(module for _, module in sorted(_attentions(hf).items()))
    n_heads = config.num_attention_heads
    geometry = Geometry(
        n_layers=config.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // n_heads,
        max_length=_max_length(config),
        windows=tuple(_window(config, layer) for layer in range(config.num_hidden_layers)),
        scaling=tuple(float(module.scaling) for module in attentions),  # type: ignore[arg-type]
        softcap=tuple(getattr(module, "attn_logit_softcapping", None) for module in attentions),
    )
    return geometry, hf.get_decoder(), attentions


def _max_length(config: Any) -> int:
    """longrope picks its frequencies by the length of a forward; below the original length they never change."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return int(original)
    return int(config.max_position_embeddings)


def _window(config: Any, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and kinds[layer] != "sliding_attention"):
        return None
    return int(window) if getattr(config, "use_sliding_window", True) else None


def weight_digest(hf: Any) -> str:
    """SHA-256 over every distinct weight (name, dtype, shape, bytes) and the config."""
    distinct = {tensor.data_ptr(): (name, tensor) for name, tensor in sorted(hf.state_dict().items(), reverse=True)}
    with ThreadPoolExecutor(4) as pool:  # hashing lets go of the interpreter's lock
        sha = hashlib.sha256(b"".join(pool.map(_tensor_digest, sorted(distinct.values(), key=lambda item: item[0]))))
    config = hf.config.to_dict()
    for noise in ("_name_or_path", "transformers_version", "_attn_implementation", "torch_dtype", "dtype"):
        config.pop(noise, None)
    sha.update(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    return sha.hexdigest()


def _tensor_digest(named: tuple[str, Tensor]) -> bytes:
    name, tensor = named
    sha = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.digest()


class Rotary:
    """RoPE of a model as a map that can be undone: keys at their positions <-> keys as they were before rotation.

    A family whose rotation cannot be reached gets the identity: codecs then work on rotated keys.
    """

    def __init__(self, model: Model, n_positions: int) -> None:
        module = sys.modules[type(model.attentions[0]).__module__]
        self._apply = getattr(module, "apply_rotary_pos_emb", None)
        self._embedding = getattr(model.decoder, "rotary_emb", None)
        self._device, self.head_dim = model.device, model.geometry.head_dim
        self._kinds = getattr(model.hf.config.get_text_config(decoder=True), "layer_types", None)
        self._per_kind = (
            self._embedding is not None and "layer_type" in inspect.signature(type(self._embedding).forward).parameters
        )
        self.n_positions = n_positions
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        self._by_halves: dict[str, bool] = {}

    @property
    def reached(self) -> bool:
        """Whether the family's rotation can be reached at all."""
        return self._apply is not None and self._embedding is not None

    def undo(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [n, D] at `positions` [n] -> float32 keys before RoPE."""
        return self._turn(layer, keys, positions, -1.0)

    def redo(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [n, D] before RoPE -> float32 keys at `positions` [n]."""
        return self._turn(layer, keys, positions, 1.0)

    def redo_in_place(self, layers: range, keys: Tensor, positions: Tensor, sizes: Sequence[int]) -> None:
        """Keys [n, D] of several layers before RoPE -> keys at `positions` [n].

        Args:
            layers: whose keys they are.
            keys: layer by layer, in any floating dtype; written to.
            positions: int32.
            sizes: keys of each layer.
        """
        parts = zip(layers, keys.split(list(sizes)), positions.split(list(sizes)), strict=True)  # type: ignore[no-untyped-call]
        for layer, key, places in parts:
            if not (self.turns_halves(layer) and turn_halves(key, places.int(), *self.table(layer))):
                key.copy_(self.redo(layer, key, places))

    def pull_back(self, layer: int, gradients: Tensor, positions: Tensor) -> Tensor:
        """Gradients with respect to keys [n, D] at `positions` [n] -> float32, with respect to keys before RoPE."""
        return self._turn(layer, gradients, positions, -1.0, scaled=True)

    def _turn(self, layer: int, keys: Tensor, positions: Tensor, sign: float, *, scaled: bool = False) -> Tensor:
        keys = keys.float()
        if self._apply is None or self._embedding is None or keys.shape[0] == 0:
            return keys
        cos_table, sin_table = self.table(layer)
        index = positions.long()
        cos, sin = cos_table[index][None], sin_table[index][None] * sign
        no_query = keys.new_empty(1, 0, *keys.shape)
        turned = self._apply(no_query, keys[None, None], cos, sin)[1][0, 0]
        if sign < 0 and not scaled:  # YaRN and longrope multiply cos and sin by a factor: undo it as well
            turned[..., : cos.shape[-1]] /= float(getattr(self._embedding, "attention_scaling", 1.0)) ** 2
        return turned  # type: ignore[no-any-return]

    def turns_halves(self, layer: int) -> bool:
        """Whether the layer's family rotates as `turn_halves` does: tried once."""
        kind = self._kind(layer)
        if kind not in self._by_halves and self._apply is not None and self._embedding is not None:
            positions = torch.arange(min(8, self.n_positions), dtype=torch.int32, device=self._device)
            keys = torch.linspace(-1, 2, len(positions) * self.head_dim, device=self._device).reshape(-1, self.head_dim)
            expected = self.redo(layer, keys, positions)
            turned = turn_halves(keys, positions, *self.table(layer))
            self._by_halves[kind] = turned and torch.allclose(keys, expected, atol=1e-5)
        return self._by_halves.get(kind, False)

    def _kind(self, layer: int) -> str:
        return self._kinds[layer] if self._per_kind and self._kinds else ""

    def table(self, layer: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a layer's RoPE [positions, rotated dims] float32."""
        kind = self._kind(layer)
        if kind not in self._tables:
            steps = torch.arange(self.n_positions, device=self._device)[None]
            like = torch.zeros(1, device=self._device, dtype=torch.float32)
            extra = (kind,) if self._per_kind else ()
            cos, sin = self._embedding(like, steps, *extra)  # type: ignore[misc]
            self._tables[kind] = (cos[0], sin[0])
        return self._tables[kind]
