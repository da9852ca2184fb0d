"""The C++ kernel equals the torch reference, at every instruction level that this machine has."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from precis import native
from precis.attention import native as backend
from precis.attention.dense import Maxima, recording_attention
from precis.families import Rotary
from precis.native.build import build
from precis.observations.repeat import RepeatAttention
from precis.prefill import prefill
from tests.precis.build import N_CONTEXT, attached, document, tokens

FILES = [native.file_of(level) for level in native.levels() if native.file_of(level).exists()]


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One compiled file in use."""
    found = native.opened(Path(request.param))
    monkeypatch.setattr("precis.attention.native.library", lambda: found)
    return Path(request.param)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_it_was_compiled_where_there_is_a_compiler(tmp_path: Path) -> None:
    assert FILES
    assert native.library() is not None
    for source in Path(native.__file__).parent.glob("*.[ch]*"):
        (tmp_path / source.name).write_text(source.read_text())
    made = build(tmp_path)
    assert {path.name for path in made} >= {path.name for path in FILES}
    (tmp_path / "attention.cpp").write_text("this is no C++")
    with pytest.raises(RuntimeError, match="error"):
        build(tmp_path)


def inputs(seed: int, n_heads: int, n_kv_heads: int, n: int, m: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n_heads, n, head_dim), (n_kv_heads, m, head_dim), (n_kv_heads, m, head_dim))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def compare(parts: tuple[Tensor, Tensor, Tensor], maxima: Maxima, **options: object) -> None:
    """Output and maxima of both, on maxima that were raised before."""
    query = parts[0]
    before = torch.rand(maxima.best.shape, generator=torch.Generator().manual_seed(9)) * 0.02
    one, other = (replace(maxima, best=before.clone(), squares=before.clone()) for _ in range(2))
    scaling = query.shape[-1] ** -0.5
    expected = recording_attention(*parts, one, scaling=scaling, **options)  # type: ignore[arg-type]
    found = backend.recording_attention(*parts, other, scaling=scaling, **options)  # type: ignore[arg-type]
    exact = query.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5 if exact else 1e-2, rtol=1e-5 if exact else 2e-2)
    torch.testing.assert_close(other.best, one.best, atol=1e-6, rtol=1e-4)
    assert float((one.best - before).max()) > 0
    assert one.squares is not None
    assert other.squares is not None
    torch.testing.assert_close(other.squares, one.squares, atol=1e-6, rtol=1e-4)
    assert float((one.squares - before).max()) > 0


@pytest.mark.parametrize("head_dim", [4, 12, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(3, 3), (6, 2), (7, 1)])
def test_every_head_size_and_group(level: Path, head_dim: int, n_heads: int, n_kv_heads: int) -> None:
    maxima = Maxima((10, 60), 4, 90, torch.zeros(n_heads, 50))
    compare(inputs(1, n_heads, n_kv_heads, 37, 90 + 37, head_dim), maxima)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 33), (24, 24), (25, 64), (49, 300), (130, 1000)])
@pytest.mark.parametrize("whole", [True, False])
def test_every_length_and_span(level: Path, n: int, m: int, whole: bool) -> None:
    n_context = max(1, m - n)
    span = (0, n_context) if whole else (n_context // 3, max(n_context // 3 + 1, n_context // 2))
    compare(inputs(2, 4, 2, n, m, 16), Maxima(span, 4, n_context, torch.zeros(4, span[1] - span[0])))


@pytest.mark.parametrize("window", [None, 45, 100, 5000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("span", [(0, 150), (40, 120)])
def test_every_option(
    level: Path, window: int | None, softcap: float | None, sinks: bool, span: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, generator=generator) * 2 if sinks else None
    weights = torch.rand(60, generator=generator) + 0.5
    maxima = Maxima(span, 4, 150, torch.zeros(4, span[1] - span[0]), weights)
    compare(inputs(3, 4, 2, 60, 210, 24), maxima, window=window, softcap=softcap, sinks=logits)


def test_half_precision_and_views_of_larger_tensors(level: Path) -> None:
    query, key, value = (part.to(torch.bfloat16) for part in inputs(4, 4, 2, 20, 80, 32))
    maxima = Maxima((0, 60), 4, 60, torch.zeros(4, 60))
    compare((query, key, value), maxima)
    wide = torch.zeros(2, 200, 32)
    wide[:, 50:130] = key.float()
    compare((query.float().transpose(0, 1).contiguous().transpose(0, 1), wide[:, 50:130], value.float()), maxima)


def test_large_logits_neither_overflow_nor_vanish(level: Path) -> None:
    query, key, value = inputs(5, 2, 1, 30, 100, 16)
    compare((query * 40, key * 40, value), Maxima((0, 70), 4, 70, torch.zeros(2, 70)))


def test_shapes_that_do_not_fit_are_refused(level: Path) -> None:
    query, key, value = inputs(6, 2, 1, 10, 30, 16)
    with pytest.raises(ValueError, match="fit together"):
        backend.recording_attention(query, key, value, Maxima((0, 40), 4, 40, torch.zeros(2, 40)), scaling=1.0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-window"])
def test_repeating_gives_the_same_scores_without_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, token_ids = attached(family), tokens(N_CONTEXT)
    needs = [RepeatAttention(chunk=64)]
    (with_kernel,) = prefill(model, Rotary(model, 512), document(token_ids), needs).observed.values()
    monkeypatch.setattr("precis.attention.native.library", lambda: None)
    (without,) = prefill(model, Rotary(model, 512), document(token_ids), needs).observed.values()
    torch.testing.assert_close(with_kernel, without, atol=1e-6, rtol=1e-4)
