"""Text to tokens and back: a tokenizer trained on the corpus, and one way to encode prompts and replies with any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xray_runtime.data.pairs import Messages

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (Sennrich et al. 2016) with a chat template; the same for the same texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, USER, ASSISTANT, SYSTEM],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode_prompts(tokenizer: Any, prompts: Sequence[Messages]) -> list[list[int]]:
    """Token ids of each prompt under the chat template, up to where the assistant's reply begins."""
    if not prompts:
        return []
    texts = tokenizer.apply_chat_template(list(prompts), tokenize=False, add_generation_prompt=True)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def encode_replies(tokenizer: Any, replies: Sequence[str]) -> list[list[int]]:
    """Token ids of each reply, closed by the end-of-sequence token.

    A special token spelled out in a reply is text like any other, so the end token stands at the end alone.
    """
    if not replies:
        return []
    encoded = tokenizer(list(replies), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False)
    return [[*ids, tokenizer.eos_token_id] for ids in encoded["input_ids"]]


def encode_conversations(tokenizer: Any, prompts: Sequence[Messages], replies: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt with its reply as the assistant's last turn, under the chat template.

    A special token spelled out in a reply is left out: in the template's text it would end the turn.
    """
    if not prompts:
        return []
    conversations = [
        [*prompt, {"role": "assistant", "content": _without_special_tokens(tokenizer, reply)}]
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def _without_special_tokens(tokenizer: Any, text: str) -> str:
    while any(token in text for token in tokenizer.all_special_tokens):
        # Again, since what is left may spell another.
        for token in tokenizer.all_special_tokens:
            text = text.replace(token, "")
    return text


def decode_replies(tokenizer: Any, ids: Sequence[Sequence[int]]) -> list[str]:
    """The text of each reply, without special tokens or outer whitespace."""
    if not ids:
        return []  # transformers would answer one empty text
    texts: list[str] = tokenizer.batch_decode([[int(i) for i in row] for row in ids], skip_special_tokens=True)
    return [text.strip() for text in texts]
