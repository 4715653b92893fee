"""Which changes of the code does no test notice? `make mutants`, with mutmut.

Of `ALL` every change that mutmut knows is tried. Of the guards in other folders (`GUARDS`) one in `ONE_IN` is,
of those that decide something: an operator, a number, a constant, an argument by name. The digest of
the name of its function draws it: an edit of another function changes nothing, and neither does a move of the module.
Each is run against the tests of its module.

No guard here: modules whose tests read the code of X-ray itself (`function_digest`, `module_graph`) or share what was
made once for all of them (`attestation`, `provenance`).

Fails where a change survives that tests/survivors.toml does not list, with why no test can tell it from the code, and
where one is listed that does not survive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "mutants"
CHANGED = MUTANTS / "xray_runtime"
MUTMUT = Path(sys.executable).with_name("mutmut")
NOTICED = {"killed", "timeout"}
"""Of what mutmut says of a mutant; all else survives, or was not tested."""

ALL = ("algorithms", "methods/ppo/presets")
ONE_IN = 6
GUARDS = {
    "kernel/evidence/envelope": "trust/test_signing.py",
    "kernel/evidence/lines": "trust/test_log.py",
    "kernel/evidence/log": "trust/test_log.py trust/test_log_tail.py",
    "kernel/evidence/statement": "trust/test_statement.py",
    "kernel/evidence/view": "trust/test_log.py",
    "trust/bundle": "trust/test_bundle.py trust/test_import.py trust/test_adopt.py trust/test_keys.py",
    "trust/log": "trust/test_log.py",
    "trust/model_signature": "trust/test_model_signature.py trust/test_tampering.py",
    "trust/gates": "trust/test_leaky_judges.py trust/test_promotion.py live/test_judgements.py trust/test_terms.py",
    "trust/leaky_judges": "trust/test_leaky_judges.py",
    "trust/keys": "trust/test_signing.py trust/test_keys.py kernel/store/test_shared.py",
    "trust/promotion": "trust/test_promotion.py trust/test_terms.py",
    "trust/iteration/bundle": "trust/test_iteration_bundle.py",
    "trust/replay": "trust/test_replay.py",
    "trust/replayable": "trust/test_replay.py",
    "trust/retention": "trust/test_retention.py trust/test_promotion.py live/test_judgements.py",
    "trust/signing": "trust/test_signing.py",
    "data/columnar": "data/test_columns.py cluster/test_rows_and_packing.py cluster/test_micro_batches.py",
    "methods/evaluate/judge_leakage": "methods/evaluate/test_judge_leakage.py",
    "methods/evaluate/judging": "methods/evaluate/test_judging.py methods/evaluate/test_evaluate.py"
    " methods/evaluate/test_compare.py",
    "kernel/graph/binding": "kernel/graph/test_binding.py kernel/graph/test_given_functions.py "
    "methods/ppo/test_validation.py methods/evaluate/test_benchmark.py",
    "methods/common/sampling/episode": "methods/ppo/test_episodes.py methods/evaluate/test_benchmark.py",
    "agents/environment_episodes": "methods/ppo/test_episodes.py methods/evaluate/test_benchmark.py",
    "methods/ppo/experience": "methods/ppo/test_experience.py",
    "methods/ppo/hacking_monitor": "methods/ppo/test_hacking_monitor.py",
    "methods/ppo/ledger_writer": "methods/ppo/test_ledger_writer.py",
    "rewards/external_rewards": "methods/ppo/test_reward_sources.py trust/test_replay.py",
    "rewards/reward_models": "methods/ppo/test_reward_sources.py methods/ppo/test_validation.py",
    "rewards/reward_sources": "methods/ppo/test_reward_sources.py methods/ppo/test_episodes.py",
    "methods/common/sampling/scoring": "methods/ppo/test_scoring.py methods/ppo/test_ppo_loop.py"
    " methods/ppo/test_episodes.py",
    "methods/ppo/update": "methods/ppo/test_ppo_loop.py methods/training/test_non_finite_steps.py",
    "methods/ppo/validation": "methods/ppo/test_validation.py",
    "kernel/store/checkpoints": "kernel/store/test_store.py kernel/store/test_shared.py",
    "kernel/store/content_digest": "kernel/store/test_content_digest.py",
    "kernel/store/digest_memory": "kernel/store/test_digest_memory.py kernel/store/test_content_digest.py",
    "kernel/store/identity": "kernel/store/test_identity.py",
    "kernel/store/manifest": "kernel/store/test_identity.py kernel/store/test_store.py",
    "kernel/store/shared": "kernel/store/test_shared.py",
    "kernel/store/snapshots": "kernel/store/test_snapshots.py kernel/store/test_shared.py",
    "methods/common/training/finite": "methods/training/test_non_finite_steps.py",
    "methods/common/training/policy_versions": "methods/ppo/test_validation.py methods/ppo/test_hacking_monitor.py",
}
"""Module → its tests below tests/unit."""


def lines(mutant: str) -> tuple[str, str]:
    """What a mutant changes: before and after."""
    module = mutant.rpartition(".")[0].replace(".", "/")
    shown = get_diff_for_mutant(mutant, path=f"{module}.py").splitlines()
    before, after = (" ".join(line[1:].strip() for line in shown if line.startswith(f"{s} ")) for s in "-+")
    return before, after


def change(mutant: str) -> str:
    """A mutant as people write it: function, line before and line after."""
    function = mutant.removeprefix("xray_runtime.").rpartition("__mutmut_")[0]
    return f"{function}: {' → '.join(lines(mutant))}"


def decides(mutant: str) -> bool:
    """Whether it changes an operator, a number or a constant, or leaves out an argument by name. Another text, or None
    in place of a value, mostly crashes or shows in what is said."""

    def words(text: str) -> Counter[str]:
        return Counter(re.findall(r"\w+|[<>=!+\-*/%&|^]+", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)))

    before, after = map(words, lines(mutant))
    return bool({"not", "="} & set(before - after)) or not set(after - before) <= {"None"}


def drawn(mutant: str) -> bool:
    """Whether a mutant is in the sample: by its function and number, so that a module may move or be renamed."""
    name = mutant.rpartition(".")[2]
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % ONE_IN == 0 and decides(mutant)


def codes_in(files: Iterable[Path]) -> dict[str, int | None]:
    """Mutant → its exit code, where mutmut ran it."""
    codes: dict[str, int | None] = {}
    for file in sorted(files):
        codes |= json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


def sample() -> dict[str, list[str]]:
    """Mutant of a guard → its tests."""
    chosen = {}
    for module, tests in GUARDS.items():
        paths = [f"tests/unit/{path}" for path in tests.split()]
        chosen |= {name: paths for name in codes_in([CHANGED / f"{module}.py.meta"]) if drawn(name)}
    return chosen


def run_tests(*arguments: str) -> int:
    import pytest

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return int(pytest.main(["--rootdir=.", "-x", "-q", "-p", "no:cacheprovider", "--timeout=120", *arguments]))


def tried(mutants: dict[str, list[str]]) -> dict[str, bool]:
    """Mutant → whether its tests notice it, each in a process of its own that begins with all that tests import."""
    # Only from here on a module of ours is imported: the changed one.
    os.chdir(MUTANTS)
    sys.path.insert(0, str(MUTANTS))
    set_mutant_under_test("")
    every = sorted({path for tests in mutants.values() for path in tests})
    if run_tests("--collect-only", *every):
        raise SystemExit("the tests of the guards cannot be collected")
    running: dict[int, str] = {}
    noticed: dict[str, bool] = {}

    def wait() -> None:
        pid, status = os.wait()
        # No test at all notices nothing.
        noticed[running.pop(pid)] = os.waitstatus_to_exitcode(status) not in (0, 5)

    for mutant, tests in {"": every, **mutants}.items():
        if len(running) == os.cpu_count():
            wait()
        child = os.fork()
        if child == 0:
            set_mutant_under_test(mutant)
            os._exit(run_tests(*tests))
        running[child] = mutant
    while running:
        wait()
    os.chdir(ROOT)
    if noticed.pop(""):
        raise SystemExit("a test of the guards fails where nothing is changed")
    return noticed


def main() -> int:
    os.chdir(ROOT)
    # As many as hypothesis tries by itself; `make unit` tries fewer.
    os.environ.setdefault("XRAY_TEST_EXAMPLES", "100")
    subprocess.run(
        [MUTMUT, "run", *(sys.argv[1:] or [f"xray_runtime.{path.replace('/', '.')}.*" for path in ALL])], check=True
    )
    codes = codes_in(file for path in ALL for file in (CHANGED / path).rglob("*.meta"))
    noticed = {name: status_by_exit_code[code] in NOTICED for name, code in codes.items()} | tried(sample())
    survivors = {change(name) for name, was_noticed in noticed.items() if not was_noticed}
    listed = tomllib.loads((ROOT / "tests" / "survivors.toml").read_text(encoding="utf-8"))
    reasoned = {line for lines in listed.values() for line in lines}
    print(f"{len(noticed)} mutants, {len(survivors)} survive, {len(survivors & reasoned)} of them listed")
    for line in sorted(survivors - reasoned):
        print(f"survives, and is not listed: {line}")
    for line in sorted(reasoned - survivors):
        print(f"listed, and does not survive: {line}")
    return int(survivors != reasoned or not codes)


if __name__ == "__main__":
    sys.exit(main())
