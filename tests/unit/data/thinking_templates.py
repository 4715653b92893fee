"""Chat templates that know reasoning, which behave as the published ones do, and small tokenizers for them."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.unit.data.encoding import template
from xray_runtime.data.tokenizing import CHAT_TEMPLATE, CHATML, train_tokenizer

QWEN3 = template("qwen3")
"""Qwen3: an empty block in the last turn without reasoning, none in turns before the last query."""
QWEN3_THINKING = (
    QWEN3.rpartition("{%- if add_generation_prompt %}")[0]
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
"""Qwen3-Thinking-2507: prompts open the block."""
R1 = template("r1")
"""DeepSeek-R1's distilled models: prompts open a block that no row has, and rows lose all text before its end."""
SPACED = template("spaced")
"""A space before the end of every turn."""
BRACKETS = template("brackets")
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
