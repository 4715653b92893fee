"""Chat templates that know reasoning, which behave as the published ones do, and small tokenizers for them."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from xray_runtime.data.tokenizing import CHAT_TEMPLATE, CHATML, train_tokenizer

_QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not (
        message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
QWEN3 = (
    _QWEN3
    + """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)
"""Qwen3: an empty block in the last turn without reasoning, none in turns before the last query."""
QWEN3_THINKING = _QWEN3 + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
"""Qwen3-Thinking-2507: prompts open the block."""
R1 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{%- endif %}{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
"""DeepSeek-R1's distilled models: prompts open a block that no row has, and rows lose all text before its end."""
SPACED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + ' ' }}"
    "{{ eos_token + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A space before the end of every turn."""
BRACKETS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.thinking %}"
    "{{ '[THINK]' + message.thinking + '[/THINK]' }}{% endif %}{{ message.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Other marks, and another name of the reasoning, as Mistral's and OpenAI's templates have."""

IM = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
THINK = ("<think>", "</think>")
TEMPLATES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], bool]] = {
    "ours": (CHAT_TEMPLATE, (), (), False),
    "chatml": (CHATML, IM[:1], (), False),
    "chatml, think tokens": (CHATML, IM[:1], THINK, False),
    "chatml, special think tokens": (CHATML, IM[:1], THINK, True),
    "qwen3": (QWEN3, IM, THINK, False),
    "qwen3, special think tokens": (QWEN3, IM, THINK, True),
    "qwen3, no think tokens": (QWEN3, IM, (), False),
    "qwen3 thinking": (QWEN3_THINKING, IM, THINK, False),
    "r1": (R1, DEEPSEEK, THINK, False),
    "r1, special think tokens": (R1, DEEPSEEK, THINK, True),
    "r1, no think tokens": (R1, DEEPSEEK, (), False),
    "spaced": (SPACED, IM[:1], (), False),
    "brackets": (BRACKETS, IM, ("[THINK]", "[/THINK]"), True),
}
"""Name → template, control tokens, tokens around reasoning, whether those are special."""
TEXTS = ["how are you", "fine, thanks! {'cats': 1}", "let me think about the reasons for that", "user assistant system"]
JOINED = [":(", ":)", "\n\n", "\n\n\n"]
"""Texts of one token each, which the tokenizer would join across the end of a prompt."""


def tokenizer_for(name: str, template: str | None = None) -> Any:
    """A byte-level tokenizer with the tokens of a template, or with another template."""
    own, control, think, special = TEMPLATES[name]
    tokenizer: Any = train_tokenizer([*TEXTS * 3, *JOINED * 20], 300)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    if control:
        tokenizer.add_special_tokens({"additional_special_tokens": list(control)})
    if DEEPSEEK[0] in control:
        tokenizer.bos_token, tokenizer.eos_token = DEEPSEEK[:2]
    if "<|im_end|>" in control:
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in think])
    tokenizer.chat_template = template or own
    return tokenizer
