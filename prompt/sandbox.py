"""Jinja's sandbox with a short way to what chat templates read all the time: keys of messages.

Compiled templates take a key of a plain object at once where the sandbox would give the same: an
item that is asked for as such, or by a name that no attribute has. Everything else goes through
the sandbox.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2.compiler import Frame

_DICT_NAMES: Final = frozenset(dir(dict))
_STR_NAMES: Final = frozenset(name for name in dir(str) if name[0] != "_") - {
    "format",
    "format_map",
}
_PLAIN_TYPES: Final = (LoopContext, Namespace)
_MISSING: Final = object()


class PrintedTool(dict[str, Any]):
    """A tool whose JSON is made once, for templates that print it in every prompt."""

    __slots__ = ("_json",)

    def __init__(self, tool: Mapping[str, Any]) -> None:
        super().__init__(tool)
        self._json: str | None = None

    def as_json(self) -> str:
        """Return what ``tojson`` gives."""
        if self._json is None:
            self._json = json.dumps(self, ensure_ascii=False)
        return self._json


class _KeyReader(CodeGenerator):
    """Writes ``message.role`` and ``message['role']`` as a look into a dict, where it is one."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """Write an attribute."""
        if node.attr in _DICT_NAMES:
            super().visit_Getattr(node, frame)
        else:
            self._read(node.node, frame, node.attr, "getattr")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """Write an item."""
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            self._read(node.node, frame, node.arg.value, "getitem")
        else:
            super().visit_Getitem(node, frame)

    def _read(self, node: nodes.Expr, frame: Frame, key: str, method: str) -> None:
        name = self.temporary_identifier()
        self.write(f"({name}[{key!r}] if ({name} := ")
        self.visit(node, frame)
        self.write(f").__class__ is dict and {key!r} in {name} else ")
        self.write(f"environment.{method}({name}, {key!r}))")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The sandbox, quick where its checks would pass.

    That is for keys of plain objects that are no attributes, methods of texts except formatting,
    and public names of loops and namespaces.
    """

    code_generator_class = _KeyReader

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``obj.attribute`` or ``obj[attribute]``, in the order that Jinja looks."""
        kind = type(obj)
        if kind is dict or kind is PrintedTool:
            if attribute not in _DICT_NAMES and attribute in obj:
                return obj[attribute]
        elif kind is str:
            if attribute in _STR_NAMES:
                return getattr(obj, attribute)
        elif kind in _PLAIN_TYPES and not attribute.startswith("_"):
            value = getattr(obj, attribute, _MISSING)
            if value is not _MISSING:
                return value
        return super().getattr(obj, attribute)
