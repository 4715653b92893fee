"""A task, or a group of them, of the lm-evaluation-harness that lies on disk."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.config.engines import Count, FrozenConfig, GeneratorConfig, Section
from xray_runtime.config.sources import Source


class LMEvalConfig(Section):
    """One task, or one group, with its data, in a directory."""

    task: Source
    """A directory with the .yaml of a task, or of a group and of all tasks in it, what they include, and the files that
    their `data_files` name. Nothing is fetched, and no code of a task's runs: `!function` is refused."""
    limit: Count | None = None
    """Only so many documents of each task; None: all."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """None: as the task says."""
    chat: bool = False
    """Whether prompts are written as the model's chat template has them."""
    max_new_tokens: Count = 256
    """Longest reply, where the task samples and does not say."""
    max_length: Count = 2048
    """Prompt and continuation together; longer prompts lose their beginning."""
    frozen: FrozenConfig = FrozenConfig()
    generator: GeneratorConfig = GeneratorConfig()
