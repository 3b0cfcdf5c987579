"""Flags that are the fields of a settings struct: one table, no second set of defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec
from msgspec import NODEFAULT, Struct

from warmroute.cli import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

Settings = TypeVar("Settings", bound=Struct)


def add_setting_flags(
    parser: argparse.ArgumentParser, settings: type[Struct], help_texts: Mapping[str, str]
) -> None:
    """Add a flag for each field named in ``help_texts``, with the field's own default."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(settings)}
    for name, text in help_texts.items():
        default = defaults[name]
        is_required = default is NODEFAULT
        shown = "" if is_required or default in (None, "") else f" (default: {default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            required=is_required,
            metavar=name.rpartition("_")[2].upper(),
            help=f"{text}{shown}",
        )


def _field_types(settings: type[Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(settings)}


def settings_of(
    options: argparse.Namespace, settings: type[Settings], names: Mapping[str, str]
) -> Settings:
    """Return the settings that the flags say; raises UsageError naming the wrong flag."""
    given: dict[str, Any] = {
        name: getattr(options, name) for name in names if getattr(options, name) is not None
    }
    try:
        return msgspec.convert(given, settings, strict=False)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        flag = where.rstrip("`").replace("_", "-")
        choices = get_args(_field_types(settings).get(flag.replace("-", "_")))
        if text.startswith("Invalid enum value") and choices:
            text = (
                f"expected {', '.join(map(str, choices))}, got{text[len('Invalid enum value') :]}"
            )
        message = f"--{flag}: {text[0].lower()}{text[1:]}" if flag else text
        raise UsageError(message) from None
