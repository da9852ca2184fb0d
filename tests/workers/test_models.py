"""The default model: found, unpacked, checked at load, and exact against plain transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from precis.errors import InternalError, UnsupportedModel
from precis.families import Rotary, weight_digest
from precis.full_cache import Document
from precis.native import library
from precis.pipeline import answer, compress
from precis.sampling import Sampler
from precis.wire.presets import resolve
from tests.precis.build import attached
from workers import artifacts, models
from workers.gguf import convert
from workers.models import Served

CPU = torch.device("cpu")
TEXT = (Path(__file__).parents[2] / "benchmarks" / "harbour.txt").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, unpacked."""
    target = tmp_path_factory.mktemp("default") / "model"
    convert(models.gguf_of_default(), target, lambda *_: None)
    return target


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return models.serve("default", str(folder), CPU, torch.float32)


def test_full_and_raw16_give_the_greedy_tokens_of_plain_transformers(served: Served, folder: Path) -> None:
    context = served.prompter.raw(TEXT, begins=True)[:500]
    query = served.prompter.raw("\n\nQuestion: Who is the keeper?\nAnswer:", begins=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    ids = torch.tensor([context + query])
    with torch.inference_mode():
        expected = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0),
        )
    document = Document(torch.tensor(context), (0, len(context)))
    made = compress(served.model, served.rotary, document, resolve("full", None, "raw16"))
    found = [s.token_id for s in answer(served.model, made.snapshot, query, Sampler(), 24)]
    assert found == expected[0, ids.shape[1] :].tolist()
    assert made.fidelity.kl < 1e-5


def test_the_card_describes_the_default_model(served: Served) -> None:
    card = served.card
    assert (card.n_layers, card.n_kv_heads, card.max_length, card.max_context) == (30, 3, 8192, 7936)
    assert card.raw_bytes_per_token == 23040
    assert set(card.eos_ids) >= {0, 2}
    assert served.model.digest == card.digest


def test_the_default_models_tables_come_with_the_package(served: Served, folder: Path) -> None:
    found = artifacts.packaged(served.weights, served.model.geometry)
    assert found is not None
    assert served.with_artifact(found).card.artifacts == {"heads": found.fingerprint}
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert weight_digest(half) in found.weights


def test_a_model_that_computes_something_else_is_not_served() -> None:
    model = attached()
    geometry = replace(model.geometry, scaling=tuple(2 * s for s in model.geometry.scaling))
    probe = torch.arange(24) + 3
    model.hf.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model.hf(input_ids=probe[None], use_cache=False).logits[0]
    model.hf.set_attn_implementation("precis")
    models.check_against(model, probe, expected)
    with pytest.raises(InternalError, match="disagree"):
        models.check_against(replace(model, geometry=geometry), probe, expected)


def test_the_native_decoder_is_used_where_it_computes_the_same_and_only_there() -> None:
    model, probe = attached(), torch.arange(24) + 3
    rotary = Rotary(model, 64)
    model.hf.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model.hf(input_ids=probe[None], use_cache=False).logits[0]
    model.hf.set_attn_implementation("precis")
    if library() is None:
        assert models.native_decoder(model, rotary, probe, expected) is None
        return
    assert models.native_decoder(model, rotary, probe, expected) is not None
    for factor in (2.0, float("nan")):
        geometry = replace(model.geometry, scaling=tuple(factor * s for s in model.geometry.scaling))
        assert models.native_decoder(replace(model, geometry=geometry), rotary, probe, expected) is None


def test_a_default_that_was_not_unpacked_says_how(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"workers\.unpack"):
        models.locate(models.DEFAULT_MODEL, tmp_path)
    assert models.locate("org/name", tmp_path) == "org/name"


def test_device_and_dtype_can_be_named_or_found() -> None:
    assert models.pick_device("cpu") == CPU
    assert models.pick_dtype("bfloat16", CPU) == torch.bfloat16
    assert models.pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert models.pick_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
