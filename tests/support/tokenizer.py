"""Small tokenizers made on the spot: byte-level BPE with special tokens and a chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPECIAL_TOKENS: Final = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<tool_call>")
"""In the order of their ids, from 0."""

CHAT_TEMPLATE: Final = """\
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + call.function.arguments | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '(no thoughts)\\n' }}
    {%- endif %}
{%- endif %}
"""

_WORDS: Final = (
    "the quick brown fox jumps over the lazy dog while replicas cache prefixes of prompts",
    "You are a helpful assistant. Answer in short sentences, and name your sources.",
    'def router(request): return {"user": "bob", "model": "tiny", "tools": [1, 2, 3]}',
    "Ärger über Größe, naïve café, 你好世界, привет мир, 🦙 llamas eat grass",
)


def write_tokenizer(
    folder: Path,
    *,
    chat_template: str | list[dict[str, str]] | None = CHAT_TEMPLATE,
    config: dict[str, Any] | None = None,
    vocabulary_size: int = 1000,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
) -> Path:
    """Train a tokenizer, save it with its config in ``folder`` and return the folder.

    Plain text gets ``<|bos|>`` in front when special tokens are asked for.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in special_tokens],
    )
    tokenizer.train_from_iterator(_WORDS * 20, trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": {"content": bos}, "eos_token": SPECIAL_TOKENS[2]}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | (config or {})))
    return folder
