"""Questions about one of two documents, asked of both: put together in several ways, beside what each way replaces.

    python -m benchmarks.together --documents ../shared/evalset/dev

`read together`: the two texts read as one. `in a row N`: two snapshots as one, N tokens of the second read again.
`surest`: each asked alone, and the answer whose tokens were likeliest on average. `known`: only the right one asked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.model import located
from benchmarks.quality import measure as asking
from benchmarks.quality.corpus import Text, from_folder
from precis.compose import Part, compose
from precis.pipeline import compress, document_of
from precis.wire.presets import resolve, with_artifacts
from workers import models
from workers.models import Served

PAIRS = (
    ("dev-novel1", "dev-wiki1"),
    ("dev-tech", "dev-legal"),
    ("dev-wiki1", "dev-kv"),
    ("dev-legal", "dev-novel1"),
    ("dev-code", "dev-tech"),
)
AGAIN = (0, 4, 16, 64)


def main() -> None:
    """Print a row per way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=8, help="of each document")
    parser.add_argument("--codec", default="raw16", help="raw16, or tc")
    parser.add_argument("--model", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    served = models.serve("model", located(arguments.model), torch.device("cpu"), torch.float32)
    texts = {text.name: text for text in from_folder(arguments.documents, [], arguments.questions)}
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for one, other in PAIRS:
            rows += measured(served, texts[one], texts[other], arguments.codec)
            print(f"{one} and {other}", flush=True)
    print(f"{'way':14} {'right':>6} {'KL':>6}   (KL to the two read together, nats per token)")
    for way in dict.fromkeys(row["way"] for row in rows):
        found = [row for row in rows if row["way"] == way]
        kls = [row["kl"] for row in found if row["kl"] is not None]
        kl = f"{sum(kls) / len(kls):.3f}" if kls else "-"
        print(f"{way:14} {sum(row['right'] for row in found) / len(found):6.3f} {kl:>6}   n={len(found)}")
    if arguments.out:
        arguments.out.write_text("\n".join(map(json.dumps, rows)) + "\n")


def measured(served: Served, one: Text, other: Text, codec: str) -> Iterator[dict[str, Any]]:
    """A row per question and way."""
    model, prompter, ends = served.model, served.prompter, set(served.card.eos_ids)
    parts = [snapshot_of(served, text.text, codec) for text in (one, other)]
    whole = snapshot_of(served, one.text + "\n\n" + other.text, codec).snapshot
    ways = {"read together": whole}
    ways |= {f"in a row {n}": compose(model, served.rotary, parts, n) for n in AGAIN}
    for index, text in enumerate((one, other)):
        plain = [asking.as_asked(prompter, question, with_prefix=False) for question in text.questions]
        asked = asking.with_references(model, whole, plain, ends)
        for way, snapshot in {**ways, "known": parts[index].snapshot}.items():
            for found in asking.measure(model, snapshot, asked, prompter, ends):
                kl = None if way == "known" else found.kl
                yield {"way": way, "question": found.name, "right": found.exact, "kl": kl}
        for question, answers in zip(
            text.questions, zip(*(alone(served, p, plain) for p in parts), strict=True), strict=True
        ):
            said = max(answers, key=lambda each: each[1])[0].lower()
            right = float(any(answer.lower() in said for answer in question.answers))
            yield {"way": "surest", "question": question.name, "right": right, "kl": None}


def snapshot_of(served: Served, text: str, codec: str) -> Part:
    """Everything kept."""
    how = with_artifacts(resolve("full", None, codec), served.model.artifacts)
    part = served.prompter.raw_part(text)
    made = compress(served.model, served.rotary, document_of(served.prompter, part), how)
    return Part(made.snapshot, part.token_ids)


def alone(served: Served, part: Part, asked: list[asking.Asked]) -> list[tuple[str, float]]:
    """Greedy answers of one document, up to the end of their line, with the mean log-probability of their tokens."""
    prompter, found = served.prompter, []
    for start in range(0, len(asked), 8):
        sessions, first = asking._read(served.model, part.snapshot, asked[start : start + 8])
        answers, logs = asking._decode(served.model, sessions, first, set(served.card.eos_ids))
        for answer, log in zip(answers, logs, strict=True):
            stop = next((n for n in range(1, len(answer)) if "\n" in prompter.decode(answer[: n + 1])), len(answer))
            sure = [float(row[token]) for row, token in zip(log[:stop], answer[:stop], strict=True)]
            found.append((prompter.decode(answer[:stop]), sum(sure) / len(sure)))
    return found


if __name__ == "__main__":
    main()
