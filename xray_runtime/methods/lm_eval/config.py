"""Tasks and groups of the lm-evaluation-harness from a directory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.kernel.config.section import Count, Section
from xray_runtime.kernel.config.sources import Source


class LMEvalConfig(Section):
    """One task or group, with its data, in a directory."""

    task: Source
    """A directory with the .yaml of a task, or of a group and all its tasks, with the files that they include or list
    in `data_files`. Nothing is downloaded, and no code of a task is run: `!function` is refused."""
    limit: Count | None = None
    """Maximum number of documents per task; None: all."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Number of few-shot examples; None: the task's own."""
    chat: bool = False
    """Whether to apply the model's chat template to prompts."""
    max_new_tokens: Count = 256
    """Longest reply of tasks that sample without a limit of their own."""
    max_length: Count = 2048
    """Maximum length of prompt and continuation together; longer prompts are truncated at the beginning."""
    frozen: FrozenConfig = FrozenConfig()
    generator: GeneratorConfig = GeneratorConfig()
