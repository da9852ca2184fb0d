"""Show a trim the answer's entries, and drop what it does not keep."""

from __future__ import annotations

import torch
from torch import Tensor

from precis.session import Session


def remember(session: Session, layer: int, query: Tensor, positions: Tensor) -> None:
    """Put the queries [H, n, D] of an answer's tokens, at `positions` [n], into the ring."""
    watched = session.watched
    if watched is None or watched.positions.shape[0] == 0:
        return
    n_window = watched.positions.shape[0]
    places = (watched.n_seen + torch.arange(positions.shape[0], device=positions.device)) % n_window
    watched.rows[layer, :, places] = query
    watched.positions[places] = positions.to(watched.positions.dtype)


def look(session: Session, layer: int, sinks: Tensor | None) -> None:
    """Let the trim choose among the answer's entries in this layer, head by head.

    Args:
        session: with a trim; the layer's new entries and queries are in.
        layer: of the model.
        sinks: [H] logits of a value-less entry, or None.
    """
    trim, watched = session.trim, session.watched
    if trim is None or watched is None:
        return
    rows = watched.positions[watched.positions >= 0]
    for kv_head in range(session.tail.keys.shape[1]):
        keys, _, positions = session.tail.entries(layer, kv_head)
        n_answer = int((positions >= session.snapshot.header.next_position + watched.n_asked).sum())
        n_question = keys.shape[0] - n_answer
        memory = watched.memory.get((layer, kv_head), keys.new_zeros(0, dtype=torch.float32))
        memory = torch.nn.functional.pad(memory, (0, n_answer - memory.shape[0]))
        weights = _weights(session, layer, kv_head, sinks)[..., -n_answer:] if trim.n_window else memory.new_zeros(0)
        kept, memory = trim.keep(weights, rows, keys[n_question:], memory)
        watched.memory[layer, kv_head] = memory[kept]
        if not bool(kept.all()):
            session.tail.keep(layer, kv_head, torch.nn.functional.pad(kept, (n_question, 0), value=True))


def _weights(session: Session, layer: int, kv_head: int, sinks: Tensor | None) -> Tensor:
    """[G, w, n + m] attention of the remembered queries over the snapshot's entries and the tail's."""
    g, watched = session.snapshot.geometry, session.watched
    if watched is None:
        raise ValueError("the session has no trim")
    group, known = g.group_size, watched.positions >= 0
    rows = watched.positions[known]
    queries = watched.rows[layer, kv_head * group : (kv_head + 1) * group, known].float() * g.scaling[layer]
    keys, _, positions, bias = session.seen.get((layer, kv_head)) or session.snapshot.entries(layer, kv_head)
    own_keys, _, own_positions = session.tail.entries(layer, kv_head)
    columns = torch.cat([positions, own_positions])
    logits = queries @ torch.cat([keys, own_keys]).float().T
    softcap, window = g.softcap[layer], g.windows[layer]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits[..., : bias.shape[0]] += bias
    hidden = columns > rows[:, None]
    if window is not None:
        hidden |= columns <= rows[:, None] - window
    logits.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(logits, -1)
    extra = sinks[kv_head * group : (kv_head + 1) * group].float()[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, extra], -1), -1)[..., :-1]
