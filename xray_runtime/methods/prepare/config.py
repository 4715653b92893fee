"""Sources of conversations."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.section import Count, Fraction, Positive, Section
from xray_runtime.kernel.config.sources import ColumnNames, Source

DEFAULT_SOURCE = "chitchat"
PROMPT_TOKENS = 1024
"""The limit of prompts where neither the data nor the model's context has one."""


class MixedSource(Section):
    """One of several sources of conversations."""

    source: Source
    """See `data.source`."""
    split: Annotated[str, Field(min_length=1)] = "train"
    rename_columns: ColumnNames = Field(default_factory=dict)
    """See `data.rename_columns`."""
    weight: Positive = 1.0
    """Its share of the mixture, relative to the others'. The mixture ends when one source is exhausted."""
    limit: Count | None = None
    """Maximum number of conversations (records of a file) to read from it; the other sources then continue by
    weight."""


class DataConfig(Section):
    """The sources of conversations, and how they are split into prompt/reply pairs."""

    source: Source = DEFAULT_SOURCE
    """`chitchat` (7,168 human conversations from the chitchat-dataset package), a .jsonl, .json or .parquet file, or a
    `datasets` name or directory; .jsonl and .json may be compressed (.gz, .zst). Columns: messages, ShareGPT's
    conversations, Alpaca's instruction/input/output, prompt/completion, prompt/chosen/rejected, HH-RLHF's
    chosen/rejected, or prompt alone."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split to read when `source` is a `datasets` name."""
    rename_columns: ColumnNames = Field(default_factory=dict)
    """Name of a column in `source` → the name that X-ray reads: `{question: prompt}`."""
    columns: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=32)] = Field(default_factory=list)
    """Further columns to keep: ground truth for rewards, such as `answer`."""
    pictures: Source | None = None
    """The folder of pictures that rows name by a path in it. Rows with pictures as bytes or data URLs need none."""
    sources: list[MixedSource] = Field(default_factory=list)
    """Several sources by weight, instead of `source`."""
    curriculum: Annotated[str, Field(min_length=1)] | None = None
    """A column of numbers. SFT reads the training conversations in ascending order of it. Without it each epoch is
    shuffled."""
    context_messages: Annotated[int, Field(ge=1, le=64)] | None = None
    """Number of messages before a reply that form its prompt (null: all). SFT joins replies whose prompts share a
    prefix into one row; with null each conversation is one row."""
    min_chars: Annotated[int, Field(ge=1)] = 1
    """Prompts and replies shorter than this are dropped and counted."""
    max_chars: Annotated[int, Field(ge=2)] | None = None
    """Prompts and replies longer than this are dropped and counted; null: no limit."""
    max_prompt_tokens: Annotated[int, Field(ge=4)] | None = None
    """Prompts with more tokens than this, chat template included, are dropped and counted; null: what the
    model's context leaves beside a reply. More than that is never kept."""
    heldout_fraction: Fraction = 0.05
    """Share of conversations held out of all training, for reported results."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the other conversations that is also kept out of training, to choose checkpoints."""
    withdrawn: Source | None = None
    """The file of withdrawn texts that `xray withdraw` writes: rows with one of them are left out, and counted."""
    max_conversations: Count | None = None
    """Read at most this many conversations (None: all)."""

    @property
    def row_columns(self) -> list[str]:
        return self.columns

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.sources and self.source != DEFAULT_SOURCE:
            raise ValueError(f"source = {self.source!r} is not allowed together with sources: list it there")
        if self.sources and self.rename_columns:
            raise ValueError("rename_columns is not allowed together with sources: set it for each source")
        read = [part.source for part in self.sources] or [self.source]
        if self.curriculum is not None and DEFAULT_SOURCE in read:
            raise ValueError(f"curriculum = {self.curriculum!r} is not allowed: {DEFAULT_SOURCE!r} has no columns")
        if self.max_chars is not None and self.max_chars <= self.min_chars:
            raise ValueError(f"max_chars = {self.max_chars} must be greater than min_chars = {self.min_chars}")
        if self.columns and read == [DEFAULT_SOURCE]:
            raise ValueError(f"columns = {self.columns} must be empty with source = 'chitchat', which has none")
        parts = [(part.source, part.rename_columns) for part in self.sources] or [(self.source, self.rename_columns)]
        if any(source == DEFAULT_SOURCE and names for source, names in parts):
            raise ValueError(f"rename_columns is not allowed with source = {DEFAULT_SOURCE!r}, which has no columns")
        return self
