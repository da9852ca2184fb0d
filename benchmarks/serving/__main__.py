"""First tokens, decoding and memory over stored documents, in one run and in turns.

    python -m benchmarks.serving latency --document FILE --out F [--llama FOLDER] [--tokens 2000,4000,7000]
    python -m benchmarks.serving throughput --document FILE --out F [--llama FOLDER] [--streams 1,4,8,16]
    python -m benchmarks.serving report F [F ...]

`transformers` reads the document again for every question (generate, SDPA, in the dtype that workers choose here).
`llama.cpp` restores its slot file and reads the question: BF16 or Q8_0 weights, keys and values in 16 bits, flash
attention. `precis cold` is a worker that was just started and has the snapshot in Redis only, `precis warm` has it in
memory; both over HTTP. Without --llama that peer is left out; the folder is where it is built at first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.model import located
from benchmarks.serving.ours import Service
from benchmarks.serving.peer import Peer, built, weights
from benchmarks.serving.plain import Plain
from precis.attempt import Attempt
from precis.core import Snapshot
from precis.pipeline import answer, document_of
from precis.policies import POLICIES
from precis.prefill import prefill
from precis.sampling import Sampler
from precis.selection import score
from precis.text import Prompter
from precis.wire.messages import Message
from precis.wire.presets import Compression
from workers.models import Served, gguf_of_default, pick_device, pick_dtype, serve

QUESTION = "What does this text say about the harbour? Answer in one short sentence."
_DECODED, _REPEATS = 64, 5
Asked = tuple[float, float, int]  # first token and end, on the clock, and tokens


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("latency", "throughput"):
        runner = commands.add_parser(name)
        runner.add_argument("--document", type=Path, required=True, help="a long text")
        runner.add_argument("--tokens", default="2000,4000,7000" if name == "latency" else "7000")
        runner.add_argument("--streams", default="1,4,8,16")
        runner.add_argument("--repeats", type=int, default=_REPEATS)
        runner.add_argument("--llama", type=Path, help="where llama.cpp is built, or was")
        runner.add_argument("--weights", default="BF16,Q8_0", help="of llama.cpp")
        runner.add_argument("--out", type=Path, required=True)
    reporter = commands.add_parser("report")
    reporter.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "report":
        print(report([json.loads(line) for file in arguments.files for line in file.read_text().splitlines()]))
        return
    measure = latency if arguments.command == "latency" else throughput
    with arguments.out.open("a") as out, tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        for row in measure(arguments, Path(folder), running):
            out.write(json.dumps({**row, **rig()}) + "\n")
            out.flush()
            print(row, flush=True)


class Cut:
    """A document of about so many tokens, as each system takes it."""

    def __init__(self, prompter: Prompter, text: str, n_tokens: int) -> None:
        self.text = prompter.decode(prompter.raw(text, begins=False)[:n_tokens])
        part = prompter.context_part([Message("user", self.text)])
        self.part, self.context = part, list(part.token_ids)
        self.question = prompter.query_part(part.roles, [Message("user", QUESTION)])
        self.prompt = self.context + self.question


def latency(arguments: argparse.Namespace, folder: Path, running: ExitStack) -> Iterator[dict[str, Any]]:
    """First tokens after a stored document, and decoding of one stream."""
    served, cuts, peers = _prepared(arguments, folder, running, slots=1)
    plain = Plain(located(""), served.model.dtype)
    whole = {n: everything(served, cut) for n, cut in cuts.items()}
    service = Service(folder / "precis", {"PRECIS_THREADS": "0"})
    running.callback(service.stop)
    stored = {n: service.put(cut.text, {"codec": {"name": "tc", "ratio": 16}}) for n, cut in cuts.items()}
    files = {(name, n): peer.read(cut.context, str(n)) for name, peer in peers.items() for n, cut in cuts.items()}
    for _ in range(arguments.repeats):
        for n, cut in cuts.items():
            yield told("transformers", n, partial(plain.ask, cut.prompt, _DECODED), 0)
            for name, peer in peers.items():
                yield told(name, n, partial(_restored, peer, str(n), cut.prompt), files[name, n])
            service.stop()
            service.start()
            time.sleep(2)
            known, n_bytes = stored[n]["id"], stored[n]["storage"]["stored_bytes"]
            for way in ("precis cold", "precis warm"):
                yield told(way, n, partial(service.ask, known, QUESTION, _DECODED), n_bytes)
            yield told("precis engine", n, partial(engine, served, whole[n], cut.question), 0)


def throughput(arguments: argparse.Namespace, folder: Path, running: ExitStack) -> Iterator[dict[str, Any]]:
    """Tokens per second of many streams on one document and on as many, and what it takes in memory."""
    streams = [int(found) for found in arguments.streams.split(",")]
    _, cuts, peers = _prepared(arguments, folder, running, slots=max(streams))
    service = Service(folder / "precis", {"PRECIS_THREADS": "0", "PRECIS_SLOTS": str(max(streams))})
    running.callback(service.stop)
    for n, cut in cuts.items():
        for peer in peers.values():
            peer.read(cut.context, str(n))
        many = {"codec": {"name": "tc", "ratio": 16}}
        known = [service.put(f"{index}. {cut.text}", many)["id"] for index in range(max(streams))]
        for _ in range(arguments.repeats):
            for count in streams:
                for name, peer in peers.items():
                    for slot in range(count):
                        peer.restore(slot, str(n))
                    made = _together([partial(peer.ask, cut.prompt, _DECODED, slot) for slot in range(count)])
                    yield {**_rate(name, n, count, made), "bytes": psutil.Process(peer.process.pid).memory_info().rss}
                for way, ids in (("precis, one document", known[:1] * count), ("precis, as many", known[:count])):
                    made = _together([partial(service.ask, known_id, QUESTION, _DECODED) for known_id in ids])
                    yield {**_rate(way, n, count, made), "bytes": service.resident_bytes}


def _restored(peer: Peer, name: str, prompt: list[int]) -> Asked:
    peer.restore(0, name)
    return peer.ask(prompt, _DECODED, 0)


def everything(served: Served, cut: Cut) -> Snapshot:
    """The snapshot that keeps every entry as it is."""
    document, how = document_of(served.prompter, cut.part), Compression("full", 1.0)
    full = prefill(served.model, served.rotary, document)
    scores = score(full, POLICIES["full"])
    return Attempt(served.model, served.rotary, document, how, b"", full, scores).cut(document.n_tokens)


def engine(served: Served, snapshot: Snapshot, question: list[int]) -> Asked:
    """The same question without service, queue and streaming."""
    first = 0.0
    for _ in answer(served.model, snapshot, question, Sampler(), _DECODED):
        first = first or time.perf_counter()
    return first, time.perf_counter(), _DECODED


def _prepared(
    arguments: argparse.Namespace, folder: Path, running: ExitStack, slots: int
) -> tuple[Served, dict[int, Cut], dict[str, Peer]]:
    device = pick_device("cpu")
    served = serve("benchmark", located(""), device, pick_dtype("auto", device))
    text = arguments.document.read_text()
    cuts = {int(n): Cut(served.prompter, text, int(n)) for n in arguments.tokens.split(",")}
    peers = {}
    if arguments.llama:
        programs = built(arguments.llama)
        for kind in arguments.weights.split(","):
            model = weights(programs, gguf_of_default(), kind)
            options = {"slots": slots, "context": 8192, "threads": torch.get_num_threads()}
            peer = peers[f"llama.cpp {kind}"] = Peer(programs, model, folder / kind, **options)
            running.callback(peer.stop)
    return served, cuts, peers


def told(system: str, n_tokens: int, ask: Callable[[], Asked], n_bytes: int) -> dict[str, Any]:
    """One question's times."""
    began = time.perf_counter()
    first, end, n = ask()
    decode = (n - 1) / (end - first)
    return {"system": system, "tokens": n_tokens, "first_s": first - began, "decode": decode, "bytes": n_bytes}


def _together(asks: Sequence[Callable[[], Asked]]) -> list[Asked]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return [asked.result() for asked in [pool.submit(ask) for ask in asks]]


def _rate(system: str, n_tokens: int, count: int, made: Sequence[Asked]) -> dict[str, Any]:
    """All tokens after the first over the longest time that a stream took for them."""
    rate = sum(n - 1 for _, _, n in made) / max(end - first for first, end, _ in made)
    return {"system": system, "tokens": n_tokens, "streams": count, "decode": rate}


def rig() -> dict[str, Any]:
    """What it was measured on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {"commit": commit.strip(), "threads": torch.get_num_threads()}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Medians, and how many times sooner or faster than the others `precis` is."""
    groups: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["tokens"], row.get("streams", 0), row["system"]].append(row)
    lines = ["| tokens | streams | system | first token, ms | tokens per second | MB | runs |", "|" + "---|" * 7]
    for (n, streams, system), own in sorted(groups.items()):
        first = f"{1e3 * statistics.median(r['first_s'] for r in own):.0f}" if "first_s" in own[0] else ""
        rate = f"{statistics.median(row['decode'] for row in own):.0f}"
        size = f"{statistics.median(row['bytes'] for row in own) / 1e6:.1f}" if own[0]["bytes"] else ""
        lines.append(f"| {n} | {streams or ''} | {system} | {first} | {rate} | {size} | {len(own)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
