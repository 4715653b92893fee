"""Peak memory of every rank, and the bytes each reads, writes and hashes, as a model is loaded, kept and published.

    python -m benchmarks.model_memory [--gb 2] [--ranks 2] [--out FILE.json]

A random Llama of so many GB in float32, in several files of weights, is loaded under ZeRO-3; its snapshot is written,
checked and restored, first by as many ranks and then by one and under tensor parallelism; its weights are exported as
for a generator; then it is published. Then it is evaluated as the stage does it: scored by frozen models under ZeRO-3
and sampled by vLLM under tensor parallelism. No Ray: the ranks are plain processes, and this one, which plays the
stage's part, only passes paths.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from benchmarks.ranks import run_ranks
from xray_runtime.config.engines import EngineConfig, FrozenConfig, GeneratorConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.sft import SFTConfig
from xray_runtime.data.rows import Ragged, Rows
from xray_runtime.engines import states
from xray_runtime.engines.generation.generation import Generation
from xray_runtime.engines.generation.sampling import EngineRank, Sampling
from xray_runtime.engines.generation.vllm import load_vllm
from xray_runtime.engines.shard_loading import Weights
from xray_runtime.models.causal_lm import skeleton
from xray_runtime.models.objectives import ReferenceObjective, SFTObjective
from xray_runtime.models.tensor_file import TensorFile, create
from xray_runtime.models.weight_files import weight_files
from xray_runtime.store.shards import WEIGHTS_INDEX, read_shards
from xray_runtime.workers.learner import Learner
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.workhorse import RankInfo

NUM_FILES, NUM_LAYERS = 4, 8
MAX_LENGTH, KV_CACHE_GIB = 32, 0.25
GB = 1e9


class Measured(Learner):
    """Notes the peak memory of each of its phases."""

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None:
        self.peaks, self.bytes_read = {"libraries": _resident()}, 0
        read = {name: getattr(Weights, name) for name in ("value", "share")}

        def counted(name: str) -> Callable[..., torch.Tensor]:
            def counting(weights: Weights, *args: Any) -> torch.Tensor:
                found: torch.Tensor = read[name](weights, *args)
                self.bytes_read += found.nbytes
                return found

            return counting

        with contextlib.ExitStack() as stack:
            for name in read:
                stack.enter_context(mock.patch.object(Weights, name, counted(name)))
            self.phase("load", lambda: super(Measured, self).build(spec, rank_info))

    def phase(self, name: str, work: Callable[[], Any]) -> Any:
        """`work()`, and the most memory that was resident meanwhile, mapped files included."""
        Path("/proc/self/clear_refs").write_text("5")
        found = work()
        self.peaks[name] = _resident("VmHWM")
        return found


class Frozen(Measured):
    """The frozen model under ZeRO-3 that scores in an evaluation."""

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None:
        frozen = FrozenConfig(num_workhorses=rank_info.world_size, zero_stage=3)
        super().build(ModelSpec(spec.directory, ReferenceObjective(1.0), frozen=frozen), rank_info)


class Sampled(Measured):
    """A rank of the generator in an evaluation."""

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None:
        self._begin(rank_info)
        runtime = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=KV_CACHE_GIB)
        self.peaks = {}
        self.phase("libraries", lambda: load_vllm("cpu"))
        rank = EngineRank("cpu", rank_info.rank, rank_info.world_size, rank_info.host, rank_info.port)
        self.generator = self.phase(
            "load", lambda: Generation(spec.directory, MAX_LENGTH, GeneratorConfig(), runtime, rank)
        )


def _resident(field: str = "VmRSS") -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024 / GB


def make_model(directory: Path, gb: float) -> Path:
    """A random model, written one tensor at a time."""
    # 12 matrices of hidden² a layer, with an intermediate size of 8/3 hidden.
    hidden = int((gb * GB / 4 / NUM_LAYERS / 12) ** 0.5) // 128 * 128
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 8 // 3, "num_hidden_layers": NUM_LAYERS}
    heads = hidden // 64
    transformers.LlamaConfig(
        vocab_size=320, num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True, **sizes
    ).save_pretrained(directory)
    shapes = {name: tuple(p.shape) for name, p in skeleton(str(directory)).named_parameters()}
    placed = {name: f"model-{n % NUM_FILES + 1:05d}-of-{NUM_FILES:05d}.safetensors" for n, name in enumerate(shapes)}
    for file in sorted(set(placed.values())):
        own = {name: shape for name, shape in shapes.items() if placed[name] == file}
        create(directory / file, own, {"format": "pt"})
        with TensorFile(directory / file) as written:
            for name, shape in own.items():
                written.write(name, torch.randn(shape) * 0.02)
    (directory / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return directory


def keep_and_publish(learner: Measured, deal: Callable[[Rows], Rows], directory: Path, ranks: int) -> dict[str, Any]:
    """Every phase of a rank that has loaded the model."""
    rank = learner.rank_info.rank
    snapshot, out = directory / "snapshot", directory / "published"
    learner.phase("snapshot", lambda: learner.save_state(snapshot))
    _barrier()
    found = restored(learner, deal, snapshot, ranks)
    update = learner.phase("export", lambda: learner.export_weights(1, True))
    found["packed"] = update.num_bytes / GB
    learner.phase("copy", lambda: learner.begin_save(out, rank, ranks))
    _barrier()
    learner.phase("publish", lambda: learner.save(out, None))
    _barrier()
    digests = learner.phase("hash", lambda: learner.finish_save(out, rank, ranks))
    found["hashed"]["publish"] = sum((out / name).stat().st_size for name in digests) / GB
    found["written"] = read_shards(snapshot)[rank].size / GB
    return found | {"peaks": learner.peaks}


def restored(learner: Measured, deal: Callable[[Rows], Rows], snapshot: Path, ranks: int) -> dict[str, Any]:
    """Peaks and bytes of a rank that checks and restores a snapshot."""
    rank, read = learner.rank_info.rank, list[int]()

    class Counted(states.Reader):
        def __exit__(self, *error: object) -> None:
            read.append(self.bytes_read)
            super().__exit__(*error)

    problem = learner.phase("check", lambda: learner.check_state(snapshot, rank, ranks))
    assert problem is None, problem
    with mock.patch.object(states, "Reader", Counted):
        learner.phase("restore", lambda: learner.load_state(snapshot))
    hashed = sum(shard.size for shard in read_shards(snapshot)[rank::ranks])
    return {"read": {"restore": sum(read) / GB}, "hashed": {"restore": hashed / GB}, "peaks": learner.peaks}


def scored(learner: Frozen, deal: Callable[[Rows], Rows]) -> dict[str, Any]:
    """Peaks of a rank that scores, and the bytes it read to do so."""
    rows = {"input_ids": Ragged.of([np.arange(5, 5 + MAX_LENGTH)] * 8), "prompt_lengths": np.full(8, MAX_LENGTH // 2)}
    learner.phase("score", lambda: learner.score(deal(rows)))
    return {"read": {"load": learner.bytes_read / GB}, "peaks": learner.peaks}


def sampled(learner: Sampled, deal: Callable[[Rows], Rows], policy: Path) -> dict[str, Any]:
    """Peaks of a rank that samples from one model and then, in the same engine, from another."""
    sampling = Sampling(max_new_tokens=4, temperature=1.0, stop_token_ids=(), pad_token_id=0)
    asked = [[5, 6, 7]] * 4, [0, 1, 2, 3], sampling
    learner.phase("sample", lambda: learner.generator.generate(*asked, 0))
    learner.phase("other checkpoint", lambda: learner.generator.restart(policy, 1))
    learner.phase("sample again", lambda: learner.generator.generate(*asked, 1))
    return {"peaks": learner.peaks}


def _barrier() -> None:
    torch.distributed.barrier()


def spec_of(model: Path, layout: dict[str, Any]) -> ModelSpec:
    training = SFTConfig(engine=EngineConfig(micro_batch_tokens=64, **layout))
    return ModelSpec(model, SFTObjective(), training=training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory, ranks = Path(place), options.ranks
        model = make_model(directory / "model", options.gb)
        size = sum(file.stat().st_size for file in set(weight_files(model).values())) / GB
        zero = {"zero_stage": 3, "num_workhorses": ranks}
        found: dict[str, Any] = {"gb": size, "ranks": ranks}
        logs = directory / "logs"
        found["ZeRO-3"] = run_ranks(spec_of(model, zero), logs, keep_and_publish, directory, ranks, kind=Measured)
        for name, layout in {"TP": {"tensor_parallel": ranks, "num_workhorses": ranks}, "one process": {}}.items():
            count = layout.get("num_workhorses", 1)
            found[name] = run_ranks(
                spec_of(model, layout), logs, restored, directory / "snapshot", count, kind=Measured
            )
        evaluated = spec_of(directory / "published", zero)
        found["evaluate, frozen"] = run_ranks(evaluated, logs, scored, kind=Frozen)
        found["evaluate, generator"] = run_ranks(evaluated, logs, sampled, model, kind=Sampled)
        # Weight and two moments, of which every rank holds an equal share.
        share = 3 * size / ranks
        found["load ÷ share"] = max(rank["read"]["load"] for rank in found["evaluate, frozen"]) / (size / ranks)
        found["packed ÷ share"] = max(rank["packed"] for rank in found["ZeRO-3"]) / (size / ranks)
        found["restore ÷ share"] = max(rank["read"]["restore"] for rank in found["ZeRO-3"]) / share
        found["hashed ÷ share"] = max(rank["hashed"]["restore"] for rank in found["ZeRO-3"]) / share
        found["stage's process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
    text = json.dumps(json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 3)), indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
