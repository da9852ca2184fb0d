"""Tables with confidence intervals, and plots, from result files."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

_RESAMPLES = 500
_COLUMNS = (
    "policy",
    "bytes/token",
    "right",
    "retained",
    "KL",
    "worst KL",
    "top-1",
    "delta NLL",
    "F1",
    "continuation KL",
    "scoring / prefill",
)
Row = dict[str, Any]
Group = tuple[str, str, str, float]  # format, policy, codec, keep ratio


def report(files: Sequence[Path], plots: Path | None) -> None:
    """Print a table per format and keep ratio; draw plots if asked to."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    groups = grouped(rows)
    print(table(groups))
    if plots is not None:
        draw(groups, plots)


def grouped(rows: Sequence[Row]) -> dict[Group, list[Row]]:
    """Rows of one policy at one ratio; of rows measured twice the last counts."""
    latest = {(r["document"], r["format"], r["policy"], r["codec"], r["keep_ratio"]): r for r in rows}
    found: dict[Group, list[Row]] = defaultdict(list)
    for (_, form, policy, codec, ratio), row in latest.items():
        found[form, policy, codec, ratio].append(row)
    return dict(found)


def table(groups: dict[Group, list[Row]]) -> str:
    """Markdown. Intervals are 95 % by bootstrap over documents and, inside them, questions."""
    fulls = {
        (row["document"], form, answer["name"]): answer
        for (form, policy, _, _), rows in groups.items()
        if policy == "full"
        for row in rows
        for answer in row["answers"]
    }
    lines = []
    for form, ratio in sorted({(form, ratio) for form, _, _, ratio in groups}, key=lambda pair: (pair[0], -pair[1])):
        found = {key: rows for key, rows in groups.items() if (key[0], key[3]) == (form, ratio)}
        n_documents = max(len(rows) for rows in found.values())
        n_questions = sum(len(row["answers"]) for row in max(found.values(), key=len))
        lines += [
            f"\n### {form}, keep ratio {ratio:g}: {n_questions} questions on {n_documents} documents\n",
            "| " + " | ".join(_COLUMNS) + " |",
            "|---" * len(_COLUMNS) + "|",
        ]
        lines += [_row(key, rows, fulls) for key, rows in sorted(found.items(), key=lambda item: _kl(item[1]))]
    return "\n".join(lines)


def _kl(rows: Sequence[Row]) -> float:
    return float(mean(answer["kl"] for row in rows for answer in row["answers"]))


def _row(key: Group, rows: list[Row], fulls: dict[tuple[str, str, str], Any]) -> str:
    form, policy, codec, _ = key

    def of_full(row: Row, answer: Any) -> Any:
        return fulls.get((row["document"], form, answer["name"]), answer)

    def kept_right(row: Row) -> list[float]:
        return [a["exact"] for a in row["answers"] if of_full(row, a)["exact"] == 1]

    right = interval(rows, lambda row: [answer["exact"] for answer in row["answers"]])
    retained = interval(rows, kept_right)
    kl = interval(rows, lambda row: [answer["kl"] for answer in row["answers"]])
    delta = interval(rows, lambda row: [a["nll"] - of_full(row, a)["nll"] for a in row["answers"]])
    f1 = interval(rows, lambda row: [answer["f1"] for answer in row["answers"]])
    worst = max(answer["kl"] for row in rows for answer in row["answers"])
    agreement = mean(answer["agreement"] for row in rows for answer in row["answers"])
    continued = [row["continuation_kl"] for row in rows if row["continuation_kl"] is not None]
    cost = mean((row["cost"]["observe_s"] + row["cost"]["score_s"]) / row["cost"]["prefill_s"] for row in rows)
    name = policy if codec == "none" else f"{policy} + {codec}"
    cells = [
        name,
        f"{mean(row['bytes_per_token'] for row in rows):.0f}",
        right,
        retained,
        kl,
        f"{worst:.2f}",
        f"{agreement:.3f}",
        delta,
        f1,
        f"{mean(continued):.4f}" if continued else "-",
        f"{cost:.2f}x",
    ]
    return "| " + " | ".join(cells) + " |"


def interval(rows: Sequence[Row], values: Callable[[Row], list[float]]) -> str:
    """Mean over questions with its 95 % interval."""
    per_document = [found for found in (values(row) for row in rows) if found]
    every = [value for found in per_document for value in found]
    if not every:
        return "-"
    chance = random.Random(0)
    means = []
    for _ in range(_RESAMPLES):
        chosen = chance.choices(per_document, k=len(per_document))
        means.append(mean(value for found in chosen for value in chance.choices(found, k=len(found))))
    means.sort()
    low, high = means[int(0.025 * _RESAMPLES)], means[int(0.975 * _RESAMPLES)]
    return f"{mean(every):.3f} [{low:.3f}, {high:.3f}]"


def draw(groups: dict[Group, list[Row]], folder: Path) -> None:
    """KL and share of right answers over stored bytes per token, one picture per format."""
    from matplotlib import pyplot  # noqa: PLC0415 — only here, and only the benchmarks' extra has it

    folder.mkdir(parents=True, exist_ok=True)
    for form in sorted({key[0] for key in groups}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
        curves: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for (own, policy, codec, _), rows in groups.items():
            if own == form and policy != "full":
                n_bytes = mean(row["bytes_per_token"] for row in rows)
                exact = mean(answer["exact"] for row in rows for answer in row["answers"])
                curves[policy if codec == "none" else f"{policy} + {codec}"].append((n_bytes, _kl(rows), exact))
        for name, points in sorted(curves.items()):
            points.sort()
            left.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=name)
            right.plot([p[0] for p in points], [p[2] for p in points], marker="o", label=name)
        left.set(xlabel="stored bytes per token", ylabel="KL, nats per token", xscale="log", yscale="log")
        right.set(xlabel="stored bytes per token", ylabel="share of right answers", xscale="log")
        right.legend(fontsize=7, loc="lower right")
        figure.tight_layout()
        figure.savefig(folder / f"quality-{form}.png", dpi=110)
        pyplot.close(figure)
