"""The default model's GGUF is read bit for bit as the reference reader reads it, and becomes a working folder."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.gguf import GGUF, convert, tokenizer
from workers.models import gguf_of_default


@pytest.fixture(scope="module")
def source() -> Path:
    return gguf_of_default()


def test_every_tensor_equals_the_reference_reader(source: Path) -> None:
    ours = GGUF(source)
    theirs = {t.name: t for t in gguf.GGUFReader(source).tensors}
    assert {t.name for t in ours.tensors} == set(theirs)
    for info in ours.tensors:
        expected = gguf.dequantize(theirs[info.name].data, theirs[info.name].tensor_type)
        assert np.array_equal(ours.read(info).numpy(), expected), info.name


def test_the_converted_folder_answers_a_question(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = tmp_path / "model"
    convert(source, folder, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (272, 272)
    assert not folder.with_name("model.partial").exists()
    words = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = words.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "The capital of France is Paris." in words.decode(out[0])


def test_digits_are_tokens_of_their_own_as_in_the_original_tokenizer(source: Path) -> None:
    made = tokenizer(GGUF(source).fields)
    assert made.encode("In 1984").tokens == ["In", "Ġ", "1", "9", "8", "4"]
    assert made.decode(made.encode("naïve 日本 👍\r\n").ids) == "naïve 日本 👍\r\n"


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"nope" * 10)
    with pytest.raises(ValueError, match="not a GGUF"):
        GGUF(path)
