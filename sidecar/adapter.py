"""The adapters (LoRA) that an engine lists, and the names under which their pages are known.

Pages of an adapter are told by its name, and its name says nothing of its weights: an engine may
load others under the same one. What tells is where they came from (``root`` in ``/v1/models``). A
name whose root changed goes on under another key, and what was known under the old one is
forgotten: engines hash the root as well (vLLM), so no prompt finds those pages any more. Pages that
came between the change and the look that showed it are forgotten too.

Weights that changed behind the same root are not seen here. vLLM goes on using pages of the old
ones then, until its cache is reset.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from state.model import MAX_ADAPTERS, Adapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.scrape import ModelCard

KNOWN_NAMES: Final = 4_096
"""Names remembered after they are not listed any more: they may come back with other weights."""
MAX_NAME_CHARS: Final = 512
_SGLANG: Final = "sglang"
_EPOCH_MARK: Final = "\0"
"""No listed name holds it, so the key of one adapter is never the name of another."""


class _Weights(Struct):
    """What a name stands for: ``epoch`` counts the roots that it had."""

    root: str | None
    epoch: int = 0


class AdapterBook:
    """The adapters of one engine, from one look at its list to the next."""

    def __init__(self) -> None:
        self._weights: OrderedDict[str, _Weights] = OrderedDict()
        self._keys: dict[str, str] = {}
        self.listed: tuple[Adapter, ...] = ()
        self.left_out = 0
        """Adapters beyond ``MAX_ADAPTERS``, or with a name that cannot be shown."""

    @property
    def keys(self) -> Mapping[str, str]:
        """The keys of names whose weights changed; others are their own. It changes with looks."""
        return self._keys

    def look(self, cards: Sequence[ModelCard]) -> list[str]:
        """Take over what the engine lists; return the names whose pages are void."""
        listed = [card for card in cards if card.parent is not None]
        fit = [card for card in listed if is_fit(card.id)][:MAX_ADAPTERS]
        self.left_out = len(listed) - len(fit)
        void = [card.id for card in fit if self._is_changed(card)]
        while len(self._weights) > KNOWN_NAMES:
            name, _ = self._weights.popitem(last=False)
            if self._keys.pop(name, None) is not None:
                void.append(name)
        self.listed = tuple(
            sorted((Adapter(card.id, self._keys.get(card.id, card.id)) for card in fit), key=_name)
        )
        return void

    def _is_changed(self, card: ModelCard) -> bool:
        known = self._weights.setdefault(card.id, _Weights(card.root))
        self._weights.move_to_end(card.id)
        if known.root == card.root:
            return False
        known.root = card.root
        known.epoch += 1
        self._keys[card.id] = f"{card.id}{_EPOCH_MARK}{known.epoch}"
        return True


def is_fit(name: str) -> bool:
    """Return whether an adapter of this name can be told apart from all others, and shown."""
    return bool(name) and len(name) <= MAX_NAME_CHARS and name.isprintable()


def has_nameless_pages(cards: Sequence[ModelCard]) -> bool:
    """Return whether the engine's events do not tell whose pages they are.

    SGLang's name no adapter: pages of its adapters look like those of the base model.
    """
    return any(card.parent is not None and card.owned_by == _SGLANG for card in cards)


def _name(adapter: Adapter) -> str:
    return adapter.name
