"""Suites: what one policy can do by itself, held against nobody. Each is a stage of its own, and gates nothing."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.config.engines import Count, FrozenConfig, GeneratorConfig, Section
from xray_runtime.config.environment import EnvironmentConfig
from xray_runtime.config.rewards import Verifier
from xray_runtime.config.sampling import SamplingConfig
from xray_runtime.config.sources import Source


class SideConfig(Section):
    """Rows of a dataset that nothing is trained on."""

    split: Literal["heldout", "validation"] = "heldout"
    """`heldout`: what is reported; `validation`: what checkpoints are chosen by (`data.validation_fraction`)."""
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2000
    """Resamples behind the 95% intervals."""


class PerplexitySuite(SideConfig):
    """exp of the mean negative log-likelihood of people's replies, a token."""

    suite: Literal["perplexity"] = "perplexity"
    num_rows: Count = 256
    max_response_tokens: Count | None = None
    """Rows with longer replies are left out, and counted; null: as `sft.max_response_tokens`."""
    frozen: FrozenConfig = FrozenConfig()


class SampledSuite(SideConfig, SamplingConfig):
    """Suites that sample replies."""

    num_prompts: Annotated[int, Field(ge=1)] = 256
    num_samples_shown: Annotated[int, Field(ge=1, le=200)] = 24
    generator: GeneratorConfig = GeneratorConfig()


class PassAtKSuite(SampledSuite):
    """How often one of k replies is right, by the unbiased estimator of Chen et al. 2021."""

    suite: Literal["pass_at_k"] = "pass_at_k"
    verifier: Annotated[Verifier, Field(discriminator="kind")]
    samples: Count = 8
    """Replies to each prompt."""
    k: Annotated[list[Count], Field(min_length=1)] = Field(default=[1])

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if max(self.k) > self.samples:
            raise ValueError(f"k = {max(self.k)} must be at most samples = {self.samples}")
        return self


class WordsSuite(SampledSuite):
    """Share of replies with a word of each list, whole words whatever their case: what a model should not say."""

    suite: Literal["words"] = "words"
    lists: Annotated[dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], list[str] | Source], Field(min_length=1)]
    """Name → words or phrases, or a text file with one a line."""


class EnvironmentSuite(SampledSuite):
    """How often episodes in an environment succeed; `max_new_tokens` is the limit of one turn."""

    suite: Literal["environment"] = "environment"
    environment: EnvironmentConfig
    samples: Count = 1
    """Episodes that begin with each prompt."""
    success: float = 1.0
    """An episode whose rewards come to at least this has succeeded."""

    @model_validator(mode="after")
    def _turns(self) -> Self:
        self.environment.check_turns(self.max_new_tokens, self.stop)
        return self


BenchmarkConfig = Annotated[
    PerplexitySuite | PassAtKSuite | WordsSuite | EnvironmentSuite, Field(discriminator="suite")
]
"""All that the stage kind `benchmark` reads."""
