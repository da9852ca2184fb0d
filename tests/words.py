"""A byte-level tokenizer with special tokens, and chat templates of several families. Nothing is downloaded."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from precis.wire.messages import ModelCard

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|end|>",
    "[/INST]",
]
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + '\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "phi3": PHI3, "none": ""}


def byte_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    """One token per byte, and the special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    return made


def card(template: str = "chatml", *, adds_bos: bool = False) -> ModelCard:
    """A model card around the byte tokenizer."""
    return ModelCard(
        name="bytes",
        digest="d",
        tokenizer_json=byte_tokenizer(adds_bos=adds_bos).to_str(),
        tokenizer_digest="t",
        chat_template=TEMPLATES[template],
        bos_token="<s>",
        eos_token="</s>",
        eos_ids=[257],
        max_length=512,
        min_room=64,
        n_layers=4,
        n_kv_heads=2,
        dtype="float32",
        raw_bytes_per_token=384,
    )
