"""What is to be planned: the models of one stage, how much text they see at a time, and the machine they run on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from xray_runtime.config.base import FreshBase, PretrainedBase
from xray_runtime.config.engines import EngineConfig, GeneratorConfig, LoRAConfig
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
from xray_runtime.planning.roles import ModelRole, Use
from xray_runtime.planning.shapes import ModelShape, from_fresh, from_parameter_count, from_pretrained

if TYPE_CHECKING:
    from xray_runtime.graph.graph import StageCall
    from xray_runtime.graph.handles import Handle

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


@dataclass(frozen=True, kw_only=True)
class Role:
    """One model of a stage with its shape."""

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
    model: str | None = None
    """The pretrained model it comes from, which may not be one that can be cut; None: a Llama."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The models of one stage, all alive at the same time, and what they see."""

    roles: tuple[Role, ...]
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

    def of_use(self, use: Use) -> list[Role]:
        return [role for role in self.roles if role.use == use]

    @property
    def most_alive(self) -> int:
        """Models, a generator's replicas counted each."""
        return len(self.roles) + len(self.of_use("sampled")) * (self.generator_replicas - 1)

    def recomputing(self) -> Workload:
        """The same, with activations of what is trained computed again in the backward pass."""

        def again(role: Role) -> Role:
            return replace(role, options=replace(role.options, checkpointing=True)) if role.use == "trained" else role

        return replace(self, roles=tuple(again(role) for role in self.roles))

    def memory(self, role: Role, layout: Layout) -> Memory:
        """What `role` needs on each of its devices."""
        shape, width = role.shape, role.weight_bytes
        if role.use == "sampled":
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
        if role.use == "frozen":
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


def stage_workload(call: StageCall, device: str) -> Workload | None:
    """The models of a stage, each of the shape of what it is made from; None of a stage that has none.

    vLLM generates in bfloat16 on CUDA.

    Raises:
        ConfigError: a model's shape cannot be found, read or planned.
    """
    declared = dict(call.kind.models(call.config))
    on_trunks = [name for name, role in declared.items() if _stands_on(call, role, declared)]
    branches = Counter(declared[name].trunk for name in on_trunks)
    kept = {name: role for name, role in declared.items() if name not in on_trunks}
    if not kept:
        return None
    roles = tuple(_planned(call, name, role, branches[name], device) for name, role in kept.items())
    lengths = [_lengths(call, role) for role in kept.values()]
    engines = [role.layout for role in kept.values() if isinstance(role.layout, EngineConfig)]
    return Workload(
        roles=roles,
        sequence_tokens=max(sum(length) for length in lengths),
        response_tokens=max(response for _, response in lengths),
        batch_size=min((role.batch_size for role in kept.values() if role.use == "trained"), default=1),
        rollout_size=max(role.rows for role in kept.values()),
        micro_batch_tokens=max((engine.micro_batch_tokens for engine in engines), default=16),
        reserved_kv_bytes=round(call.runtime.generator_memory_gib * GIB) if device == "cpu" else 0,
        generator_replicas=call.runtime.generator_replicas,
        generator_sleeps=call.runtime.generator_sleeps,
    )


def _planned(call: StageCall, name: str, role: ModelRole, branches: int, device: str) -> Role:
    where, layout = f"{call.name}.{name}", role.layout
    source, field = _source(call, role, where)
    shape = from_fresh(source) if isinstance(source, FreshBase) else _pretrained_shape(source, field)
    if role.trainable_layers is not None and role.trainable_layers > shape.num_layers:
        raise ConfigError(
            f"{call.name}.trainable_layers: {role.trainable_layers} is not allowed: the model has {shape.num_layers} "
            "layers"
        )
    width, options = FLOAT32_BYTES, PLAIN
    if isinstance(layout, EngineConfig):
        width, options = trained_so(role.lora, layout, device)
    elif isinstance(layout, GeneratorConfig):
        width = FLOAT32_BYTES if device == "cpu" else HALF_BYTES
    elif getattr(layout, "precision", "float32") == "bfloat16":
        width = HALF_BYTES
    return Role(
        name=name,
        shape=shape,
        use=role.use,
        weight_bytes=width,
        scores_tokens=role.scores_tokens,
        top_layers=role.trainable_layers,
        branches=role.branches + branches,
        options=options,
        in_one_piece=isinstance(layout, GeneratorConfig) and layout.engine == "transformers",
        model=None if isinstance(source, FreshBase) else source,
    )


class UnknownShapeError(ConfigError):
    """A checkpoint lies elsewhere, and nothing here says the shape of its model."""


def _source(call: StageCall, role: ModelRole, where: str) -> tuple[FreshBase | str, str]:
    """`base_of` a role; a frozen model whose checkpoint lies elsewhere is taken to be of the shape of the others."""
    try:
        return base_of(call, role.shape, where)
    except UnknownShapeError:
        others = [other.shape for other in call.kind.models(call.config).values() if other.use != "frozen"]
        if role.use != "frozen" or not others:
            raise
        return base_of(call, others[0], where)


def base_of(call: StageCall, name: str | None, where: str) -> tuple[FreshBase | str, str]:
    """(the model that an input, or with None the stage itself, comes from: its sizes, or name or directory; the field
    that names it).

    Raises:
        ConfigError: nothing says its shape; the line begins with `where`.
    """
    while name is not None:
        handle = call.parents.get(name)
        if handle is None:
            raise ConfigError(f"{where}: cannot be planned: the stage has no input {name!r} that says its shape")
        if handle.call is None:
            directory = handle.graph.directory_of(handle)
            if not (directory / "config.json").is_file():
                raise UnknownShapeError(
                    f"{where}: {handle.name!r} cannot be planned: must be a checkpoint's directory, whose config.json "
                    "says the model's shape"
                )
            return str(directory), where
        call, name = handle.call, _made_from(handle.call)
    base = call.kind.base_model(call.config)
    if base is None:
        raise ConfigError(f"{where}: cannot be planned: {call.name!r} is made from no model whose shape is known")
    return base, f"{call.name}.model"


def _made_from(call: StageCall) -> str | None:
    """The input that a stage's output has its shape from; None where it is the kind's own."""
    if call.kind.base_model(call.config) is not None:
        return None
    trained = (role.shape for role in call.kind.models(call.config).values() if role.use == "trained")
    models = (name for name, handle in call.parents.items() if handle.call is None or handle.output.is_model)
    return next(trained, None) or next(models, None)


def _stands_on(call: StageCall, role: ModelRole, declared: dict[str, ModelRole]) -> bool:
    """Whether a frozen model becomes a branch on the trunk of another."""
    trunk = declared.get(role.trunk or "")
    made = call.parents[role.shape].call if trunk is not None and role.shape is not None else None
    if trunk is None or made is None or made.kind.base_model(made.config) is not None:
        return False
    layers = {other.trainable_layers for other in made.kind.models(made.config).values() if other.use == "trained"}
    return layers == {trunk.trainable_layers} and (
        base_of(call, role.shape, call.name) == base_of(call, trunk.shape, call.name)
    )


def _lengths(call: StageCall, role: ModelRole) -> tuple[int, int]:
    """(longest prompt, longest reply) in tokens: as the data was made, or what stages take where nothing says so; of a
    context that is not known, the most."""
    source, _ = _source(call, role, call.name)
    context = source.max_positions if isinstance(source, FreshBase) else None
    data = call.parents.get(role.data or "")
    reply = role.reply_tokens or next(_settings(data, "max_new_tokens"), None)
    reply = reply or (REPLY_TOKENS if context is None else min(REPLY_TOKENS, context // 3))
    prompt = next(_settings(data, "max_prompt_tokens"), None)
    return prompt or (PROMPT_TOKENS if context is None else max(min(PROMPT_TOKENS, context - reply), 1)), reply


def _settings(data: Handle | None, field: str) -> Iterator[Any]:
    """The values of a field in the configs of the stages that made `data`, nearest first."""
    handles = [data] if data is not None else []
    for handle in handles:
        if handle.call is None or handle.output.is_model:
            continue
        value = getattr(handle.call.config, field, None)
        if value is not None:
            yield value
        handles += handle.call.parents.values()


@cache
def _pretrained_shape(model: str, field: str) -> ModelShape:
    # A search for what would fit plans the same model a hundred times, and some take seconds to read.
    try:
        return from_pretrained(PretrainedBase(model=model), field)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def trained_so(lora: LoRAConfig | None, engine: EngineConfig, device: str) -> tuple[int, Options]:
    """(bytes of a weight, options) of a model that is trained so.

    On CPU the device's memory is the host's, so offloading to it saves nothing.
    """
    mixed = engine.precision == "bfloat16"
    options = Options(
        lora_rank=lora.rank if lora is not None else None,
        lora_targets=tuple(sorted(lora.target_modules)) if lora is not None and lora.target_modules else None,
        offload=engine.offload not in (("none", "cpu") if device == "cpu" else ("none",)),
        checkpointing=engine.activation_checkpointing,
        float32_sums=mixed,
        least_zero_stage=engine.least_zero_stage,
    )
    return HALF_BYTES if mixed else FLOAT32_BYTES, options


def from_parameters(count: float, sequence_tokens: int, options: Options = PLAIN) -> Workload:
    """PPO with five models of `count` parameters each in mixed precision, half of each sequence a reply, batches of 512
    (as Ouyang et al. 2022).
    """
    shape = from_parameter_count(count)
    uses: tuple[tuple[str, Use, bool], ...] = (
        ("policy", "trained", True),
        ("reference", "frozen", True),
        ("critic", "trained", False),
        ("reward", "frozen", False),
        ("generator", "sampled", True),
    )
    return Workload(
        roles=tuple(
            Role(
                name=name,
                shape=shape,
                use=use,
                weight_bytes=HALF_BYTES,
                scores_tokens=tokens,
                options=options if use == "trained" else PLAIN,
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
