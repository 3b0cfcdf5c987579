"""Made-up text of an agent's working day, and a small tokenizer that was trained on it.

The demo needs prompts of thousands of tokens and a tokenizer for them, without a download. Text and
tokenizer follow from a seed. The tokenizer is a byte-level BPE with a ChatML template: the same
kind of files that a real model brings.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY_TOKENS: Final = 1_536
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_TRAINING_CHARS: Final = 120_000


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_THINGS: Final = _words(
    "account address backup balance batch branch build bucket cache campaign certificate channel "
    "charge cluster column commit container contract coupon currency customer cursor dashboard "
    "database delivery deployment discount document email endpoint event export failure feature "
    "field file flag form gateway header hostname import incident index inventory invoice issue "
    "item job key label ledger limit link lock log manifest message metric migration module name "
    "network node note order package page parser partition password patch payment permission "
    "pipeline plan policy price process product profile project queue quota record refund region "
    "release replica report request response result retry role route rule schedule schema script "
    "secret segment server session shipment signature snapshot source stock storage stream summary "
    "supplier table tag target task template tenant test ticket timeout token trace transaction "
    "trigger type update upload user value version voucher warehouse webhook worker zone"
)
_ACTIONS: Final = _words(
    "accept add apply approve archive assign attach audit cancel check clear close collect compare "
    "compress confirm convert copy count create delete deliver deny describe detect disable drop "
    "enable escalate explain fetch filter find fix group insert inspect join keep list load merge "
    "move notify open parse pause print publish read reject release remove rename repair replace "
    "resolve restart restore return review revoke rotate route run save scan search select send "
    "split start stop store submit summarise test transfer undo update upload validate verify write"
)
_QUALITIES: Final = _words(
    "active archived broken closed cold correct current damaged default duplicate early empty "
    "expired external failed final first full hidden high internal large last late local locked "
    "low missing new next old open original partial pending previous primary private public ready "
    "recent remote required rejected second shared short slow stale temporary unknown unpaid valid"
)
_RULES: Final = (
    "Always {action} the {quality} {thing} before you {action2} the {thing2}.",
    "Never {action} a {thing} that belongs to a {quality} {thing2}; {action2} it instead.",
    "If the {thing} is {quality}, {action} the {thing2} and tell the user which {thing} it was.",
    "When two of them disagree about a {thing}, the {quality} {thing2} is right.",
    "You may {action} the {thing} without asking as long as the {thing2} stays {quality}.",
    "A {quality} {thing} is no reason to {action} the {thing2}: {action2} the {thing} first.",
)
_TASKS: Final = (
    "Please {action} the {quality} {thing} and {action2} every {thing2} that depends on it.",
    "Since yesterday the {thing} has been {quality}, and nobody could {action} the {thing2}.",
    "Find out why the {thing2} is {quality} and {action} the {thing} if you can.",
)
_LOG_LINES: Final = (
    "{level} {thing}.{thing2}: could not {action} {quality} {thing} ({number} of {number2})",
    "{level} {thing}/{thing2}: {action} took {number} ms, {number2} {quality} rows",
    '{{"{thing}": "{quality}", "{thing2}": {number}, "next": "{action2}"}}',
    "{level} {action} {thing} -> {action2} {thing2}: {quality}",
)


class Prose:
    """Sentences from a few words; what is said depends only on the generator that is passed in."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rules(self, chars: int) -> str:
        """Return numbered rules, as system prompts have them, of about ``chars`` characters."""
        lines: list[str] = []
        while sum(map(len, lines)) < chars:
            lines.append(f"{len(lines) + 1}. {self._filled(_RULES)} {self._filled(_RULES)}\n")
        return "".join(lines)

    def task(self, chars: int) -> str:
        """Return what a user asks for."""
        return self._joined(_TASKS, chars, " ")

    def output(self, chars: int) -> str:
        """Return what a tool prints."""
        return self._joined(_LOG_LINES, chars, "\n")

    def title(self) -> str:
        """Return a short name, such as ``invoice-parser``."""
        return f"{self._rng.choice(_THINGS)}-{self._rng.choice(_THINGS)}"

    def _joined(self, patterns: tuple[str, ...], chars: int, separator: str) -> str:
        parts: list[str] = []
        while sum(map(len, parts)) < chars:
            parts.append(self._filled(patterns))
        return separator.join(parts)

    def _filled(self, patterns: tuple[str, ...]) -> str:
        choice = self._rng.choice
        return choice(patterns).format(
            action=choice(_ACTIONS),
            action2=choice(_ACTIONS),
            quality=choice(_QUALITIES),
            thing=choice(_THINGS),
            thing2=choice(_THINGS),
            level=choice(("INFO", "WARN", "ERROR")),
            number=self._rng.randrange(1_000),
            number2=self._rng.randrange(1_000),
        )


def write_tokenizer(directory: Path, seed: int) -> Path:
    """Train a tokenizer, write its files into ``directory`` and return that."""
    prose = Prose(random.Random(seed))  # noqa: S311 - reproducible, not secret
    third = _TRAINING_CHARS // 3
    corpus = (prose.rules(third), prose.task(third), prose.output(third))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
    )
    tokenizer.train_from_iterator((line for text in corpus for line in text.split("\n")), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": SPECIAL_TOKENS[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
