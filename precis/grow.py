"""Text is appended to a document whose whole cache is stored: only what is new is read.

No paper. The stored entries become the full cache again, the new tokens are read on top of them, and both are coded
together. With `tc`, new tokens get their classes by a repetition of themselves alone, old ones keep theirs, and the
step stays what it was: the old coefficients are multiples of it already, so that they are coded as they were, however
often a document grows. Only `max_bytes` makes the step coarser.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from precis.attempt import Attempt, header_of
from precis.codecs import informed
from precis.codecs import needs as needs_of_codec
from precis.codecs.tc import TransformCodec
from precis.container import Packed, codecs_of, pack
from precis.core import Prefill, Snapshot
from precis.families import Model, Rotary
from precis.full_cache import Between, DenseCache, Document, silent
from precis.manifest import Manifest
from precis.observations import Reading
from precis.observations.repeat import RepeatAttention
from precis.policies import POLICIES
from precis.prefill import read_on
from precis.rates import Coding, classes_of
from precis.reader import load, open_block, reader_of, unpack
from precis.selection import score
from precis.wire.presets import Compression


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot as it lies in the store, opened and checked.

    Attributes:
        blobs: of all its blocks.
    """

    manifest: Manifest
    blobs: Sequence[bytes]


@torch.inference_mode(False)
@torch.no_grad()
def grow(
    model: Model,
    rotary: Rotary,
    document: Document,
    how: Compression,
    stored: Stored,
    key: bytes = b"",
    between: Between = silent,
) -> tuple[Packed, Snapshot, Tensor | None]:
    """The snapshot of a longer document; also what it was packed as, and its tokens' classes where the codec has them.

    Args:
        model: from `attention.plug.attach`.
        rotary: of the model.
        document: T tokens, of which the first are those of the stored snapshot.
        how: as the stored snapshot was made.
        stored: of the beginning.
        key: seals the snapshot, if not empty.
        between: called between chunks of work.

    Raises:
        ValueError: if not everything is stored, or what the codec needs is not known of the beginning.
        SnapshotCorrupt: if a byte is wrong.
    """
    n_before = stored.manifest.n_tokens
    if any(needs_of_codec(codec) for codec in [codecs_of(model)[how.codec]]) or POLICIES[how.policy].needs:
        raise ValueError("the policy or the codec looks at all of the document")
    before = unpack(stored.manifest, stored.blobs, model, rotary, codecs_of(model))
    full = _read_on(model, before, document, between)
    scores = score(full, POLICIES[how.policy])
    attempt = Attempt(model, rotary, document, how, key, full, scores)
    kept = attempt.cut(document.n_tokens)
    if how.codec != "tc":
        between("encode", 0, 1)
        packed, classes = pack(kept, informed(codecs_of(model)[how.codec], full), rotary, key), None
    else:
        packed, classes = _coded(attempt, kept, stored, n_before, between)
    return packed, load(model, rotary, packed, header_of(model, document, how).fingerprint, key), classes


def _read_on(model: Model, before: Snapshot, document: Document, between: Between) -> Prefill:
    """The full cache of the whole document."""
    g, n = before.geometry, before.header.n_tokens
    whole = torch.arange(n, dtype=torch.int32, device=before.positions.device).repeat(g.n_layers * g.n_kv_heads)
    if not torch.equal(before.positions, whole) or before.bias is not None:
        raise ValueError("the stored snapshot does not hold the whole cache")
    cache = DenseCache.empty(model, document.n_tokens)
    shape = (g.n_layers, g.n_kv_heads, n, g.head_dim)
    cache.keys[:, :, :n], cache.values[:, :, :n] = before.keys.view(shape), before.values.view(shape)
    cache.length = n
    read_on(model, document.token_ids, cache, between)
    return Prefill(g, cache.keys, cache.values)


def _coded(attempt: Attempt, kept: Snapshot, stored: Stored, n_before: int, between: Between) -> tuple[Packed, Tensor]:
    """Old tokens as they were, new ones by what a repetition of them looks at."""
    model, how = attempt.model, attempt.how
    if model.transform is None or how.transform != model.transform.fingerprint:
        raise ValueError("the transform that this compression names is not the model's")
    step, old = stored_classes(stored, model)
    classes = torch.cat([old, _new_classes(attempt, n_before, model.transform.block_layers, between)], 1)
    between("encode", 0, 1)
    coding = Coding.of(kept, model.transform, classes, attempt.rotary, attempt.key)
    return coding.at(step) if how.max_bytes is None else coding.within(how.max_bytes), classes


def _new_classes(attempt: Attempt, n_before: int, block_layers: int, between: Between) -> Tensor:
    """[B, new tokens], relative to their own mean."""
    full, document = attempt.full, attempt.document
    body = (max(n_before, document.body[0]), document.body[1])
    observer = RepeatAttention().start(full.geometry, document.n_tokens)
    part = replace(document, body=body)
    seen = observer.finish(Reading(attempt.model, attempt.rotary, part, full, between))
    new = slice(n_before, None)
    observed: dict[Hashable, Tensor] = {RepeatAttention(): seen[..., new]}
    return classes_of(Prefill(full.geometry, full.keys[:, :, new], full.values[:, :, new], observed), block_layers)


def stored_classes(stored: Stored, model: Model) -> tuple[float, Tensor]:
    """The step of a snapshot coded by `tc`, and the classes [B, T] of its tokens; 0 for sinks, which have none.

    Raises:
        ValueError: if it was coded otherwise.
        SnapshotCorrupt: if a byte is wrong.
    """
    codec = reader_of(stored.manifest, codecs_of(model))
    if not isinstance(codec, TransformCodec):
        raise ValueError("the snapshot has no classes")  # noqa: TRY004 — of a value
    step, n = codec.tables[0], stored.manifest.n_tokens
    classes = torch.zeros(len(stored.manifest.blob_bytes), n, dtype=torch.int64)
    for index in range(len(stored.manifest.blob_bytes)):
        opened = open_block(stored.manifest, index, stored.blobs[index], codec, torch.device("cpu"))
        found = (-2 * torch.log2(opened.parts["steps"] / step)).round().to(torch.int64)
        classes[index, n - found.shape[0] :] = found
    return step, classes
