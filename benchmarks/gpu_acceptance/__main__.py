"""The command; `python -m benchmarks.gpu_acceptance --help`."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from benchmarks.gpu_acceptance.runner import is_passed, run_all, summary
from benchmarks.gpu_acceptance.setting import Setting
from benchmarks.gpu_acceptance.steps import STEPS

DESCRIPTION = """Does X-ray work on this GPU, and how fast? Every step prints one JSON record; a table ends it.

Steps that need vLLM, Ray, DeepSpeed, Megatron or TRL are skipped where it is missing. A step that fails stops no other.
Exit codes: 0 nothing failed, 1 a step failed, 2 bad input. Logs of the steps are in OUT/logs, records in
OUT/records.jsonl."""


def main() -> int:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu_acceptance",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Steps: {'; '.join(names)}.",
    )
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, also without a GPU: do all steps run?")
    parser.add_argument("--steps", nargs="+", choices=names, metavar="NAME", help="only these, and `prepare`")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu-check"), help="replaced; needs 25 GB (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="no step starts later (default: %(default)s)")
    args = parser.parse_args()
    setting = Setting(args.out.resolve(), args.rehearse)
    if setting.device == "cpu" and not args.rehearse:
        parser.error("no CUDA device is visible: use --rehearse to try the steps on a CPU with a tiny model")
    if args.out.exists() and not (args.out / "records.jsonl").exists():
        parser.error(f"--out: {args.out} exists and is not of an earlier acceptance")
    shutil.rmtree(setting.folder, ignore_errors=True)
    (setting.folder / "logs").mkdir(parents=True)
    (setting.folder / "records.jsonl").touch()
    chosen = [step for step in STEPS if not args.steps or step.name in {*args.steps, "prepare"}]
    records = run_all(chosen, setting, time.monotonic() + 60 * args.minutes)
    summary(records)
    return 0 if is_passed(records) else 1


if __name__ == "__main__":
    sys.exit(main())
