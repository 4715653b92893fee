"""What evidence costs a PPO stage: the rollout ledger, and looking for NaN, as shares of its time.

    python -m benchmarks.evidence [CONFIG] [--mib 512]

One lifecycle is run whole. The ledger's seconds are a phase of every iteration, as recorded; the checks are made again
on the rollouts that the ledger kept (a learner's own, of the loss of each micro-batch, are not among them). Before a
checkpoint is published every weight is looked at: that is held against hashing the same file, which publishing does
anyway.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from benchmarks.machine import MIB, machine, ratio, spread, table, times
from xray_runtime.data.ledger import iterations, read_shard, shard_path
from xray_runtime.data.rows import Ragged, Rows, non_finite
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.models.weight_files import check_finite
from xray_runtime.report.figures import read_metrics
from xray_runtime.store.checkpoints import read_manifest
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import LEDGER
from xray_runtime.tracking.recorder import METRICS, records_directory
from xray_runtime.training.finite import check_rollout

REPEATS = 20


def run(config: Path, output: Path) -> list[Path]:
    """The checkpoints of the PPO stages of a lifecycle."""
    command = [sys.executable, "-m", "xray.cli.main", "run", str(config), "--output", str(output), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    stages = json.loads(done.stdout)["stages"]
    return [output / "checkpoints" / Path(s["checkpoint"]["uri"]).name for s in stages if s["kind"] == "ppo"]


def checks(rows: pa.Table, max_new_tokens: int) -> list[float]:
    """Seconds of the checks that an iteration of these rows makes beside its models."""
    of = {name: rows[name].combine_chunks() for name in rows.column_names if pa.types.is_list(rows[name].type)}
    ragged = {n: Ragged(np.asarray(c.values), np.asarray(c.offsets, np.int64)) for n, c in of.items()}
    ended = rows["ended"].to_numpy()
    sampled: Rows = {
        "response_ids": ragged["reply_ids"],
        "rollout_logprobs": ragged["rollout_logprobs"],
        "ended": ended,
    }
    # What comes back from policy and reference, then what the update reads.
    scores = {name: ragged[name] for name in ("logprobs", "ref_logprobs")}
    made = {name: ragged[name] for name in ("logprobs", "advantages", "weights")}
    sampling = Sampling(max_new_tokens, 1.0, (), 0)

    def check() -> None:
        check_rollout(sampled, len(ended), sampling)
        assert non_finite(scores) is None
        assert non_finite(made) is None

    return times(check, REPEATS)


def of_stage(checkpoint: Path) -> tuple[str, ...]:
    """A row of the first table."""
    manifest = read_manifest(checkpoint)[0]
    series = read_metrics(records_directory(checkpoint.parent.parent, manifest.stage, manifest.key) / METRICS)
    ledger, total = ([value for _, value in series[f"seconds/{name}"]] for name in ("ledger", "total"))
    shards = [shard_path(checkpoint / LEDGER, number) for number in iterations(checkpoint / LEDGER)]
    rows = read_shard(shards[-1]).table
    seconds = checks(rows, manifest.identity.config["max_new_tokens"])
    share = [100 * part / whole for part, whole in zip(ledger, total, strict=True)]
    kept = statistics.mean(path.stat().st_size for path in shards) / len(rows)
    return (
        manifest.stage,
        f"{len(rows)} replies",
        spread(total, " s"),
        f"{100 * sum(ledger) / sum(total):.2g}%, of one iteration {spread(share, '%', 2)}",
        f"{kept:.0f} bytes",
        f"{100 * statistics.median(seconds) / statistics.median(total):.2g}%",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/quickstart.yaml"))
    parser.add_argument("--mib", type=int, default=512, help="of the weights that are looked at")
    options = parser.parse_args()
    print(f"{machine()}; {options.config}\n")
    with tempfile.TemporaryDirectory() as directory:
        stages = run(options.config, Path(directory) / "run")
        head = ("stage", "iteration", "seconds", "in the ledger", "a reply in it", "looking for NaN")
        table(head, map(of_stage, stages))
        weights = Path(directory) / "weights"
        weights.mkdir()
        save_file({"w": torch.randn(options.mib * MIB // 4)}, weights / "model.safetensors")
        look = times(lambda: check_finite(weights))
        hashed = times(lambda: file_sha256(weights / "model.safetensors"))
    print(
        f"\nweights of {options.mib} MiB: looked at in {spread(look, ' s')}, hashed in {spread(hashed, ' s')}, ", end=""
    )
    print(ratio(look, hashed))


if __name__ == "__main__":
    main()
