"""Where conversations come from."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.config.engines import (
    Count,
    Fraction,
    Positive,
    Section,
)
from xray_runtime.config.sources import Source

DEFAULT_SOURCE = "chitchat"
PROMPT_TOKENS = 1024
"""The longest prompt where no field says so, of models whose context has room for it."""


class MixedSource(Section):
    """One of several sources of conversations."""

    source: Source
    """As `data.source`."""
    split: Annotated[str, Field(min_length=1)] = "train"
    weight: Positive = 1.0
    """Its share of what is read, relative to the others'. The first source to be read to its end ends the mixture."""
    limit: Count | None = None
    """Conversations (records of a file) to read from it at most; then the others go on by their weights."""


class DataConfig(Section):
    """Where conversations come from and how they become prompt/reply pairs."""

    source: Source = DEFAULT_SOURCE
    """`chitchat` (7,168 human conversations from the chitchat-dataset package), a .jsonl, .json or .parquet file, or a
    `datasets` name or directory. Columns: messages, ShareGPT's conversations, Alpaca's instruction/input/output,
    prompt/completion, prompt/chosen/rejected, or HH-RLHF's chosen/rejected."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split to read when `source` is a `datasets` name."""
    columns: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=32)] = Field(default_factory=list)
    """Further columns to carry along: ground truth for rewards, such as `answer`."""
    sources: list[MixedSource] = Field(default_factory=list)
    """Several sources by weight, in place of `source`."""
    curriculum: Annotated[str, Field(min_length=1)] | None = None
    """A column of numbers, by which training conversations are ordered, least first; SFT then reads them in that order.
    Without it each epoch has an order of its own."""
    context_messages: Annotated[int, Field(ge=1, le=64)] | None = None
    """How many messages before a reply become its prompt (null: all). Replies whose prompts begin alike make one row of
    SFT: with null each conversation is one."""
    min_chars: Annotated[int, Field(ge=1)] = 1
    """Prompts and replies shorter than this are dropped, and counted."""
    max_chars: Annotated[int, Field(ge=2)] | None = None
    """Prompts and replies longer than this are dropped, and counted; null: none are."""
    max_prompt_tokens: Annotated[int, Field(ge=4)] | None = None
    """Prompts with more tokens than this, chat template included, are dropped, and counted; null: 1,024, or what the
    model's context leaves beside a reply where that is less."""
    heldout_fraction: Fraction = 0.05
    """Share of conversations kept out of all training."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the others that is kept out of training too, to choose checkpoints by; what is reported is on those that
    `heldout_fraction` holds out."""
    max_conversations: Count | None = None
    """Read at most this many conversations (None: all)."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.sources and self.source != DEFAULT_SOURCE:
            raise ValueError(f"source = {self.source!r} is not allowed together with sources: list it there")
        read = [part.source for part in self.sources] or [self.source]
        if self.curriculum is not None and DEFAULT_SOURCE in read:
            raise ValueError(f"curriculum = {self.curriculum!r} is not allowed: {DEFAULT_SOURCE!r} has no columns")
        if self.max_chars is not None and self.max_chars <= self.min_chars:
            raise ValueError(f"max_chars = {self.max_chars} must be greater than min_chars = {self.min_chars}")
        if self.columns and read == [DEFAULT_SOURCE]:
            raise ValueError(f"columns = {self.columns} must be empty with source = 'chitchat', which has none")
        return self
