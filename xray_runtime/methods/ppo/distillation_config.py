"""How a stage learns from a teacher."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.section import NonNegative, Section, UnitInterval
from xray_runtime.rewards.kinds._remote import RemoteConfig
from xray_runtime.rewards.term import Column

SHOWN = (
    "{prompt}\n\nThis is an example of a response to the question:\n{demonstration}\n\nNow answer with a response of "
    "your own."
)


class TeacherServerConfig(RemoteConfig):
    """A teacher behind an address: `/v1/completions` with `prompt_logprobs`, and `/tokenize`, as of vLLM's server."""

    model: Annotated[str, Field(min_length=1)]
    """Its name there."""


class DistillationConfig(Section):
    """Distillation on the policy's own samples. The teacher T reads the policy's tokens at the policy's temperature."""

    source: Literal["models", "policy", "server"] = "models"
    """The teacher. `models`: the stage's `teacher`, frozen; `policy`: the policy itself as it is now, shown a
    `demonstration` that it does not see when it samples (self-distillation, arXiv 2601.19897); `server`: a model behind
    an address, at temperature 1."""
    server: TeacherServerConfig | None = None
    coef: NonNegative = 1.0
    """Weight of the divergence. 0: the teacher's log-probabilities are there for your own loss or advantages alone."""
    beta: UnitInterval | None = None
    """None: the reverse KL at the sampled token, whose advantage falls by `coef` × (log π − log T), less the rollout's
    mean of it. Else a term of the loss: the generalized Jensen-Shannon divergence (GKD) of the distributions at each
    place, which at 0 is the forward KL(T ‖ π) and at 1 the reverse KL(π ‖ T)."""
    top_k: Annotated[int, Field(ge=1, le=4096)] | None = 64
    """With `beta`: the teacher's likeliest tokens, which are compared; all others count as one. None: the whole
    vocabulary, of at most 8,192 tokens."""
    column: Column | None = None
    """The column of the dataset that says which of several teachers a row has."""
    values: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    """The column's value for each teacher, in their order."""
    demonstration: Column | None = None
    """The column of the dataset with a text that the teacher is shown and the policy is not."""
    shown: str = SHOWN
    """The text that the teacher reads in place of the last message, with `{prompt}`, that message, and
    `{demonstration}`."""

    @property
    def at_samples(self) -> float:
        """Weight of the reverse KL at the sampled token."""
        return self.coef if self.beta is None else 0.0

    @property
    def num_models(self) -> int:
        """Teachers among the stage's inputs."""
        return max(len(self.values), 1) if self.source == "models" else 0

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.source == "policy" and self.demonstration is None:
            raise ValueError(
                "demonstration: is required with source = 'policy': a policy that reads what it sampled from teaches "
                "itself nothing"
            )
        if (self.column is None) != (len(self.values) < 2) or len(set(self.values)) < len(self.values):
            raise ValueError(
                f"values = {self.values!r} is not allowed with column = {self.column!r}: set both, a value for each of "
                "at least two teachers, or neither"
            )
        if self.column is not None and self.source != "models":
            raise ValueError(f"column = {self.column!r} must be left out with source = {self.source!r}, one teacher")
        if (self.server is None) == (self.source == "server"):
            raise ValueError("server: is required with source = 'server', and is not allowed without it")
        if self.source == "server" and self.top_k is None and self.beta is not None:
            raise ValueError("top_k = None must be a number with source = 'server', which sends its likeliest tokens")
        if self.beta is not None and self.source == "policy":
            raise ValueError(
                f"beta = {self.beta:g} must be left out with source = 'policy': the policy scores sampled tokens alone"
            )
        if any(name not in self.shown for name in ("{prompt}", "{demonstration}")):
            raise ValueError(f"shown = {self.shown!r} is not allowed: must have {{prompt}} and {{demonstration}}")
        return self
