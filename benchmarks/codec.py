"""Measure codecs at equal bytes on documents with questions, and append one JSON line per document and way.

    python -m benchmarks.codec run --documents FOLDER --transform FILE --out F
    python -m benchmarks.codec report F [F ...]

Every byte counts: positions, tables, manifest. The full cache answers first; what is compressed is compared with it,
nats per token: on text that follows the document (`continuation`), on two passages that are repeated word by word
(`recall`), and on answers to questions whose beginning is given (`answers`). The transform is fitted to other texts,
once, and kept in a file; its own bytes are the model's, not a document's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from benchmarks.baselines import cachegen_like, kvtc_like
from benchmarks.model import located
from benchmarks.quality import measure as asking
from benchmarks.quality.corpus import Text, from_folder
from precis.attempt import Attempt
from precis.axes import measure as fit_to
from precis.codecs import informed, needs
from precis.codecs.tc import TransformCodec
from precis.container import CODECS, Packed, pack
from precis.core import Snapshot
from precis.full_cache import Document
from precis.manifest import open_manifest
from precis.observations.repeat import RepeatAttention
from precis.pipeline import document_of
from precis.policies import POLICIES
from precis.prefill import prefill
from precis.protection import budget_per_head
from precis.rates import Coding, classes_of
from precis.reader import unpack
from precis.selection import score
from precis.transform import Transform
from precis.wire.presets import CODEC_BITS, Compression
from workers.corpus import documents_of
from workers.models import Served, pick_device, pick_dtype, serve

_CONTINUED, _PASSAGE, _GIVEN, _CALIBRATED = 160, 48, 8, 1024
_EVICTED = "int4-hadamard"  # what evicted snapshots are coded with: the best of the quantisers
_PASSAGES = (0.25, 0.62)  # where they begin
Probe = tuple[list[int], int]  # tokens, and how many of them are given


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--documents", type=Path, required=True, help="folder with documents.jsonl and questions.jsonl")
    runner.add_argument("--names", default="", help="documents, separated by commas; all by default")
    runner.add_argument("--questions", type=int, default=12, help="at most so many per document")
    runner.add_argument(
        "--calibration", type=Path, help="folder of .txt files; needed if the transform is not there yet"
    )
    runner.add_argument("--differentiated", type=int, default=12, help="calibration texts with a backward pass")
    runner.add_argument("--transform", type=Path, help="a file; made if it is not there; none: baselines only")
    runner.add_argument("--block-layers", type=int, default=5)
    runner.add_argument("--rank", type=int, default=1024, help="axes per block")
    runner.add_argument("--ratios", default="8,16,32", help="of the full cache's 16-bit bytes to stored ones")
    runner.add_argument(
        "--policies", default="kvzip,kvzip-fisher", help=f"evicted to the same bytes, with {_EVICTED}; or empty"
    )
    runner.add_argument("--kvtc", type=Path, help="a file for the KVTC-like baseline's axes; made if it is not there")
    runner.add_argument("--cachegen", action="store_true", help="the CacheGen-like baseline as well")
    runner.add_argument("--model", default="", help="a folder; by default the embedded model")
    runner.add_argument("--out", type=Path, required=True)
    reporter = commands.add_parser("report")
    reporter.add_argument("files", type=Path, nargs="+")
    reporter.add_argument("--plot", type=Path, help="a picture to be drawn (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.command == "report":
        rows = [json.loads(line) for file in arguments.files for line in file.read_text().splitlines()]
        print(table(rows))
        if arguments.plot:
            draw(rows, arguments.plot)
        return
    device = pick_device("auto")
    served = serve("codec", located(arguments.model), device, pick_dtype("float32", device))
    transforms = {}
    if arguments.transform:
        transforms["tc"] = transform_of(served, arguments.transform, arguments, fit_to)
    if arguments.kvtc:
        transforms["KVTC-like"] = transform_of(served, arguments.kvtc, arguments, kvtc_like)
    with arguments.out.open("a") as out:
        for text in from_folder(arguments.documents, [n for n in arguments.names.split(",") if n], arguments.questions):
            for row in rows_of(served, text, transforms, arguments):
                out.write(json.dumps(row) + "\n")
                out.flush()
                print({name: value for name, value in row.items() if name != "seconds"}, flush=True)


def transform_of(
    served: Served, path: Path, arguments: argparse.Namespace, fitted: Callable[..., Transform]
) -> Transform:
    """From its file, or fitted to the calibration texts, which go through the chat template."""
    if path.exists():
        return Transform.of(safetensors.torch.load_file(path))
    texts = [source.read_text() for source in sorted(arguments.calibration.glob("*.txt"))]
    documents = documents_of(served.prompter, texts, len(texts), _CALIBRATED)
    size = arguments.block_layers
    made = fitted(
        served.model,
        served.rotary,
        documents,
        size,
        arguments.rank,
        arguments.differentiated,
        lambda stage, done, total: print(stage, done, total, flush=True) if stage == "calibrate" else None,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({name: part.contiguous() for name, part in made.tables().items()}, path)
    return made


@torch.no_grad()
def rows_of(
    served: Served, text: Text, transforms: Mapping[str, Transform], arguments: argparse.Namespace
) -> Iterable[dict[str, Any]]:
    """Everything that is measured on one document."""
    document = document_of(served.prompter, served.prompter.raw_part(text.text))
    ratios = [float(found) for found in arguments.ratios.split(",")]
    fixed = [codec for name, codec in CODECS.items() if name != "raw16"]
    looked_at = {need for codec in fixed for need in needs(codec)}
    full = prefill(served.model, served.rotary, document, {RepeatAttention(), *looked_at})
    raw = served.model.geometry.raw_bytes(document.n_tokens)
    keep_all = Compression("full", 1.0)
    whole = Attempt(served.model, served.rotary, document, keep_all, b"", full, score(full, POLICIES["full"])).cut(
        document.n_tokens
    )
    judge = Judge(served, document, text, whole)

    def row(way: str, target: float, packed: Packed, seconds: float, codec: TransformCodec | None) -> dict[str, Any]:
        codecs = CODECS if codec is None else {codec.name: codec}
        manifest = open_manifest(packed.manifest)
        began = time.perf_counter()
        again = unpack(manifest, packed.blobs, served.model, served.rotary, codecs)
        spent = {"encode": seconds, "decode": time.perf_counter() - began}
        return judged(way, target, again, packed.n_bytes, spent)

    def judged(way: str, target: float, again: Snapshot, n_bytes: int, spent: dict[str, float]) -> dict[str, Any]:
        told = {"document": text.name, "way": way, "target": target, "ratio": raw / n_bytes}
        return {**told, "n_tokens": document.n_tokens, "seconds": spent, **judge.of(again)}

    for fixed_codec in fixed:
        began = time.perf_counter()
        packed = pack(whole, informed(fixed_codec, full), served.rotary)
        yield row(fixed_codec.name, 0.0, packed, time.perf_counter() - began, None)
    for ratio in ratios if arguments.cachegen else []:
        yield judged("CacheGen-like", ratio, *cachegen_like(whole, served.rotary, int(raw / ratio)), {})
    for policy in [name for name in arguments.policies.split(",") if name]:
        scored = prefill(served.model, served.rotary, document, POLICIES[policy].needs)
        scores = score(scored, POLICIES[policy])
        for ratio in ratios:
            how = Compression(policy, min(1.0, 16 / CODEC_BITS[_EVICTED] / ratio), _EVICTED)
            attempt = Attempt(served.model, served.rotary, document, how, b"", scored, scores)
            packed = pack(attempt.cut(budget_per_head(document.n_tokens, how)), CODECS[_EVICTED], served.rotary)
            yield row(f"{policy} + {_EVICTED}", ratio, packed, 0.0, None)
    for way, transform in transforms.items():
        size = transform.block_layers
        classes = classes_of(full, size) * (way == "tc")
        for ratio in ratios:
            began = time.perf_counter()
            packed = Coding.of(whole, transform, classes, served.rotary).within(int(raw / ratio))
            seconds = time.perf_counter() - began
            name = f"{way}, {size} layer{'s' if size > 1 else ''}"
            yield row(name, ratio, packed, seconds, TransformCodec(transform))


class Judge:
    """What the full cache says, and how far a snapshot is from it."""

    def __init__(self, served: Served, document: Document, text: Text, whole: Snapshot) -> None:
        raw, ids = served.prompter.raw, document.token_ids.tolist()
        self._served = served
        self._probes: list[tuple[str, Probe]] = []
        following = raw(text.continuation, begins=False)[:_CONTINUED]
        if len(following) > 1:
            self._probes.append(("continuation", (following, 1)))
        for share in _PASSAGES:
            passage = ids[int(len(ids) * share) :][:_PASSAGE]
            asked = [*document.repeat_next[0], *passage[:_GIVEN], *document.repeat_next[1]]
            self._probes.append(("recall", (asked + passage, len(asked) + _GIVEN)))
        self._expected = [self._logs(whole, probe) for _, probe in self._probes]
        asked_of = [asking.as_asked(served.prompter, question, with_prefix=True) for question in text.questions]
        self._asked = asking.with_references(served.model, whole, asked_of, set(served.card.eos_ids))
        self._right = self._answers(whole)

    def of(self, snapshot: Snapshot) -> dict[str, float]:
        """KL and agreement per kind of probe, and shares of right answers."""
        kinds: dict[str, list[Tensor]] = defaultdict(list)
        for (kind, probe), expected in zip(self._probes, self._expected, strict=True):
            found = self._logs(snapshot, probe)
            kl = (expected.exp() * (expected - found)).sum(-1)
            kinds[kind].append(torch.stack([kl, (expected.argmax(-1) == found.argmax(-1)).float()]))
        told = {}
        for kind, parts in kinds.items():
            told[f"{kind}_kl"], told[f"{kind}_top1"] = torch.cat(parts, 1).mean(1).tolist()
        answers = self._answers(snapshot)
        told["answers_kl"] = mean(answer.kl for answer in answers)
        told["right"] = mean(answer.exact for answer in answers)
        return {**told, "right_full": mean(answer.exact for answer in self._right)}

    def _logs(self, snapshot: Snapshot, probe: Probe) -> Tensor:
        tokens, given = probe
        return asking.continuation(self._served.model, snapshot, tokens)[given - 1 :]

    def _answers(self, snapshot: Snapshot) -> list[asking.Answered]:
        served = self._served
        return asking.measure(
            served.model, snapshot, self._asked, served.prompter, set(served.card.eos_ids), decode=False
        )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means over documents, one line per way and target; at least one document must have a continuation."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["target"], row["way"]].append(row)
    names = ["continuation_kl", "continuation_top1", "recall_kl", "recall_top1", "answers_kl", "right", "right_full"]
    lines = ["| way | documents | ratio | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 3)]
    for (_, way), own in sorted(groups.items()):
        cells = [f"{mean(row[name] for row in own if name in row):.4f}" for name in names]
        lines.append(f"| {way} | {len(own)} | {mean(row['ratio'] for row in own):.1f}x | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """KL over how much smaller the snapshot is, on following text and in recall."""
    from matplotlib import pyplot  # noqa: PLC0415 — only here

    groups: dict[str, dict[float | str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        fixed = row["target"] == 0
        groups["quantised alone" if fixed else row["way"]][row["way"] if fixed else row["target"]].append(row)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, kind in zip(axes, ("continuation", "recall"), strict=True):
        for way, own in sorted(groups.items()):
            style = {"linestyle": "none"} if way == "quantised alone" else {}
            found = [[(r["ratio"], r[f"{kind}_kl"]) for r in some if f"{kind}_kl" in r] for some in own.values()]
            points = sorted((mean(r for r, _ in some), mean(kl for _, kl in some)) for some in found if some)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=way, **style)
        axis.set(
            xlabel="times smaller than the cache in 16 bits", title=kind, xscale="log", yscale="log", ylim=(5e-4, 2)
        )
        axis.set_xticks([2, 4, 8, 16, 32], ["2x", "4x", "8x", "16x", "32x"])
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("KL, nats per token")
    axes[0].legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
