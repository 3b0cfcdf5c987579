"""YAML in which no key occurs twice: what stands there first would be lost without a word.

Whoever has a file to read imports this then: a start without one needs no parser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml
from yaml import YAMLError

if TYPE_CHECKING:
    from yaml.nodes import MappingNode

__all__ = ["YAMLError", "load_yaml"]


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} occurs twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def load_yaml(text: str) -> object:
    """Return what ``text`` says; raises YAMLError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
