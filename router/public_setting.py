"""What the operator makes public of prompts: starts that all tenants may share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta, Struct

from router.tenant import Label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.tenant import TenantSettings

MOST_PREFIXES: Final = 64


class PublicPrefixSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One start of prompts that is no secret of anybody, and that all tenants share.

    One of three says what it is: ``messages`` that conversations begin with (``tools`` where their
    requests have them), a ``prompt`` that texts begin with, or ``token_ids_file``, a JSON list of
    token ids of ``model``. Without ``model`` it is that of each model, in its own tokens.
    """

    name: Label
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    messages: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1)] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    token_ids_file: str | None = None

    def __repr__(self) -> str:
        """Leave the text out."""
        return f"PublicPrefixSettings(name={self.name!r}, ...)"


PublicPrefixes = Annotated[tuple[PublicPrefixSettings, ...], Meta(max_length=MOST_PREFIXES)]


def public_fault(
    prefixes: Sequence[PublicPrefixSettings], tenants: Sequence[TenantSettings]
) -> str | None:
    """Return what is wrong that types cannot say, naming the key; else None."""
    if prefixes and not tenants:
        return "public_prefixes: expected tenants, too: without them all prefixes are shared"
    names: set[str] = set()
    for index, one in enumerate(prefixes):
        at = f"public_prefixes[{index}]"
        if one.name in names:
            return f"{at}.name: {one.name!r} occurs twice; give each prefix its own name"
        names.add(one.name)
        told = [value for value in (one.messages, one.prompt, one.token_ids_file) if value]
        if len(told) != 1:
            return f"{at}: expected one of messages, prompt and token_ids_file"
        if one.tools is not None and one.messages is None:
            return f"{at}.tools: expected messages, too"
        if one.token_ids_file is not None and one.model is None:
            return f"{at}.model: expected the model whose token ids these are"
    return None
