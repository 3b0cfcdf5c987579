"""Bodies whose prompts are not read: all that routing needs of them is the model's name."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from prompt.body import MAX_MODEL_CHARS, MODEL_KEY, SALT_KEY, check_numbers, check_text, decoded
from prompt.lane import LARGE_BODY_BYTES, refuse_dense
from prompt.model import BadPromptError, ReadPrompt, Unroutable
from prompt.once import refuse_second
from prompt.pace import rest


class _NamesModel(Struct, frozen=True):
    model: Raw | UnsetType = UNSET


_decoder: Final = msgspec.json.Decoder(_NamesModel)
_QUOTE: Final = b'"'


def read_plain(body: bytes, *, is_json: bool) -> ReadPrompt:
    """Return the model that ``body`` names, empty where that is no text; raises BadPromptError.

    ``is_json``: anything but one strict JSON object is the client's fault. Else it may be a form,
    say; but where it is JSON, the same holds for its model.
    """
    if len(body) > LARGE_BODY_BYTES:
        refuse_dense(body)
    try:
        check_text(body)
        raw = decoded(_decoder, body, "").model
        rest()
    except BadPromptError:
        if is_json:
            raise
        return _prompt("")
    refuse_second(body, (MODEL_KEY, SALT_KEY))
    if is_json:
        check_numbers(body)
    model = ""
    if isinstance(raw, Raw) and bytes(raw).startswith(_QUOTE):
        model = msgspec.json.decode(raw, type=str)
    if len(model) > MAX_MODEL_CHARS or not model.isprintable():
        name = "model"
        raise BadPromptError(name, f"a printable name of at most {MAX_MODEL_CHARS} characters")
    return _prompt(model)


def _prompt(model: str) -> ReadPrompt:
    return ReadPrompt(model=model, is_stream=False, unroutable=Unroutable.LOAD_ONLY)
