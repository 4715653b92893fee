"""The stage kinds that X-ray ships. Bodies are named, not imported: whoever writes a graph needs no torch for it.

`python -c "import xray; help(xray.ppo)"` shows one; `CONTRIBUTING.md` adds one.
"""

from __future__ import annotations

from typing import Any

from xray_runtime.config.base import FreshBase, HubModel
from xray_runtime.config.benchmark import BenchmarkConfig, PerplexitySuite, WordsSuite
from xray_runtime.config.best_of_n import BestOfNConfig
from xray_runtime.config.dpo import DPOConfig
from xray_runtime.config.evaluate import EvaluationConfig
from xray_runtime.config.kto import KTOConfig
from xray_runtime.config.lm_eval import LMEvalConfig
from xray_runtime.config.ppo import JudgingConfig, PPOConfig
from xray_runtime.config.preferences import (
    DatasetPreferences,
    GoldPreferences,
    PreferencesStageConfig,
    RatingPreferences,
    RewardedPreferences,
    SampledPreferences,
    SplitPreferencesConfig,
)
from xray_runtime.config.prepare import DataConfig
from xray_runtime.config.reward_model import RewardBaseConfig, RewardConfig
from xray_runtime.config.sft import SFTConfig
from xray_runtime.config.sources import BUILT_IN_GOLD, is_function
from xray_runtime.report.findings import (
    data_findings,
    evaluation_findings,
    policy_findings,
    preferences_findings,
    sft_findings,
)
from xray_runtime.stages import checks
from xray_runtime.stages.artifacts import (
    REWARD_HEAD,
    VALUE_HEAD,
    Benchmark,
    Comparison,
    Dataset,
    Evaluation,
    Model,
    Preferences,
    RewardModel,
)
from xray_runtime.stages.inputs import (
    BenchmarkInputs,
    BestOfNInputs,
    CompareInputs,
    DPOInputs,
    EvaluateInputs,
    FreshBaseInputs,
    KTOInputs,
    LMEvalInputs,
    PPOInputs,
    PreferencesInputs,
    RewardBaseInputs,
    RewardModelInputs,
    SFTInputs,
    SplitPreferencesInputs,
)
from xray_runtime.stages.kind import Layouts, NoInputs, StageKind, register

FEW_STEPS, FEW_PAIRS, FEW_PROMPTS = 2, 64, 16
"""Of a stage that is shortened for the determinism check."""
CHITCHAT = "chitchat"


def _gold(config: Any) -> list[str]:
    return [config.gold] if getattr(config, "gold", None) not in (None, BUILT_IN_GOLD) else []


def _judges(config: Any) -> list[str]:
    terms = [*getattr(config, "rewards", []), *getattr(config, "judges", [])]
    environment = getattr(config, "environment", None)
    answering = [environment.path] if environment is not None else []
    return _gold(config) + answering + [term.function for term in terms if term.function is not None]


def _ppo_functions(config: PPOConfig) -> list[str]:
    return _judges(config) + [name for name in (config.advantages, config.loss) if is_function(name)]


def _frozen(config: JudgingConfig, *roles: str) -> Layouts:
    terms = [*config.rewards, *getattr(config, "judges", [])]
    models = [role for term in terms for role in term.roles]
    return dict.fromkeys((*roles, *models), config.frozen)


def _ppo_models(config: PPOConfig) -> Layouts:
    # With a frozen trunk the reference is a branch on the policy's own trunk.
    roles: tuple[str, ...] = () if config.trainable_layers is not None else ("reference",)
    models: Layouts = {"generator": config.generator, "policy": config.engine, **_frozen(config, *roles)}
    return {**models, "critic": config.critic_engine or config.engine} if config.critic_in_use == "separate" else models


def _preferences_read(config: Any) -> dict[str, str]:
    if isinstance(config, RatingPreferences):
        # No field names them: they come with the conversations.
        return {"ratings": CHITCHAT}
    return {"path": config.path} if isinstance(config, DatasetPreferences) else {}


def _preferences_models(config: Any) -> Layouts:
    if isinstance(config, RewardedPreferences):
        return {"generator": config.generator, **_frozen(config)}
    return {"generator": config.generator} if isinstance(config, SampledPreferences) else {}


def _fewer_preferences(config: Any) -> Any:
    if isinstance(config, RewardedPreferences):
        return _fewer_prompts(config)
    if isinstance(config, GoldPreferences):
        return config.model_copy(update={"num_pairs": min(config.num_pairs, FEW_PAIRS)})
    return config


def _fewer_prompts(config: Any) -> Any:
    return config.model_copy(update={"num_prompts": min(config.num_prompts or FEW_PROMPTS, FEW_PROMPTS)})


def _data_read(config: DataConfig) -> dict[str, str]:
    mixed = {f"sources.{number}.source": part.source for number, part in enumerate(config.sources)}
    return mixed or {"source": config.source}


def _base_reads(config: HubModel) -> dict[str, str]:
    template = config.chat_template or ""
    return {"model": config.model} | ({"chat_template": template} if template.endswith(".jinja") else {})


def _benchmark_models(config: Any) -> Layouts:
    return {"policy": config.frozen} if isinstance(config, PerplexitySuite) else {"generator": config.generator}


def _benchmark_reads(config: Any) -> dict[str, str]:
    lists = config.lists if isinstance(config, WordsSuite) else {}
    return {f"lists.{name}": words for name, words in lists.items() if isinstance(words, str)}


def _fewer_rows(config: Any) -> Any:
    field = "num_rows" if isinstance(config, PerplexitySuite) else "num_prompts"
    return config.model_copy(update={field: min(getattr(config, field), FEW_PROMPTS)})


PREPARE = register(
    StageKind(
        "prepare",
        DataConfig,
        NoInputs,
        Dataset,
        "xray_runtime.stages.prepare:run",
        computes=False,
        outside=_data_read,
        headline={"train_pairs": "training pairs", "heldout_pairs": "held-out pairs"},
        findings=data_findings,
        results="stats.json",
    )
)
BASE = register(
    StageKind(
        "base",
        HubModel,
        NoInputs,
        Model,
        "xray_runtime.stages.base:run",
        outside=_base_reads,
        title="the pretrained model that everything starts from",
    )
)
FRESH_BASE = register(
    StageKind(
        "fresh_base",
        FreshBase,
        FreshBaseInputs,
        Model,
        "xray_runtime.stages.fresh_base:run",
        title="a model with random weights, from which everything starts",
    )
)
SFT = register(
    StageKind(
        "sft",
        SFTConfig,
        SFTInputs,
        Model,
        "xray_runtime.stages.sft:run",
        models=lambda config: {"policy": config.engine},
        check=checks.check_sft,
        shorten=lambda config: config.model_copy(update={"steps": FEW_STEPS}),
        panels=[
            ("loss (nats a token)", ["sft/loss", "sft/heldout_loss", "sft/validation_loss"]),
            ("gradient norm", ["sft/grad_norm"]),
            ("tokens a second", ["speed/train_tokens_per_s"]),
        ],
        headline={"sft/loss": "loss"},
        findings=sft_findings,
        title="supervised fine-tuning on people's replies",
    )
)
PREFERENCES = register(
    StageKind(
        "preferences",
        PreferencesStageConfig,
        PreferencesInputs,
        Preferences,
        "xray_runtime.stages.preferences:run",
        models=_preferences_models,
        outside=_preferences_read,
        functions=_judges,
        check=checks.check_preferences,
        findings=preferences_findings,
        shorten=_fewer_preferences,
        headline={"pairs": "pairs"},
        results="stats.json",
    )
)
SPLIT_PREFERENCES = register(
    StageKind(
        "split_preferences",
        SplitPreferencesConfig,
        SplitPreferencesInputs,
        Preferences,
        "xray_runtime.stages.split_preferences:run",
        computes=False,
        results="stats.json",
    )
)
REWARD_MODEL = register(
    StageKind(
        "reward_model",
        RewardConfig,
        RewardModelInputs,
        RewardModel,
        "xray_runtime.stages.reward_model:run",
        models=lambda config: {"reward": config.engine},
        shorten=lambda config: config.model_copy(update={"epochs": 1}),
        panels=[
            ("loss", ["reward_model/loss"]),
            (
                "pairs in the right order",
                ["reward_model/accuracy", "reward_model/heldout_accuracy", "reward_model/length_baseline_accuracy"],
            ),
            ("gradient norm", ["reward_model/grad_norm"]),
        ],
        headline={"reward_model/loss": "loss", "accuracy": "held-out accuracy"},
        results="reward.json",
        title=f"a reward model (its head lies in `{REWARD_HEAD}`)",
    )
)
REWARD_BASE = register(
    StageKind(
        "reward_base",
        RewardBaseConfig,
        RewardBaseInputs,
        RewardModel,
        "xray_runtime.stages.reward_base:run",
        models=lambda config: {"reward": config.frozen},
        outside=lambda config: {"model": config.model},
        shorten=lambda config: config.model_copy(update={"num_replies": min(config.num_replies, FEW_PROMPTS)}),
        results="reward.json",
        title=f"a reward model that existed already (its head lies in `{REWARD_HEAD}`)",
    )
)
PPO = register(
    StageKind(
        "ppo",
        PPOConfig,
        PPOInputs,
        Model,
        "xray_runtime.stages.ppo:run",
        models=_ppo_models,
        functions=_ppo_functions,
        check=checks.check_ppo,
        shorten=lambda config: config.model_copy(update={"iterations": FEW_STEPS}),
        panels=[
            ("reward", ["reward/mean"]),
            ("gold score", ["reward/gold"]),
            ("validation score", ["validation/score"]),
            ("KL to the reference (nats a reply)", ["kl/reference_k1", "kl/reference_k3"]),
            ("entropy (nats a token)", ["policy/entropy"]),
            ("clip fractions", ["policy/clip_fraction", "value/clip_fraction"]),
            ("explained variance", ["value/explained_variance"]),
            ("generator/trainer mismatch (nats)", ["rollout/mismatch", "rollout/mismatch_max"]),
            ("reply length (tokens)", ["rollout/length"]),
            ("seconds by phase", [f"seconds/{phase}" for phase in ("sync", "generate", "score", "update")]),
        ],
        headline={"reward/mean": "reward", "kl/reference_k1": "KL"},
        findings=policy_findings,
        title=f"a policy after PPO (its value head, where there is one, lies in `{VALUE_HEAD}`)",
    )
)
DPO = register(
    StageKind(
        "dpo",
        DPOConfig,
        DPOInputs,
        Model,
        "xray_runtime.stages.dpo:run",
        models=lambda config: {"policy": config.engine},
        check=checks.check_dpo,
        shorten=lambda config: config.model_copy(update={"epochs": 1}),
        panels=[
            ("loss", ["dpo/loss", "dpo/heldout_loss", "dpo/validation_loss"]),
            ("pairs in the right order", ["dpo/accuracy", "dpo/heldout_accuracy"]),
            ("margin of implicit rewards", ["dpo/margin", "dpo/heldout_margin"]),
            ("log-probability (nats a reply)", ["dpo/chosen_logprobs", "dpo/rejected_logprobs"]),
            ("gradient norm", ["dpo/grad_norm"]),
        ],
        headline={"dpo/loss": "loss", "dpo/heldout_accuracy": "held-out accuracy"},
        title="a policy after learning from preference pairs",
    )
)
KTO = register(
    StageKind(
        "kto",
        KTOConfig,
        KTOInputs,
        Model,
        "xray_runtime.stages.kto:run",
        models=lambda config: {"policy": config.engine},
        check=checks.check_kto,
        shorten=lambda config: config.model_copy(update={"epochs": 1}),
        panels=[
            ("loss", ["kto/loss", "kto/validation_loss"]),
            ("implicit rewards", ["kto/desirable_reward", "kto/undesirable_reward"]),
            ("z, KL to the reference (nats a reply)", ["kto/baseline"]),
            ("held-out pairs in the right order", ["kto/heldout_accuracy"]),
            ("gradient norm", ["kto/grad_norm"]),
        ],
        headline={"kto/loss": "loss", "kto/heldout_accuracy": "held-out accuracy"},
        title="a policy after learning from desirable and undesirable replies",
    )
)
BEST_OF_N = register(
    StageKind(
        "best_of_n",
        BestOfNConfig,
        BestOfNInputs,
        Dataset,
        "xray_runtime.stages.best_of_n:run",
        models=lambda config: {"generator": config.generator} | _frozen(config),
        functions=_judges,
        check=checks.check_rewards,
        shorten=_fewer_prompts,
        results="stats.json",
        title="the best of several sampled replies to each prompt",
    )
)
EVALUATE = register(
    StageKind(
        "evaluate",
        EvaluationConfig,
        EvaluateInputs,
        Evaluation,
        "xray_runtime.stages.evaluate:run",
        models=lambda config: {"generator": config.generator} | _frozen(config, "before", "after"),
        functions=_judges,
        check=checks.check_evaluation,
        shorten=_fewer_prompts,
        headline={"win_rate": "win rate", "gold_delta": "gold score difference", "kl": "KL"},
        findings=evaluation_findings,
        results="evaluation.json",
        sides=("policy", "against"),
    )
)
BENCHMARK = register(
    StageKind(
        "benchmark",
        BenchmarkConfig,
        BenchmarkInputs,
        Benchmark,
        "xray_runtime.stages.benchmark:run",
        models=_benchmark_models,
        outside=_benchmark_reads,
        functions=_judges,
        check=checks.check_benchmark,
        shorten=_fewer_rows,
        results="benchmark.json",
        sides=("policy",),
    )
)
LM_EVAL = register(
    StageKind(
        "lm_eval",
        LMEvalConfig,
        LMEvalInputs,
        Benchmark,
        "xray_runtime.stages.harness_task:run",
        # One of them, by what the task asks for.
        models=lambda config: {"policy": config.frozen, "generator": config.generator},
        outside=lambda config: {"task": config.task},
        check=checks.check_lm_eval,
        shorten=lambda config: config.model_copy(update={"limit": min(config.limit or FEW_PROMPTS, FEW_PROMPTS)}),
        results="benchmark.json",
        sides=("policy",),
    )
)
COMPARE = register(
    StageKind(
        "compare",
        EvaluationConfig,
        CompareInputs,
        Comparison,
        "xray_runtime.stages.compare:run",
        models=lambda config: {"generator": config.generator} | _frozen(config),
        functions=_judges,
        check=checks.check_evaluation,
        headline={"win_rate": "win rate"},
        results="comparison.json",
        sides=("policy", "champion"),
    )
)
