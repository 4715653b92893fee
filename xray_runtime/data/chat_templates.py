"""Chat templates by name, for base models that have none."""

from __future__ import annotations

from pathlib import Path

CALLS = (
    "{% for call in message['tool_calls'] or [] %}{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' + call.function.name | tojson + ', \"arguments\": ' + "
    "call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
)
"""The calls of a message in the form of Hermes and Qwen, which environments and `xray serve` read."""
CHATML = (
    "{% if bos_token and bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + eos_token + '\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    + CALLS
    + "{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML's headers, with every turn closed by the model's end-of-sequence token, so that the vocabulary stays the same.
A message can contain a header's text, but not the token before it."""

NAMED = {"chatml": CHATML}


def named_template(value: str) -> str:
    """The template with this name, or in this file. Raises OSError or UnicodeDecodeError if it cannot be read."""
    return NAMED[value] if value in NAMED else Path(value).read_text(encoding="utf-8")
