"""JSON bodies, strictly: what passes here means the same to every parser behind.

UTF-8 without a BOM, standard JSON, one ``model``. Fields that routing does not need are skipped
without building objects, which keeps a body of a million keys at a few milliseconds; values of any
size stay raw in the first pass and are decoded only where their number of objects is bounded.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from prompt.model import MAX_DEPTH, BadPromptError, Unroutable, UnroutablePromptError
from prompt.once import OneKey, refuse_second, without_value
from prompt.pace import rest

MAX_MODEL_CHARS: Final = 256
MAX_VALUES: Final = {"messages": 200_000, "prompt": 1_000_000}
MAX_OTHER_VALUES: Final = 100_000
"""Commas and opening brackets (those inside of texts count too) above which a field is not decoded:
each limit is some 20 ms of work."""

MODEL_KEY: Final = OneKey("model")
SALT_KEY: Final = OneKey("cache_salt")
TOOLS_KEY: Final = OneKey("tools")
MAX_DIGITS: Final = 309
"""Of the largest double."""
SHORT_BYTES: Final = 4 * 1024
"""Up to here decoding everything takes no longer than searching for numbers."""
MAX_FIELD_CHARS: Final = 64
"""Of a client's own key that an error names."""
_NUMBER_SLICE_BYTES: Final = 256 * 1024

_T = TypeVar("_T")
_H = TypeVar("_H", bound="Head")
Count = Annotated[int, Meta(ge=1)]
_NO_VALUE_MARKS: Final = bytes(set(range(256)) - set(b"{[,"))

_HUGE_NUMBER: Final = re.compile(
    rb"[0-9](?:[eE]\+?0*[0-9]{3}|(?<![0-9][0-9])[0-9]{%d})" % (MAX_DIGITS - 1)
)
"""Begins with a digit, which is searched for quickly; a run of them is looked at once."""
_any_decoder: Final = msgspec.json.Decoder()
_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_WHERE: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `(?P<name>[^`]*)`")
_EXPECTED: Final = re.compile(r"^Expected (?P<expected>.*?)(?:, got .*)?$")


class Head(Struct, kw_only=True):
    """Fields of both kinds of call."""

    model: str
    stream: bool | None = False
    n: Count | None = 1
    max_tokens: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    truncate_prompt_tokens: int | None = None


def decoded_head(decoder: msgspec.json.Decoder[_H], body: bytes, prompt_key: OneKey) -> _H:
    """Return the fields of a body that is right in all respects; raises BadPromptError.

    ``prompt_key`` is the key that has the prompt, raw in the head; like the model, and the salt, it
    may be there once.
    """
    check_text(body)
    head = decoded(decoder, body, "")
    rest()
    model = head.model
    if not model.strip() or not model.isprintable() or len(model) > MAX_MODEL_CHARS:
        name = "model"
        raise BadPromptError(name, f"a printable name of 1 to {MAX_MODEL_CHARS} characters")
    others = without_value(body, prompt_key, getattr(head, prompt_key.name))
    tools: Raw | None = getattr(head, TOOLS_KEY.name, None)
    if tools is not None:  # their numbers are seen when they are decoded
        others = without_value(others, TOOLS_KEY, tools)
    refuse_second(others, (MODEL_KEY, SALT_KEY, prompt_key))
    check_numbers(others)
    return head


def check_text(body: bytes) -> None:
    """Raise BadPromptError for what is no UTF-8."""
    if not body.isascii():
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            field_name = "body"
            raise BadPromptError(field_name, f"UTF-8, byte {error.start} is not") from None


def check_numbers(body: bytes) -> None:
    """Raise BadPromptError where a valid body may have a number that parsers disagree on.

    Those beyond a double are infinities to some, errors to others, and exact integers of any length
    to yet others. What looks like one in a text is told from it by decoding everything, where that
    does not take long.
    """
    if len(body) <= SHORT_BYTES:
        try:
            _any_decoder.decode(body)
        except (msgspec.DecodeError, RecursionError):
            _blame_number(body)
        return
    step = _NUMBER_SLICE_BYTES
    for at in range(0, len(body), step):
        if _HUGE_NUMBER.search(body, at, at + step + MAX_DIGITS):
            _blame_number(body)
            return
        rest()


def _blame_number(body: bytes) -> None:
    fields = _fields_decoder.decode(body) if value_marks(body) <= MAX_OTHER_VALUES else {}
    for name, raw in fields.items():
        is_plain = name.isidentifier() and len(name) <= MAX_FIELD_CHARS
        decoded(_any_decoder, raw, name if is_plain else "body")


def decoded(decoder: msgspec.json.Decoder[_T], raw: bytes | Raw, name: str) -> _T:
    """Decode ``raw``; BadPromptError names ``name`` and the place in it."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _blamed(str(error), name) from None
    except msgspec.DecodeError as error:
        raise BadPromptError(name or "body", f"valid JSON ({error})") from None
    except RecursionError:
        raise BadPromptError(name or "body", f"at most {MAX_DEPTH} nested levels") from None


def _blamed(message: str, name: str) -> BadPromptError:
    where = _WHERE.search(message)
    path = where["path"] if where else ""
    text = message[: where.start()] if where else message
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing['name']}".lstrip(".")
        return BadPromptError(_joined(name, path), "a value, the field is missing")
    expected = _EXPECTED.match(text)
    return BadPromptError(
        _joined(name, path), (expected["expected"] if expected else text).replace("`", "")
    )


def _joined(name: str, path: str) -> str:
    if not name or not path:
        return name or path or "body"
    return f"{name}{path}" if path.startswith("[") else f"{name}.{path}"


def decoded_part(decoder: msgspec.json.Decoder[_T], raw: Raw, name: str) -> _T:
    """Decode a value of bounded size that was raw so far."""
    refuse_many_values(bytes(raw), name)
    return decoded(decoder, raw, name)


def refuse_many_values(raw: bytes, name: str) -> None:
    """Raise UnroutablePromptError where decoding would take long."""
    limit = MAX_VALUES.get(name, MAX_OTHER_VALUES)
    if len(raw) > limit and value_marks(raw) > limit:
        raise UnroutablePromptError(Unroutable.TOO_COMPLEX, f"over {limit} values in {name}")


def value_marks(raw: bytes) -> int:
    """Return how many commas and opening brackets there are, those inside of texts, too."""
    return len(raw.translate(None, _NO_VALUE_MARKS))


def check_depth(value: object, name: str, levels: int = MAX_DEPTH) -> None:
    """Raise BadPromptError for a decoded value that nests too deeply."""
    if not isinstance(value, dict | list):
        return
    if levels == 0:
        raise BadPromptError(name, f"at most {MAX_DEPTH} nested levels")
    for item in value.values() if isinstance(value, dict) else value:
        check_depth(item, name, levels - 1)
