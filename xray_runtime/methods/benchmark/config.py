"""Suites that measure one policy in absolute terms. Each is a separate stage; no promotion gate reads them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.engines.sampling_config import SamplingConfig
from xray_runtime.kernel.config.section import Count, Section
from xray_runtime.kernel.config.sources import Source
from xray_runtime.methods.common.environment import AnyEnvironment, check_turns
from xray_runtime.rewards.verifier_config import Verifier


class SideConfig(Section):
    """Rows of a dataset that training never uses."""

    split: Literal["heldout", "validation"] = "heldout"
    """`heldout`: rows for reported results; `validation`: rows for choosing checkpoints
    (`data.validation_fraction`)."""
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2000
    """Bootstrap resamples for the 95% intervals."""


class PerplexitySuite(SideConfig):
    """exp of the mean negative log-likelihood per token of human replies."""

    suite: Literal["perplexity"] = "perplexity"
    num_rows: Count = 256
    max_response_tokens: Count | None = None
    """Rows with longer replies are dropped and counted; null: as `sft.max_response_tokens`."""
    frozen: FrozenConfig = FrozenConfig()


class SampledSuite(SideConfig, SamplingConfig):
    """Suites that sample replies."""

    num_prompts: Annotated[int, Field(ge=1)] = 256
    num_samples_shown: Annotated[int, Field(ge=1, le=200)] = 24
    generator: GeneratorConfig = GeneratorConfig()

    @property
    def num_replies(self) -> int:
        """Replies, or episodes, in all."""
        return self.num_prompts

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens after a prompt."""
        return self.max_new_tokens


class PassAtKSuite(SampledSuite):
    """The probability that one of k replies is correct, by the unbiased estimator of Chen et al. 2021 (pass@k)."""

    suite: Literal["pass_at_k"] = "pass_at_k"
    verifier: Annotated[Verifier, Field(discriminator="kind")]
    samples: Count = 8
    """Replies per prompt."""
    k: Annotated[list[Count], Field(min_length=1)] = Field(default=[1])

    @property
    def num_replies(self) -> int:
        return self.num_prompts * self.samples

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if max(self.k) > self.samples:
            raise ValueError(f"k = {max(self.k)} must be at most samples = {self.samples}")
        return self


class WordsSuite(SampledSuite):
    """Share of replies that contain a word from each list. Whole words are matched, ignoring case."""

    suite: Literal["words"] = "words"
    lists: Annotated[dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], list[str] | Source], Field(min_length=1)]
    """Name → words or phrases, or a text file with one per line."""


class EnvironmentSuite(SampledSuite):
    """The success rate of episodes in an environment; `max_new_tokens` limits one turn."""

    suite: Literal["environment"] = "environment"
    environment: AnyEnvironment
    samples: Count = 1
    """Episodes per prompt."""
    success: float = 1.0
    """An episode succeeds if its rewards sum to at least this."""

    @property
    def num_replies(self) -> int:
        return self.num_prompts * self.samples

    @property
    def max_response_tokens(self) -> int:
        return self.environment.max_tokens

    @model_validator(mode="after")
    def _turns(self) -> Self:
        check_turns(self.environment, self.max_new_tokens, self.stop)
        return self


BenchmarkConfig = Annotated[
    PerplexitySuite | PassAtKSuite | WordsSuite | EnvironmentSuite, Field(discriminator="suite")
]
"""All fields of the stage kind `benchmark`."""
