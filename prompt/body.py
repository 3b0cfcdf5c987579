"""JSON bodies, strictly: what passes here means the same to every parser behind.

UTF-8 without a BOM, standard JSON, one ``model``. Fields that routing does not need are skipped
without building objects, which keeps a body of a million keys at a few milliseconds; values of any
size stay raw in the first pass and are decoded only where their number of objects is bounded.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, field

from prompt.model import MAX_DEPTH, BadPromptError, Unroutable, UnroutablePromptError

MAX_MODEL_CHARS: Final = 256
MAX_VALUES: Final = {"messages": 200_000, "prompt": 1_000_000}
MAX_OTHER_VALUES: Final = 100_000
"""Commas and opening brackets (those inside of texts count too) above which a field is not decoded:
each limit is some 20 ms of work."""
MAX_MODEL_KEYS: Final = 4096

_T = TypeVar("_T")
_H = TypeVar("_H", bound="Head")
Count = Annotated[int, Meta(ge=1)]
_NO_VALUE_MARKS: Final = bytes(set(range(256)) - set(b"{[,"))

# The key "model" in every spelling that JSON allows, escapes included.
_MODEL_KEY: Final = re.compile(
    rb'"(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"\s*:'
)
_WHERE: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `(?P<name>[^`]*)`")
_EXPECTED: Final = re.compile(r"^Expected (?P<expected>.*?)(?:, got .*)?$")


class _ModelKeys(Struct):
    model: Raw | msgspec.UnsetType = msgspec.UNSET
    renamed: Raw | msgspec.UnsetType = field(default=msgspec.UNSET, name="model#")


class Head(Struct, kw_only=True):
    """Fields of both kinds of call."""

    model: str
    stream: bool | None = False
    n: Count | None = 1
    max_tokens: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    truncate_prompt_tokens: int | None = None


def decoded_head(decoder: msgspec.json.Decoder[_H], body: bytes) -> _H:
    """Return the fields of a body that is right in all respects; raises BadPromptError."""
    if not body.isascii():
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            field_name = "body"
            raise BadPromptError(field_name, f"UTF-8, byte {error.start} is not") from None
    head = decoded(decoder, body, "")
    model = head.model
    if not model.strip() or not model.isprintable() or len(model) > MAX_MODEL_CHARS:
        name = "model"
        raise BadPromptError(name, f"a printable name of 1 to {MAX_MODEL_CHARS} characters")
    _refuse_second_model(body)
    return head


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


def _refuse_second_model(body: bytes) -> None:
    """Raise when the top level has two ``model`` keys, however spelled.

    Parsers differ in which of two wins. Nested keys are common (tool schemas), so the question is
    put to the decoder: after renaming all such keys but the first k, the top level has ``model``
    when its first one is among the k, and the new name when another one is not. Bisection finds
    that k; it is 1 for nearly every client.
    """
    if body.count(b'"model"') <= 1 and b"\\u00" not in body:
        return
    spans = [match.span() for match in _MODEL_KEY.finditer(body)]
    if len(spans) <= 1:
        return
    field_name = "model"
    if len(spans) > MAX_MODEL_KEYS:
        raise BadPromptError(field_name, f"at most {MAX_MODEL_KEYS} keys of that name in the body")
    low, high, probe = 1, len(spans), 1
    while low < high:
        if _model_keys(body, spans, probe).model is msgspec.UNSET:
            low = probe + 1
        else:
            high = probe
        probe = (low + high) // 2
    if _model_keys(body, spans, low).renamed is not msgspec.UNSET:
        raise BadPromptError(field_name, "one value, the field is there twice")


def _model_keys(body: bytes, spans: list[tuple[int, int]], kept: int) -> _ModelKeys:
    pieces, position = [], 0
    for start, end in spans[kept:]:
        pieces += [body[position:start], b'"model#":']
        position = end
    pieces.append(body[position:])
    return msgspec.json.decode(b"".join(pieces), type=_ModelKeys)


def decoded_part(decoder: msgspec.json.Decoder[_T], raw: Raw, name: str) -> _T:
    """Decode a value of bounded size that was raw so far."""
    refuse_many_values(bytes(raw), name)
    return decoded(decoder, raw, name)


def refuse_many_values(raw: bytes, name: str) -> None:
    """Raise UnroutablePromptError where decoding would take long."""
    limit = MAX_VALUES.get(name, MAX_OTHER_VALUES)
    if len(raw) > limit and len(raw.translate(None, _NO_VALUE_MARKS)) > limit:
        raise UnroutablePromptError(Unroutable.TOO_COMPLEX, f"over {limit} values in {name}")


def check_depth(value: object, name: str, levels: int = MAX_DEPTH) -> None:
    """Raise BadPromptError for a decoded value that nests too deeply."""
    if not isinstance(value, dict | list):
        return
    if levels == 0:
        raise BadPromptError(name, f"at most {MAX_DEPTH} nested levels")
    for item in value.values() if isinstance(value, dict) else value:
        check_depth(item, name, levels - 1)
