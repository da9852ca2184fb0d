"""Measure policies on documents with questions, and append one JSON line per document, policy, ratio and format.

    python -m benchmarks.quality run  --documents FOLDER [--names a,b] [--policies ...] [--ratios 0.25,0.125] --out F
    python -m benchmarks.quality report F [F ...] [--plot FOLDER]

A document is compressed once per policy, without its questions; every question starts from the same snapshot. `prefix`
questions are plain text with the start of the answer given, `plain` ones without it, `chat` ones go through the model's
chat template as the service sends them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.model import located
from benchmarks.quality import measure as asking
from benchmarks.quality.corpus import Question, Text, from_folder
from benchmarks.quality.report import report
from benchmarks.quality.ruler import Length, documents
from precis.attempt import Attempt
from precis.container import CODECS, pack
from precis.core import Prefill, Snapshot
from precis.full_cache import Document
from precis.pipeline import document_of
from precis.policies import POLICIES
from precis.prefill import prefill
from precis.protection import budget_per_head
from precis.reader import load
from precis.selection import score
from precis.text import ContextPart
from precis.wire.messages import Message
from precis.wire.presets import Compression
from workers.artifacts import packaged
from workers.models import Served, pick_device, pick_dtype, serve

_CONTINUED = 96


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("--documents", type=Path, help="folder with documents.jsonl and questions.jsonl")
    run_parser.add_argument("--names", default="", help="documents, separated by commas; all by default")
    run_parser.add_argument("--questions", type=int, default=12, help="at most so many per document")
    run_parser.add_argument("--ruler", type=int, default=0, help="tokens of generated documents; none by default")
    run_parser.add_argument("--filler", type=Path, default=Path(__file__).parents[1] / "harbour.txt")
    run_parser.add_argument("--seed", type=int, default=0)
    run_parser.add_argument("--policies", default="kvzip,kvzip-fisher")
    run_parser.add_argument("--ratios", default="0.25,0.125")
    run_parser.add_argument("--codec", default="", help="raw16, int8, int4; by default none: eviction alone")
    run_parser.add_argument("--formats", default="prefix,plain")
    run_parser.add_argument("--forced", action="store_true", help="only teacher-forced answers: faster, and no F1")
    run_parser.add_argument("--model", default="", help="a folder; by default the embedded model")
    run_parser.add_argument("--dtype", default="float32", help="of the model; auto is what a worker takes here")
    run_parser.add_argument("--out", type=Path, required=True)
    report_parser = commands.add_parser("report")
    report_parser.add_argument("files", type=Path, nargs="+")
    report_parser.add_argument("--plot", type=Path, help="folder for the plots")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    else:
        report(arguments.files, arguments.plot)


@torch.no_grad()
def run(arguments: argparse.Namespace) -> None:
    """Measure every document."""
    device = pick_device("auto")
    served = serve("quality", located(arguments.model), device, pick_dtype(arguments.dtype, device))
    served = served.with_artifact(packaged(served.weights, served.model.geometry))
    names = [name for name in arguments.names.split(",") if name]
    texts = from_folder(arguments.documents, names, arguments.questions) if arguments.documents else []
    if arguments.ruler:
        length = Length(arguments.ruler, lambda text: len(served.prompter.raw(text, begins=False)))
        texts += documents(arguments.filler.read_text(), length, arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as out:
        for text in texts:
            for kind in sorted({"chat" if name == "chat" else "raw" for name in arguments.formats.split(",")}):
                for row in rows_of(served, text, kind, arguments):
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                    print(_line(row), flush=True)


def rows_of(served: Served, text: Text, kind: str, arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Everything that is measured on one document, as a raw or as a chat context."""
    prompter, model = served.prompter, served.model
    part = prompter.context_part([Message("user", text.text)]) if kind == "chat" else prompter.raw_part(text.text)
    document = document_of(prompter, part, [question.text for question in text.questions[:2] if question.text])
    formats = [name for name in arguments.formats.split(",") if (name == "chat") == (kind == "chat")]
    ends = set(served.card.eos_ids)
    whole: Snapshot | None = None
    asked: dict[str, list[asking.Asked]] = {}
    for name in ["full", *arguments.policies.split(",")]:
        full, scores, seconds = timed_prefill(served, document, name)
        if whole is None:
            whole = _attempt(served, document, full, scores, Compression("full", 1.0)).cut(document.n_tokens)
            asked = {
                form: asking.with_references(
                    model, whole, [_asked(served, part, question, form) for question in text.questions], ends
                )
                for form in formats
            }
        for ratio in [1.0] if name == "full" else [float(found) for found in arguments.ratios.split(",")]:
            how = Compression(name, ratio)
            attempt, per_head = _attempt(served, document, full, scores, how), budget_per_head(document.n_tokens, how)
            if attempt.n_protected(per_head) > per_head:
                continue
            cut = attempt.cut(per_head)
            snapshot, n_bytes = _coded(served, cut, arguments.codec)
            for form in formats:
                answers = asking.measure(model, snapshot, asked[form], prompter, ends, decode=not arguments.forced)
                yield {
                    "document": text.name,
                    "format": form,
                    "policy": name,
                    "codec": arguments.codec or "none",
                    "keep_ratio": ratio,
                    "kept": cut.keys.shape[0] / whole.keys.shape[0],
                    "bytes_per_token": n_bytes / document.n_tokens,
                    "n_tokens": document.n_tokens,
                    "cost": seconds,
                    "continuation_kl": _continuation_kl(served, whole, snapshot, text) if form == formats[0] else None,
                    "answers": [asdict(answer) for answer in answers],
                }


def timed_prefill(served: Served, document: Document, name: str) -> tuple[Prefill, Tensor, dict[str, float]]:
    """The full cache with what the policy needs, its scores, and seconds for prefill and for scoring."""
    marks: dict[str, float] = {}

    def note(stage: str, done: int, total: int) -> None:
        if stage == "prefill" and done == total:
            marks["read"] = time.perf_counter()

    began = time.perf_counter()
    full = prefill(served.model, served.rotary, document, POLICIES[name].needs, note)
    read = time.perf_counter()
    scores = score(full, POLICIES[name])
    seconds = {"prefill_s": marks["read"] - began, "observe_s": read - marks["read"]}
    return full, scores, {**seconds, "score_s": time.perf_counter() - read}


def _attempt(served: Served, document: Document, full: Prefill, scores: Tensor, how: Compression) -> Attempt:
    return Attempt(served.model, served.rotary, document, how, b"", full, scores)


def _coded(served: Served, cut: Snapshot, codec: str) -> tuple[Snapshot, int]:
    """The snapshot through a codec, and its stored bytes; without one, 16 bits per number are counted."""
    if not codec:
        return cut, pack(cut, CODECS["raw16"], served.rotary).n_bytes
    packed = pack(cut, CODECS[codec], served.rotary)
    return load(served.model, served.rotary, packed, cut.header.fingerprint), packed.n_bytes


def _asked(served: Served, part: ContextPart, question: Question, form: str) -> asking.Asked:
    if form != "chat":
        return asking.as_asked(served.prompter, question, with_prefix=form == "prefix")
    prompt = served.prompter.query_part(part.roles, [Message("user", question.text or question.prefix)])
    gold = served.prompter.raw(question.answers[0], begins=False)
    return asking.Asked(question, prompt, gold)


def _continuation_kl(served: Served, whole: Snapshot, snapshot: Snapshot, text: Text) -> float | None:
    tokens = served.prompter.raw(text.continuation, begins=False)[:_CONTINUED] if text.continuation else []
    if len(tokens) < 2:
        return None
    expected = asking.continuation(served.model, whole, tokens)
    found = asking.continuation(served.model, snapshot, tokens)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def _line(row: dict[str, Any]) -> str:
    answers = row["answers"]
    kl = sum(answer["kl"] for answer in answers) / max(1, len(answers))
    right = sum(answer["exact"] for answer in answers)
    return (
        f"{row['document']:20} {row['format']:6} {row['policy']:18} keep {row['keep_ratio']:<6g} "
        f"KL {kl:.4f} right {right:g}/{len(answers)}"
    )


if __name__ == "__main__":
    main()
