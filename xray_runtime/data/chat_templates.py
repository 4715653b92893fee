"""Chat templates by name, for base models that have none."""

from __future__ import annotations

from pathlib import Path

CALLS = (
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + {'name': call['function']['name'], "
    "'arguments': call['function']['arguments']} | tojson + '</tool_call>' }}{% endfor %}"
)
"""Calls of tools as Hermes and Qwen write them, which is how `environments` reads them in a reply's text."""

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
"""ChatML's headers, every turn closed by the model's own end-of-sequence token: nothing is added to the vocabulary. The
headers are words to a base model, which anybody can write; the token before them is one that nobody can."""

NAMED = {"chatml": CHATML}


def named_template(value: str) -> str:
    """The template of this name, or in this file. Raises OSError or UnicodeDecodeError where it cannot be read."""
    return NAMED[value] if value in NAMED else Path(value).read_text(encoding="utf-8")
