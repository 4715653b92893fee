"""What is to be planned: the models of a lifecycle, how much text they see at a time, and the machine they run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import psutil

from xray_runtime.config.base import CheckpointBase, FreshBase, PretrainedBase
from xray_runtime.config.engines import EngineConfig, LoRAConfig
from xray_runtime.config.lifecycle import BaseModelConfig, LifecycleConfig
from xray_runtime.config.preferences import GoldPreferences
from xray_runtime.config.prepare import PROMPT_TOKENS
from xray_runtime.config.sft import REPLY_TOKENS
from xray_runtime.config.validation import ConfigError
from xray_runtime.cores import usable_cores
from xray_runtime.planning.memory import (
    FLOAT32_BYTES,
    HALF_BYTES,
    PLAIN,
    Layout,
    Memory,
    Options,
    generation_memory,
    scoring_memory,
    training_memory,
    trunk_bytes,
)
from xray_runtime.planning.shapes import ModelShape, from_fresh, from_parameter_count, from_pretrained

GIB = 2**30
USABLE = 0.9
"""Share of a device's memory a plan may fill; fragmentation, communication and others on the machine take the rest."""

CACHED_SEQUENCES, CACHED_TOKENS = 32, 65_536
"""What a generator's KV cache should hold: so many sequences of full length, but no more than so many tokens, and one
sequence in any case. vLLM lets the others wait."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`num_devices` equal devices with `memory_bytes` each: GPUs, or CPU cores with their share of RAM."""

    num_devices: int
    memory_bytes: int
    device: Literal["cpu", "cuda"] = "cuda"
    devices_per_node: int | None = None
    """None: all on one node."""

    @property
    def usable_bytes(self) -> int:
        return int(USABLE * self.memory_bytes)


Use = Literal["train", "score", "generate"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """One model."""

    name: str
    shape: ModelShape
    use: Use
    weight_bytes: int
    """2 of a trained role means mixed precision: the optimizer works in float32."""
    scores_tokens: bool = True
    """Log-probabilities of tokens are wanted, so logits are made; a critic or reward model has one number instead."""
    top_layers: int | None = None
    branches: int = 0
    """So many frozen models stand on its trunk."""
    options: Options = PLAIN
    """Of a trained role."""
    in_one_piece: bool = False
    """What runs it cannot split it."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The roles and what they see."""

    roles: tuple[Role, ...]
    """Of a PPO stage, all alive at the same time; with DPO the policy, and the generator of other stages."""
    evaluated: tuple[Role, ...] = ()
    """Of the evaluation, all alive at the same time."""
    sequence_tokens: int
    """Longest prompt and reply together."""
    response_tokens: int
    """Longest reply."""
    batch_size: int
    """Sequences of one optimizer step; as many data-parallel ranks can be used."""
    rollout_size: int
    """Sequences of one rollout."""
    micro_batch_tokens: int
    score_tokens: int = 8192
    """Tokens of one scoring pass."""
    reserved_kv_bytes: int = 0
    """What vLLM takes for its KV cache however little is needed."""
    generator_replicas: int = 1
    generator_sleeps: bool = False
    """The generator gives its memory back while the others work."""

    @property
    def most_alive(self) -> int:
        """Most models at one time, a generator's replicas counted each."""
        return max(len(self.roles), len(self.evaluated)) + self.generator_replicas - 1

    def recomputing(self) -> Workload:
        """The same, with activations of what is trained computed again in the backward pass."""

        def again(role: Role) -> Role:
            return replace(role, options=replace(role.options, checkpointing=True)) if role.use == "train" else role

        return replace(self, roles=tuple(again(role) for role in self.roles))

    def memory(self, role: Role, layout: Layout) -> Memory:
        """What `role` needs on each of its devices."""
        shape, width = role.shape, role.weight_bytes
        if role.use == "generate":
            sequences = min(CACHED_SEQUENCES, _ceil(self.rollout_size, layout.dp))
            cached = max(min(sequences * self.sequence_tokens, CACHED_TOKENS), self.sequence_tokens)
            return generation_memory(
                shape,
                width,
                layout,
                sequences=sequences,
                cached_tokens=cached,
                reserved_kv_bytes=self.reserved_kv_bytes,
            )
        tokens, positions = self._pass(role, self.score_tokens)
        scoring = scoring_memory(shape, width, layout, tokens=tokens, positions=positions)
        if role.use == "score":
            return scoring
        tokens, positions = self._pass(role, self.micro_batch_tokens)
        training = training_memory(
            shape,
            width,
            layout,
            tokens=tokens,
            positions=positions,
            top_layers=role.top_layers,
            branches=role.branches,
            options=role.options,
        )
        # A trained model scores as well, at another time.
        passes = (training.activations, training.logits), (scoring.activations, scoring.logits)
        activations, logits = max(passes, key=sum)
        if role.top_layers is not None:
            activations += trunk_bytes(shape, self.sequence_tokens * _ceil(self.rollout_size, layout.dp), width)
        return replace(training, activations=activations, logits=logits)

    def _pass(self, role: Role, max_tokens: int) -> tuple[int, int]:
        """(tokens, positions that get logits) of one pass: a sequence longer than `max_tokens` has one of its own."""
        tokens = max(max_tokens, self.sequence_tokens)
        return tokens, _ceil(tokens * self.response_tokens, self.sequence_tokens) if role.scores_tokens else 0


def plannable_base(base: BaseModelConfig) -> FreshBase | PretrainedBase:
    """`base` as a model whose shape can be read. Raises ConfigError where it cannot without opening a checkpoint."""
    if not isinstance(base, CheckpointBase):
        return base
    if not (Path(base.ref) / "config.json").is_file():
        raise ConfigError(
            f"base.ref: {base.ref!r} cannot be planned: must be a checkpoint's directory, whose config.json says the "
            "model's shape"
        )
    return PretrainedBase(model=base.ref, trainable_layers=base.trainable_layers)


def from_config(config: LifecycleConfig, device: str) -> Workload:
    """The models of `config`, under the largest passes and the smallest steps of any of its stages.

    One layout serves every trained model, so what not all of them save, none does here. vLLM generates in bfloat16 on
    CUDA. A reward model that `reward_ref` names is taken to be of the base model's shape.

    Raises:
        ValueError: the base model or the reward model cannot be found, read or planned.
    """
    base, stages, sections = plannable_base(config.base), config.ppo_stages, config.trained.values()
    shape = from_fresh(base) if isinstance(base, FreshBase) else _pretrained_shape(base.model)
    top_layers = None if isinstance(base, FreshBase) else base.trainable_layers
    if top_layers is not None and top_layers > shape.num_layers:
        raise ValueError(f"base.trainable_layers: {top_layers} is not allowed: the model has {shape.num_layers} layers")
    critics = [(stage.lora, stage.critic_engine) for stage in stages if stage.critic_engine is not None]
    on_trunk = top_layers is not None and config.reward is not None and config.reward_base is None
    weight_bytes, options = trained_so([*((s.lora, s.engine) for s in sections), *critics], device)

    def trained(name: str, *, scores_tokens: bool) -> Role:
        return Role(
            name=name,
            shape=shape,
            use="train",
            weight_bytes=weight_bytes,
            scores_tokens=scores_tokens,
            top_layers=top_layers,
            # Above a frozen trunk the reference, and a reward model made of the same base, are branches of the policy.
            branches=(2 if on_trunk else 1) if top_layers is not None and scores_tokens and stages else 0,
            options=options,
        )

    def frozen(name: str, *, shape: ModelShape = shape, scores_tokens: bool = True) -> Role:
        width = HALF_BYTES if config.frozen.precision == "bfloat16" else FLOAT32_BYTES
        return Role(name=name, shape=shape, use="score", weight_bytes=width, scores_tokens=scores_tokens)

    generator = Role(
        name="generator",
        shape=shape,
        use="generate",
        weight_bytes=FLOAT32_BYTES if device == "cpu" else HALF_BYTES,
        in_one_piece=config.generator.engine == "transformers",
    )
    judges = []
    if config.reward_base is not None:
        judged_by = _pretrained_shape(config.reward_base.model, "reward_base.model")
        judges = [frozen("reward", shape=judged_by, scores_tokens=False)]
    elif config.reward is not None or config.reward_ref is not None:
        judges = [frozen("reward", scores_tokens=False)]
    heldout = config.evaluate.heldout_reward_model is not None
    of_its_own = [frozen("judge", scores_tokens=False)] if heldout else []
    separate = any(stage.critic_in_use == "separate" for stage in stages)
    response = _longest_reply(config)
    return Workload(
        roles=(
            trained("policy", scores_tokens=True),
            # DPO's reference has scored before the policy learns, and its rewards only judge in the evaluation.
            *([frozen("reference")] if top_layers is None and stages else []),
            *([trained("critic", scores_tokens=False)] if separate else []),
            *(judges if stages and not on_trunk else []),
            generator,
        ),
        evaluated=(frozen("before"), frozen("after"), *judges, *of_its_own, generator),
        sequence_tokens=_longest_prompt(config, response) + response,
        response_tokens=response,
        batch_size=min(
            [s.batch_size for s in (config.sft, config.reward, config.dpo) if s is not None]
            + [s.minibatch_size for s in stages]
        ),
        rollout_size=max([stage.rollout_size for stage in stages] or [config.evaluate.num_prompts]),
        micro_batch_tokens=max(engine.micro_batch_tokens for engine in config.engines.values()),
        reserved_kv_bytes=round(config.runtime.generator_memory_gib * GIB) if device == "cpu" else 0,
        generator_replicas=config.runtime.generator_replicas,
        generator_sleeps=config.runtime.generator_sleeps,
    )


@cache
def _pretrained_shape(model: str, field: str = "base.model") -> ModelShape:
    # A search for what would fit plans the same model a hundred times, and some take seconds to read.
    return from_pretrained(PretrainedBase(model=model), field)


def _longest_prompt(config: LifecycleConfig, response: int) -> int:
    """`data.max_prompt_tokens`, or what stages take where it is null; of a context that is not known, the most."""
    if config.data.max_prompt_tokens is not None:
        return config.data.max_prompt_tokens
    return (
        min(PROMPT_TOKENS, config.base.max_positions - response)
        if isinstance(config.base, FreshBase)
        else PROMPT_TOKENS
    )


def _longest_learned(config: LifecycleConfig) -> int:
    """`sft.max_response_tokens`, or what the stage takes where it is null."""
    if config.sft is not None and config.sft.max_response_tokens is not None:
        return config.sft.max_response_tokens
    return min(REPLY_TOKENS, config.base.max_positions // 3) if isinstance(config.base, FreshBase) else REPLY_TOKENS


def _longest_reply(config: LifecycleConfig) -> int:
    replies = [config.evaluate.max_new_tokens, *(stage.max_response_tokens for stage in config.ppo_stages)]
    replies += [_longest_learned(config)] if config.sft is not None else []
    replies += [config.preferences.max_new_tokens] if isinstance(config.preferences, GoldPreferences) else []
    return max(replies)


def trained_so(sections: Sequence[tuple[LoRAConfig | None, EngineConfig]], device: str) -> tuple[int, Options]:
    """(bytes of a weight, options) of a role that is trained by each of `sections` in turn: what all of them save.

    On CPU the device's memory is the host's, so offloading to it saves nothing.
    """
    engines = [engine for _, engine in sections]
    loras = [lora for lora, _ in sections if lora is not None]
    saves_nothing = ("none", "cpu") if device == "cpu" else ("none",)
    adapted = len(loras) == len(sections)
    targets = {name for lora in loras for name in lora.target_modules or []}
    some = adapted and all(lora.target_modules is not None for lora in loras)
    mixed = all(engine.precision == "bfloat16" for engine in engines)
    options = Options(
        lora_rank=max(lora.rank for lora in loras) if adapted else None,
        lora_targets=tuple(sorted(targets)) if some else None,
        offload=all(engine.offload not in saves_nothing for engine in engines),
        checkpointing=all(engine.activation_checkpointing for engine in engines),
        float32_sums=mixed,
        least_zero_stage=max(engine.least_zero_stage for engine in engines),
    )
    return HALF_BYTES if mixed else FLOAT32_BYTES, options


def from_parameters(count: float, sequence_tokens: int, options: Options = PLAIN) -> Workload:
    """PPO with five models of `count` parameters each in mixed precision, half of each sequence a reply, batches of 512
    (as Ouyang et al. 2022).
    """
    shape = from_parameter_count(count)
    uses: tuple[tuple[str, Use, bool], ...] = (
        ("policy", "train", True),
        ("reference", "score", True),
        ("critic", "train", False),
        ("reward", "score", False),
        ("generator", "generate", True),
    )
    return Workload(
        roles=tuple(
            Role(
                name=name,
                shape=shape,
                use=use,
                weight_bytes=HALF_BYTES,
                scores_tokens=tokens,
                options=options if use == "train" else PLAIN,
            )
            for name, use, tokens in uses
        ),
        sequence_tokens=sequence_tokens,
        response_tokens=sequence_tokens // 2,
        batch_size=512,
        rollout_size=512,
        micro_batch_tokens=4096,
    )


def this_machine(device: str = "auto", threads: int = 1) -> Machine:
    """What is here: CUDA devices, or else as many devices of `threads` cores each as there are, RAM shared equally.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    if device == "cuda" or (device == "auto" and _may_have_gpus()):
        import torch

        if torch.cuda.is_available():
            memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
            return Machine(num_devices=torch.cuda.device_count(), memory_bytes=memory)
        if device == "cuda":
            raise ConfigError(
                'runtime.device: "cuda" is not allowed: this machine has no GPU (to plan for another one, give '
                "--devices and --memory-gib)"
            )
    count = max(usable_cores() // threads, 1)
    return Machine(num_devices=count, memory_bytes=psutil.virtual_memory().total // count, device="cpu")


def local_node(machine: Machine) -> dict[str, float]:
    """What a Ray of this machine's own has: CPUs and GPUs."""
    return {"CPU": float(usable_cores()), "GPU": float(machine.num_devices if machine.device == "cuda" else 0)}


def _may_have_gpus() -> bool:
    # Importing torch takes seconds: not where there is no driver (/dev/dxg is that of Windows' Linux).
    return Path("/dev/dxg").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
