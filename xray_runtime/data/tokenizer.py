"""The part of transformers' tokenizers that X-ray uses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from xray_runtime.data.pictures import PictureTokens


class Tokenizer(Protocol):
    """A fast tokenizer with a chat template; `models.causal_lm.load_tokenizer` loads one."""

    name_or_path: str
    is_fast: bool
    pad_token_id: int
    eos_token_id: int
    bos_token_id: int | None
    pad_token: str
    eos_token: str
    chat_template: str | None
    added_tokens_decoder: Mapping[int, Any]
    """Id → the added token."""
    special_tokens_map: Mapping[str, str]
    pictures: PictureTokens | None
    """None: its model reads no pictures. Tokenizers that `load_tokenizer` did not load lack it (`PictureTokens.of`)."""
    backend_tokenizer: Any
    """The tokenizer of the library tokenizers."""

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def __call__(self, text: str, **options: Any) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str: ...

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]: ...

    def get_chat_template(self, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> Any: ...
