"""Chat templates: Jinja as Hugging Face's ``apply_chat_template`` runs it.

The template comes with the model and is not trusted with the process (sandbox, bounded output); the
conversation comes from a client and is data only.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from msgspec import Struct

from prompt.message import developers_as_system, normalised_messages, normalised_tools
from prompt.model import CodecLoadError, TemplateFailureError
from prompt.sandbox import PrintedTool, TemplateSandbox
from prompt.syntax import MARK, iterates_over_content, mark_messages, sensitive_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Macro

MAX_RENDERED_CHARS: Final = 64 * 1024 * 1024
_CUT_MARK: Final = "\u2402warmroute continues here\u2402 "
"""Marks where the final message ends; the trailing space tells whether the template trims."""

_HIDDEN: Final = range(3)
"""How many leading messages a template may write before its loop."""

# Names that the engine binds itself or gives to the tokenizer instead of the template.
_RESERVED_KWARGS: Final = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# What a template can raise on a conversation that it was not written for.
_RENDER_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class Parts(Struct, frozen=True, gc=False):
    """A rendered conversation: the texts of its messages, and what is around them.

    The first ``hidden`` messages are in the prologue.
    """

    prologue: str
    messages: list[str]
    epilogue: str
    hidden: int

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join((self.prologue, *self.messages, self.epilogue))


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; here it only scopes."""

    tags = {"generation"}  # noqa: RUF012 # Jinja reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_rendered")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def _rendered(caller: Macro) -> str:
        return str(caller())


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 # templates call it so
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    is_plain = not ensure_ascii and indent is None and separators is None and not sort_keys
    if is_plain and isinstance(value, PrintedTool):
        return value.as_json()
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment(clock: Callable[[], float]) -> TemplateSandbox:
    def strftime_now(pattern: str) -> str:
        return dt.datetime.fromtimestamp(clock()).astimezone().strftime(pattern)

    environment = TemplateSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # prompts are no HTML
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _compiled(environment: TemplateSandbox, source: str | nodes.Template) -> jinja2.Template:
    template = environment.from_string(source)
    # They are copied for every prompt, which takes a chain of mappings 3 us.
    template.globals = dict(template.globals)
    return template


class ChatTemplate:
    """One template. ``special_tokens`` are its variables such as ``bos_token``.

    ``clock`` gives seconds since the epoch, for templates that print the date.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, object], clock: Callable[[], float]
    ) -> None:
        environment = _environment(clock)
        try:
            syntax = environment.parse(source)
            self._template = _compiled(environment, source)
            marked = environment.parse(source)
            self._marked = _compiled(environment, marked) if mark_messages(marked) else None
        except (jinja2.TemplateError, RecursionError) as error:
            message = f"chat template: {error}"
            raise CodecLoadError(message) from error
        self._special_tokens = dict(special_tokens)
        self._knows_developers = '"developer"' in source or "'developer'" in source
        self._names_content = "content" in source
        self.is_structured: Final = iterates_over_content(syntax)
        self.sensitive_texts: Final = sensitive_texts(syntax)
        self.variables: Final = frozenset(jinja2.meta.find_undeclared_variables(syntax))
        """What it reads from outside."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> str:
        """Return the prompt text; raises UnroutablePromptError or its TemplateFailureError."""
        conversation = normalised_messages(messages, is_structured=self.is_structured)
        if not self._knows_developers:
            conversation = developers_as_system(conversation)
        variables = self._variables(options)
        variables["tools"] = normalised_tools(tools)
        if not options.get("continue_final_message"):
            return self._rendered(conversation, variables, self._template)
        if variables["add_generation_prompt"]:
            detail = "continue_final_message together with add_generation_prompt"
            raise TemplateFailureError(detail)
        return self._continued(conversation, variables)

    def render_parts(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> Parts | None:
        """Return the text of a normalised conversation message by message; None if it has no parts.

        ``tools`` are normalised, too. Raises UnroutablePromptError as ``render`` does.
        """
        if self._marked is None or options.get("continue_final_message"):
            return None
        if not self._knows_developers and any(
            message["role"] == "developer" for message in conversation
        ):
            return None
        variables = self._variables(options)
        variables["tools"] = tools
        rendered = self._rendered(conversation, variables, self._marked)
        prologue, *parts = rendered.split(MARK)
        hidden = len(conversation) - len(parts) + 1
        # A prompt that spells the mark out has more parts than messages.
        if not parts or hidden not in _HIDDEN:
            return None
        return Parts(prologue=prologue, messages=parts[:-1], epilogue=parts[-1], hidden=hidden)

    def _variables(self, options: Mapping[str, object]) -> dict[str, object]:
        kwargs = options.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict) or not _RESERVED_KWARGS.isdisjoint(kwargs):
            detail = "chat_template_kwargs with reserved names"
            raise TemplateFailureError(detail)
        variables = {**self._special_tokens, "documents": None, **kwargs}
        variables.pop("continue_final_message", None)
        variables["add_generation_prompt"] = options.get("add_generation_prompt", True)
        if options.get("documents") is not None:
            variables["documents"] = options["documents"]
        effort = options.get("reasoning_effort")
        if effort is not None:
            variables["reasoning_effort"] = effort
            variables.setdefault("enable_thinking", effort != "none")
        return variables

    @staticmethod
    def _rendered(
        conversation: list[dict[str, Any]],
        variables: dict[str, object],
        template: jinja2.Template,
    ) -> str:
        pieces: list[str] = []
        chars = 0
        try:
            for piece in template.generate(messages=conversation, **variables):
                pieces.append(piece)
                chars += len(piece)
                if chars > MAX_RENDERED_CHARS:
                    detail = f"more than {MAX_RENDERED_CHARS} characters"
                    raise TemplateFailureError(detail)
        except _RENDER_ERRORS as error:
            detail = f"{type(error).__name__}: {error}"
            raise TemplateFailureError(detail) from error
        return "".join(pieces)

    def _continued(self, conversation: list[dict[str, Any]], variables: dict[str, object]) -> str:
        """Render with a mark after the final message and cut there."""
        if not self._names_content:
            detail = "continue_final_message, and the template does not name the content"
            raise TemplateFailureError(detail)
        final = conversation[-1]
        target = final
        key = "content"
        if isinstance(final["content"], list):
            if not final["content"]:
                detail = "no final message to continue"
                raise TemplateFailureError(detail)
            target, key = final["content"][-1], "text"
        text = target[key]
        target[key] = text + _CUT_MARK
        rendered = self._rendered(conversation, variables, self._template)
        end = rendered.rfind(_CUT_MARK.strip())
        if end < 0 or text.strip() not in rendered:
            detail = "the template does not show the final message as it is"
            raise TemplateFailureError(detail)
        keeps_space = rendered.startswith(_CUT_MARK, end)
        return rendered[:end] if keeps_space else rendered[:end].rstrip()
