"""Chat templates that do what real ones do and what makes prompts hard to foresee.

They print the date, show tools in a message of the conversation, leave out reasoning of earlier
turns, trim, and refuse conversations. ``chat_template_kwargs: {"style": ...}`` chooses one of them
in ``STYLED``, the template of the models that tests serve.
"""

from __future__ import annotations

from typing import Final

_PLAIN: Final = """\
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.name %}{{- '(' + message.name + ') ' }}{%- endif %}
    {%- if message.reasoning_content %}{{- '[' + message.reasoning_content + ']' }}{%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '[]' }}{%- endif %}
{%- endif %}
"""
_DATED: Final = """\
{%- set today = date if date is defined else strftime_now('%d %b %Y') %}
{{- '<|im_start|>system\\nToday: ' + today + '. Effort: ' }}
{{- reasoning_effort if reasoning_effort is defined else 'any' }}
{%- if messages[0].role == 'system' %}
    {{- '\\n' + messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- set place = namespace(last=-1, shown=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set place.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.tool_calls and message.tool_calls | length > 1 %}
        {{- raise_exception('one call at a time') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if tools and message.role == 'user' and not place.shown %}
        {%- set place.shown = true %}
        {%- for tool in tools %}{{- tool | tojson(indent=2) + '\\n' }}{%- endfor %}
    {%- endif %}
    {%- if message.reasoning and loop.index0 > place.last %}
        {{- '<think>' + message.reasoning + '</think>' }}
    {%- endif %}
    {{- message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + call.function.arguments | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_STRICT: Final = """\
{%- set told = messages[0].content if messages[0].role == 'system' else none %}
{%- set spoken = messages[1:] if told is not none else messages %}
{%- set turn = namespace(count=0) %}
{%- set askers = spoken | selectattr('role', 'equalto', 'user') | list %}
{%- for message in spoken %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {%- if (message.role == 'user') != (turn.count % 2 == 0) %}
            {{- raise_exception('users and assistants take turns') }}
        {%- endif %}
        {%- set turn.count = turn.count + 1 %}
    {%- elif message.role not in ('tool', 'assistant') %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- for message in spoken %}
    {%- if message.role == 'user' %}
        {%- if tools and message == askers[-1] %}
            {{- '<|bos|>tools ' + tools | map(attribute='function') | list | tojson }}
        {%- endif %}
        {%- set head = told + '\\n\\n' if loop.last and told is not none else '' %}
        {{- '<|im_start|>' + head + message.content + '<|im_end|>' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function | tojson + ' of ' + call.id }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- ' result of ' + message.tool_call_id + ': ' + message.content | string }}
    {%- else %}
        {{- ' ' + message.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
"""
_PARTS: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + ':' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{- '{' + part.text + '}' }}{%- endfor %}
    {%- endif %}
    {{- message.reasoning or '' }}{{- message.tool_calls | tojson if message.tool_calls else '' }}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- tools | tojson if tools else '' }}{{- documents | tojson if documents else '' }}
{{- '<|im_start|>' if add_generation_prompt else '' }}
"""
_EVERYTHING: Final = """\
{{- messages | tojson + tools | tojson + add_generation_prompt | tojson + documents | tojson }}
{{- enable_thinking }}{{- reasoning_effort }}{# 'developer' #}
"""

TEMPLATES: Final = {
    "plain": _PLAIN,
    "dated": _DATED,
    "strict": _STRICT,
    "parts": _PARTS,
    "everything": _EVERYTHING,
}
STYLED: Final = (
    "".join(
        f"{{%- {'if' if style == 'dated' else 'elif'} style == '{style}' %}}\n{TEMPLATES[style]}"
        for style in ("dated", "strict")
    )
    + f"{{%- else %}}\n{_PLAIN}{{%- endif %}}\n"
)
STYLES: Final = ("plain", "dated", "strict")
