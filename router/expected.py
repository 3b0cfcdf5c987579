"""What a wrong value should have been, where the decoder's own words do not say it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import msgspec

_SEGMENT: Final = re.compile(r"\.?([^.\[\]]+)|(\[)[^\]]*\]")
_PART: Final = re.compile(r"\.?([^.\[\]]+)|\[([^\]]*)\]")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`\Z", re.DOTALL)
_UNSAID: Final = ("Invalid enum value", "Invalid value", "Expected `str` matching regex")


NAMED_MOST: Final = 10


def one_of(names: Iterable[str]) -> str:
    """Return ``one of a, b``, with as many of the names as a reader takes."""
    known = sorted(names)
    if not known:
        return "the name of a replica, and none is known (GET /admin/replicas)"
    more = len(known) - NAMED_MOST
    listed = ", ".join(known[:NAMED_MOST])
    return f"one of {listed}" + (f" and {more} more (GET /admin/replicas)" if more > 0 else "")


def explained(error: msgspec.ValidationError, root: type, raw: object = None) -> str:
    """Return ``field: what was expected`` for an error in a value of type ``root``.

    Names come from literals and tags, and from a ``description`` where a pattern would be shown.
    ``raw`` is what was to become that value: it tells which of several kinds has no such field.
    """
    text, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    unknown = _UNKNOWN.match(text)
    if unknown is not None:
        return _no_such(unknown[1], path, _kinds_at(root, path), _value_at(raw, path))
    if text.startswith(_UNSAID):
        names = sorted({name for kind in _kinds_at(root, path) for name in _names_of(kind)})
        if names:
            text = f"expected {' or '.join(names)}"
            got = str(error).partition("value '")[2].partition("'")[0]
            text += f", got {got!r}" if got else ""
    return f"{path or 'the file'}: {text}"


def _no_such(name: str, path: str, kinds: Sequence[object], value: object) -> str:
    """Return what to say of a field that nothing at ``path`` has, where ``value`` stands."""
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    meant = [one for one in structs if one.tag is None or one.tag == _tag_in(value, one)]
    known = [field.encode_name for one in meant or structs for field in one.fields]
    where = f"{path}.{name}" if path else name
    if len(meant) == 1 and meant[0].tag is not None:
        has = f"it has {', '.join(known)}" if known else "it has no settings"
        return f"{where}: {path.rpartition('.')[2]} {meant[0].tag} has no {name}; {has}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"{where}: no such setting" + (f"; did you mean {near[0]}?" if near else "")


def _tag_in(value: object, kind: inspect.StructType) -> object:
    return value.get(kind.tag_field) if isinstance(value, Mapping) else None


def _value_at(raw: object, path: str) -> object:
    """Return what stands at ``path`` of decoded text; None where that cannot be told."""
    value: Any = raw
    for name, index in _PART.findall(path):
        if name and isinstance(value, Mapping):
            value = value.get(name)
        elif index.isdecimal() and isinstance(value, Sequence) and len(value) > int(index):
            value = value[int(index)]
        else:
            return None
    return value


def _kinds_at(root: type, path: str) -> list[object]:
    kinds = list(_unwrapped(inspect.type_info(root)))
    for name, _ in _SEGMENT.findall(path):
        kinds = [inner for kind in kinds for inner in _inside(kind, name)]
    return kinds


def _unwrapped(kind: object) -> Iterator[object]:
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _unwrapped(one)
    elif isinstance(kind, inspect.Metadata) and not kind.extra_json_schema:
        yield from _unwrapped(kind.type)
    else:
        yield kind


def _inside(kind: object, name: str) -> Iterator[object]:
    """Yield what ``kind`` may hold under a field's name, or as an item for no name."""
    if isinstance(kind, inspect.StructType):
        if name == kind.tag_field:
            yield inspect.LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == name:
                yield from _unwrapped(field.type)
    elif not name and isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from _unwrapped(kind.item_type)


def _names_of(kind: object) -> Iterator[str]:
    if isinstance(kind, inspect.LiteralType):
        yield from map(str, kind.values)
    elif isinstance(kind, inspect.Metadata) and kind.extra_json_schema:
        yield str(kind.extra_json_schema["description"])
