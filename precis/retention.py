"""What a snapshot kept of each token, for people to look at."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from precis.core import Snapshot

_FULL = 255


def kept_shares(snapshot: Snapshot) -> bytes:
    """[T] uint8: the share of kv heads that kept each token, 255 = all, of layers that choose.

    Layers that keep only their sliding window would make every early token look lost, and are left out.
    """
    g, n = snapshot.geometry, snapshot.header.n_tokens
    layers = g.evicting_layers(n) or list(range(g.n_layers))
    counts = torch.zeros(n, dtype=torch.int64)
    for layer in layers:
        start, stop = snapshot.bounds(layer, 0)[0], snapshot.bounds(layer, g.n_kv_heads - 1)[1]
        counts += torch.bincount(snapshot.positions[start:stop].cpu().long(), minlength=n)
    return _bytes(counts.double() / (len(layers) * g.n_kv_heads))


def precisions(classes: Tensor) -> bytes:
    """[T] uint8: how finely each token is stored, 0 = the coarsest of the document, 255 = the finest.

    Args:
        classes: [B, T], each half a bit per number; the mean over blocks counts.
    """
    mean = classes.double().mean(0)
    low, high = float(mean.min()), float(mean.max())
    return _bytes((mean - low) / max(1e-9, high - low))


def _bytes(shares: Tensor) -> bytes:
    """Shares from 0 to 1."""
    return (shares.clamp(0, 1) * _FULL).round().numpy().astype(np.uint8).tobytes()
