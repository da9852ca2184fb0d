"""The one attention function that transformers calls. It knows no model and no method: it hands q, k and v on.

The name is registered in `AttentionInterface` and deliberately not in `AttentionMaskInterface`: transformers then
builds no [q, kv] mask at all, and causality is ours, by position. Called with `use_cache=False`, a model gives this
function the new tokens' keys and values only; all history lives in the `cache` argument's object.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

from precis.errors import UnsupportedModel
from precis.families import Model, inspect_model, weight_digest

ATTENTION_NAME = "precis"


class KVStore(Protocol):
    """What one forward attends to besides its own tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Take q [H, n, D], k and v [K, n, D] of the new tokens; give the attention output [H, n, D]."""
        ...


def precis_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function behind `attn_implementation="precis"`; needs `kv_store=` in the model's forward call."""
    store: KVStore | None = kwargs.get("kv_store")
    if store is None:
        raise RuntimeError("the precis attention needs kv_store=... in the model's forward call")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModel("position bias in attention is not supported")
    out = store.attend(module.layer_idx, query[0], key[0], value[0], kwargs.get("s_aux"))
    return out.transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION_NAME, precis_attention)


def attach(hf: Any) -> Model:
    """Check a transformers model and set the precis attention function on it.

    Raises:
        UnsupportedModel: in plain words, see `families.refuse_unsupported`.
    """
    geometry, decoder, attentions = inspect_model(hf)
    digest = weight_digest(hf)
    hf.eval().requires_grad_(False)
    hf.set_attn_implementation(ATTENTION_NAME)
    return Model(hf=hf, decoder=decoder, attentions=attentions, geometry=geometry, digest=digest)
