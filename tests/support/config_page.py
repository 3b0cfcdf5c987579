"""The page of all settings of ``warmroute serve``, as their types and the annotated example say.

``python -m support.config_page docs/config.md`` writes it.
"""

from __future__ import annotations

import re
import sys
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml
from msgspec import inspect

from router.config import Config
from support.doc_page import anchors

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT: Final = Path(__file__).resolve().parents[2]
_EXAMPLE: Final = _ROOT / "examples" / "warmroute.yaml"
_HEAD: Final = """# Settings of the file

Every key of the file that `warmroute serve --config` reads, made from its types by
`make docs-reference`. Times end in `_s` or `_ms`, sizes in `_bytes` or `_tokens`. Unknown keys are
refused, and a wrong value ends the start with its path. The same file with its defaults and remarks
is [examples/warmroute.yaml](../examples/warmroute.yaml). What may be changed while routers run is
in [changes at run time](settings.md), flags and environment in [commands](cli.md).
"""
_COLUMNS: Final = ["| key | type | default | range | says |", "|---|---|---|---|---|"]
_BOUNDS: Final = (("gt", "> "), ("ge", "≥ "), ("lt", "< "), ("le", "≤ "))
_PLAIN: Final = {
    inspect.BoolType: "true or false",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.NoneType: "null",
    inspect.AnyType: "anything",
}


def remarks(path: Path) -> dict[str, str]:
    """Return the remark beside or above each key of an annotated file, by the key's path."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[str, str] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            for item in node.value if isinstance(node, yaml.SequenceNode) else ():
                walk(item, f"{prefix}[]")
            return
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else key.value
            said = _remark(lines, key, value)
            if said:
                found.setdefault(name, said)
            walk(value, name)

    root = yaml.compose(text)
    assert root is not None
    walk(root, "")
    return found


def _remark(lines: list[str], key: yaml.Node, value: yaml.Node) -> str:
    at, column = key.start_mark.line, key.start_mark.column
    end = value.end_mark.column if value.end_mark.line == at else key.end_mark.column
    beside = lines[at][end:].partition("#")[2]
    parts = [beside] if beside else []
    following = at + 1
    while parts and following < len(lines) and re.match(r"\s+#", lines[following]):
        parts.append(lines[following].partition("#")[2])
        following += 1
    while not beside and at and re.match(rf"\s{{{column}}}#", lines[at - 1]):
        parts.insert(0, lines[at - 1].partition("#")[2])
        at -= 1
    return " ".join(" ".join(parts).split()).rstrip(",")


def unwrapped(kind: inspect.Type) -> inspect.Type:
    """Return a type without what is only said about it."""
    return unwrapped(kind.type) if isinstance(kind, inspect.Metadata) else kind


def words(kind: inspect.Type) -> str:
    """Return what a value may be."""
    kind = unwrapped(kind)
    if isinstance(kind, inspect.UnionType):
        inner = [one for one in kind.types if not isinstance(unwrapped(one), inspect.NoneType)]
        tagged = [one for one in map(unwrapped, inner) if isinstance(one, inspect.StructType)]
        said = "section" if len(tagged) == len(inner) else " or ".join(map(words, inner))
        return said if len(inner) == len(kind.types) else f"{said}, or null"
    if isinstance(kind, inspect.LiteralType | inspect.EnumType):
        return ", ".join(f"`{value}`" for value in _values(kind))
    if isinstance(kind, inspect.StructType):
        return "section"
    if isinstance(kind, inspect.DictType):
        return f"mapping: {words(kind.key_type)} to {words(kind.value_type)}"
    if isinstance(kind, inspect.ListType | inspect.VarTupleType | inspect.FrozenSetType):
        inner_words = words(kind.item_type)
        return "list of sections" if inner_words == "section" else f"list of: {inner_words}"
    return _PLAIN.get(type(kind), "text")


def _values(kind: inspect.LiteralType | inspect.EnumType) -> list[object]:
    if isinstance(kind, inspect.LiteralType):
        return list(kind.values)
    return [one.value for one in kind.cls]


def limits(kind: inspect.Type) -> str:
    """Return which values of its type a key takes; nothing where all are."""
    if isinstance(kind, inspect.Metadata):
        said = (kind.extra_json_schema or {}).get("description")
        return str(said) if said else limits(kind.type)
    if isinstance(kind, inspect.UnionType):
        return "; ".join(filter(None, map(limits, kind.types)))
    if isinstance(kind, inspect.ListType | inspect.VarTupleType | inspect.FrozenSetType):
        return limits(kind.item_type)
    if isinstance(kind, inspect.DictType):
        return "; ".join(filter(None, (limits(kind.key_type), limits(kind.value_type))))
    bounds = [(sign, getattr(kind, name, None)) for name, sign in _BOUNDS]
    return ", ".join(f"{sign}{number(bound)}" for sign, bound in bounds if bound is not None)


def number(value: float) -> str:
    """Return a number with its thousands apart."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def default_of(field: inspect.Field) -> str:
    """Return a field's default as YAML has it; ``required`` without one."""
    if field.required:
        return "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        assert field.default_factory is not msgspec.NODEFAULT
        value = field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "below"
    plain = msgspec.to_builtins(value)
    return f"`{msgspec.json.encode(plain).decode()}`"


def structs(kind: inspect.Type, path: str) -> Iterator[tuple[str, inspect.StructType]]:
    """Yield the sections that a key holds, with their paths."""
    kind = unwrapped(kind)
    if isinstance(kind, inspect.StructType):
        yield path, kind
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from structs(one, path)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from structs(kind.item_type, f"{path}[]")
    elif isinstance(kind, inspect.DictType):
        yield from structs(kind.value_type, f"{path}.*")


class _Page:
    """The sections in order; what occurs twice is told once."""

    def __init__(self, said: dict[str, str]) -> None:
        self._said = said
        self._titles: dict[type, str] = {}
        self.lines: list[str] = []

    def section(self, path: str, kind: inspect.StructType) -> None:
        """Add a section and those inside it."""
        title = f"`{path}`" if path else "The file"
        if kind.tag is not None:
            title = f"`{path}` with `{kind.tag_field}: {kind.tag}`"
        self._titles[kind.cls] = title
        self.lines += ["", f"## {title}", "", linked(markdown(getdoc(kind.cls) or ""))]
        if kind.fields:
            self.lines += ["", *_COLUMNS]
        keys = [f"{path}.{one.encode_name}" if path else one.encode_name for one in kind.fields]
        for field, key in zip(kind.fields, keys, strict=True):
            remark = self._said.get(key, "") if kind.tag in {None, "expected_ttft"} else ""
            self.lines.append(row(field, linked(remark)))
        for field, key in zip(kind.fields, keys, strict=True):
            self._inside(field, key)

    def _inside(self, field: inspect.Field, key: str) -> None:
        found = list(structs(field.type, key))
        new = [(path, kind) for path, kind in found if kind.cls not in self._titles]
        if found and not new:
            path, kind = found[0]
            title = self._titles[kind.cls]
            like = f"[{title.partition(' with ')[0]}](#{next(iter(anchors(f'# {title}')))})"
            self.lines += ["", f"## `{path}`", "", f"As {like}."]
        for path, kind in new:
            self.section(path, kind)


def row(field: inspect.Field, remark: str) -> str:
    """Return the line of one key."""
    name, range_ = f"`{field.encode_name}`", limits(field.type)
    cells = [name, words(field.type), default_of(field), range_, remark]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown(docstring: str) -> str:
    """Return a docstring's text for a page."""
    return docstring.replace("``", "`")


def linked(text: str) -> str:
    """Return a text with the files that it names as links."""
    text = re.sub(r"(?<![\w/`])docs/([\w-]+)\.md", r"[\1](\1.md)", text)
    return re.sub(r"(?<![\w/`])(examples/[\w.-]+\w)", r"[\1](../\1)", text)


def page() -> str:
    """Return the page."""
    root = inspect.type_info(Config)
    assert isinstance(root, inspect.StructType)
    made = _Page(remarks(_EXAMPLE))
    made.section("", root)
    return _HEAD + "\n".join(made.lines) + "\n"


def main() -> None:
    """Write the page that is named."""
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
