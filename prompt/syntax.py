"""What a chat template's syntax tells: which content it expects, and where its main loop is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jinja2 import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK: Final = "\ue0ffwarmroute message\ue0fe"
"""Written before each message and after the last one; a prompt that spells it out is not cut."""
_TEXT_METHODS: Final = frozenset({"startswith", "endswith", "split", "rsplit", "partition", "find"})


def mark_messages(root: nodes.Template) -> bool:
    """Let the one loop that writes the messages write marks; False where there is no such one."""
    lists = aliases_of(root, {"messages"})
    loops = [
        (body, loop)
        for body, loop in _outer_loops(root.body)
        if names_of(loop.iter) & lists and _writes(loop)
    ]
    if len(loops) != 1:
        return False
    body, loop = loops[0]
    if loop.test is not None or loop.else_:
        return False
    loop.body.insert(0, _mark(loop.lineno))
    body.insert(body.index(loop) + 1, _mark(loop.lineno))
    return True


def sensitive_texts(root: nodes.Template) -> frozenset[str]:
    """Return the texts that the template looks for in others, such as ``</think>``.

    Plain words are names of roles and fields.
    """
    found: set[str] = set()
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _TEXT_METHODS:
            found |= set(_constants(call.args))
    for comparison in root.find_all(nodes.Compare):
        if any(operand.op in {"in", "notin"} for operand in comparison.ops):
            found |= set(_constants([comparison.expr]))
    return frozenset(text for text in found if text.strip() and not text.strip().isidentifier())


def _constants(parts: list[nodes.Expr]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, nodes.Const) and isinstance(part.value, str):
            yield part.value


def _mark(line: int) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(MARK)], lineno=line)


def _outer_loops(body: list[nodes.Node]) -> Iterator[tuple[list[nodes.Node], nodes.For]]:
    """Yield loops that are in no other loop, macro or block, with the statements around them."""
    for node in list(body):
        if isinstance(node, nodes.For):
            yield body, node
        elif isinstance(node, nodes.If):
            yield from _outer_loops(node.body)
            for branch in node.elif_:
                yield from _outer_loops(branch.body)
            yield from _outer_loops(node.else_)


def _writes(loop: nodes.For) -> bool:
    return any(
        not isinstance(part, nodes.TemplateData) or part.data.strip()
        for output in loop.find_all(nodes.Output)
        for part in output.nodes
    )


def iterates_over_content(root: nodes.Template) -> bool:
    """Return whether a template loops over a message's content, that is, expects parts.

    The rule of the engine: loops over ``message.content`` for a loop variable over ``messages``
    (aliases, slices and filters included), over a macro's parameter that receives such a content,
    or, outside of macros, over a variable named ``content``.
    """
    lists = aliases_of(root, {"messages"})
    items = {
        loop.target.name
        for loop in root.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and names_of(loop.iter) & lists
    }
    in_macros: set[int] = set()
    for macro in root.find_all(nodes.Macro):
        parameters = _content_parameters(root, macro, items)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters:
                return True
    return any(
        _is_content_of(loop.iter, items)
        or (
            isinstance(loop.iter, nodes.Name)
            and loop.iter.name == "content"
            and id(loop) not in in_macros
        )
        for loop in root.find_all(nodes.For)
    )


def aliases_of(root: nodes.Template, names: set[str]) -> set[str]:
    """Return ``names`` and the variables that are made of them."""
    known = set(names)
    while True:
        found = {
            assign.target.name
            for assign in root.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and names_of(assign.node) & known
        }
        if found <= known:
            return known
        known |= found


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """Return what filters, tests and slices are applied to."""
    while node is not None:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            break
    return node


def names_of(node: nodes.Node) -> set[str]:
    """Return the variable that ``node`` is, behind filters and slices; at most one."""
    inner = _unwrapped(node)
    return {inner.name} if isinstance(inner, nodes.Name) else set()


def _is_content_of(node: nodes.Node, items: set[str]) -> bool:
    inner = _unwrapped(node)
    if isinstance(inner, nodes.Getitem):
        is_content = isinstance(inner.arg, nodes.Const) and inner.arg.value == "content"
    elif isinstance(inner, nodes.Getattr):
        is_content = inner.attr == "content"
    else:
        return False
    return is_content and isinstance(inner.node, nodes.Name) and inner.node.name in items


def _content_parameters(root: nodes.Template, macro: nodes.Macro, items: set[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    found = set()
    for call in root.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        found |= {
            name
            for name, argument in zip(names, call.args, strict=False)
            if _is_content_of(argument, items)
        }
        found |= {
            keyword.key
            for keyword in call.kwargs
            if isinstance(keyword, nodes.Keyword)
            and keyword.key in names
            and _is_content_of(keyword.value, items)
        }
    return found
