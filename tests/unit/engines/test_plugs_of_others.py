"""A trainer and a generator of somebody else's package: known by entry points, with no edit of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from xray_runtime.engines.layouts import TRAINERS
from xray_runtime.kernel.plugs import able

TRAINER_CODE = """
from typing import Literal
from xray_runtime.engines.capabilities import TrainerCapabilities
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.trainer import Trainer

class Config(EngineConfig):
    library: Literal["theirs"] = "theirs"
    depth: int = 3

class Theirs(Trainer):
    config = Config
    capabilities = TrainerCapabilities(lora=True)

    def engine(self, module, training, checkpoint, device):
        from their_engines.engine import build
        return build(module)

PLUG = Theirs()
"""
GENERATOR_CODE = """
from typing import ClassVar, Literal
from xray_runtime.engines.capabilities import GeneratorCapabilities
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.generator import GenerationEngine

class Config(GeneratorConfig):
    engine: Literal["far"] = "far"
    addresses: list[str] = []
    not_in_key: ClassVar[frozenset[str]] = frozenset({"addresses"})

class Far(GenerationEngine):
    config = Config
    capabilities = GeneratorCapabilities(remote=True)

PLUG = Far()
"""

CHECKS = """
import sys
from pathlib import Path
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.engines.layouts import EngineConfig, GeneratorConfig
from xray_runtime.methods.loading import validate
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.engines.generator import generator
from xray_runtime.engines.trainer import trainer
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.cluster.pool.demand import demand
from xray_runtime.kernel.store.digest_memory import DigestMemory

assert type(EngineConfig.model_validate({"library": "theirs", "depth": 5})) is trainer("theirs").config
assert type(GeneratorConfig(engine="far")) is generator("far").config
# A model that runs elsewhere takes no device here.
assert demand("generator", GeneratorConfig(engine="far"), RuntimeConfig(), "cuda").gpus == 0.0

def identity(stage, **changes):
    call, memory = recorded_graph(validate(changes)).calls[stage], DigestMemory(Path(sys.argv[1]))
    return identify(call.kind, stage, call.config, call.seed, RuntimeConfig(device="cpu"), {}, {}, memory)[0]

theirs = identity("sft", sft={"engine": {"library": "theirs"}}).code
assert {"their_engines.training", "their_engines.engine"} <= theirs.keys()
assert not [name for name in identity("sft").code if name.startswith("their_engines")]
far = [identity("ppo-1", generator={"engine": "far", "addresses": [address]}) for address in ("a", "b")]
assert far[0] == far[1]
assert "their_engines.sampling" in far[0].code
# A missing capability is refused by the same line as for our own plugs.
for changes in (
    {"sft": {"engine": {"library": "theirs", "tensor_parallel": 2, "num_workhorses": 2}}},
    {"sft": {"engine": {"library": "theirs", "zero_stage": 1}}},
    {"runtime": {"generator_sleeps": True}, "generator": {"engine": "far"}},
):
    try:
        recorded_graph(validate(changes))
    except ConfigError as error:
        print(error)
"""


def test_engines_of_others_are_as_ours(tmp_path: Path) -> None:
    package, information = tmp_path / "their_engines", tmp_path / "their_engines-1.dist-info"
    package.mkdir()
    information.mkdir()
    (package / "__init__.py").touch()
    (package / "training.py").write_text(TRAINER_CODE)
    (package / "sampling.py").write_text(GENERATOR_CODE)
    (package / "engine.py").write_text("def build(module):\n    return module\n")
    (information / "METADATA").write_text("Name: their_engines\nVersion: 1\n")
    points = "[xray.trainers]\ntheirs = their_engines.training:PLUG\n"
    points += "[xray.generators]\nfar = their_engines.sampling:PLUG\n"
    (information / "entry_points.txt").write_text(points)
    command = [sys.executable, "-c", CHECKS, str(tmp_path / "digests.sqlite")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    split, sharded = able(TRAINERS, "tensor_parallel"), [n for n in TRAINERS if "zero_stage" in fields(n)]
    assert "deepspeed" in {*split} & {*sharded}
    assert done.stdout.splitlines() == [
        f"sft.engine: tensor_parallel = 2 is not supported with library = 'theirs' ({', '.join(split)} can)",
        f"sft.engine: zero_stage is not supported with library = 'theirs' ({', '.join(sharded)} can)",
        "preferences: runtime.generator_sleeps = True is not supported with generator.engine = 'far' (vllm can)",
    ]


def fields(trainer: str) -> set[str]:
    return {*TRAINERS.get(trainer).config.model_fields}
