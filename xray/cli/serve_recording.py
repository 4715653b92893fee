"""The options of `xray serve --record`: checked before anything is started."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xray.flows.subject import add_working_directory
from xray_runtime.kernel.config.loading import parse_overrides
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.live.serving.config import RecordingConfig

if TYPE_CHECKING:
    from xray_runtime.kernel.history.reference import LineageStore
    from xray_runtime.live.serving.recorder import RecorderHandle

FEEDBACK_KEYS = "XRAY_FEEDBACK_KEYS"
"""`APPLICATION=KEY` pairs, separated by commas: the applications that may send feedback."""
MIN_KEY = 16


@dataclass(frozen=True)
class RecordingOptions:
    """Checked options."""

    config: RecordingConfig
    applications: dict[str, str]
    """Digest of a key → application."""
    redaction: dict[str, str]


def recording_options(record: bool, fields: Sequence[str], inference_key: str | None) -> RecordingOptions | None:
    """The options as they were given; None without --record. Raises ConfigError."""
    # Child processes inherit the environment and must not get the keys.
    keys = os.environ.pop(FEEDBACK_KEYS, "")
    if not record:
        if fields:
            raise ConfigError("--set: needs --record")
        return None
    add_working_directory()
    config = validate_as(RecordingConfig, parse_overrides(fields))
    return RecordingOptions(config, _applications(keys, inference_key), _redaction(config))


def _applications(text: str, inference_key: str | None) -> dict[str, str]:
    from xray_runtime.live.serving.middleware import key_digest

    applications: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, key = pair.partition("=")
        if not name or len(key) < MIN_KEY:
            raise ConfigError(f"{FEEDBACK_KEYS}: {name!r} is not allowed: must be NAME=KEY, a key of {MIN_KEY} or more")
        if key == inference_key or key_digest(key) in applications:
            raise ConfigError(f"{FEEDBACK_KEYS}: the key of {name!r} is not allowed: another one is the same")
        if name in applications.values():
            raise ConfigError(f"{FEEDBACK_KEYS}: {name!r} is given twice")
        applications[key_digest(key)] = name
    return applications


def _redaction(config: RecordingConfig) -> dict[str, str]:
    """Module → digest of the code of the redaction."""
    from xray_runtime.data.gold import import_function
    from xray_runtime.kernel.store.code_digest import function_code

    if config.redact is None:
        return {}
    try:
        import_function(config.redact, "redact")
        return function_code(config.redact, [config.redact.partition(":")[0]]).modules
    except ValueError as error:
        raise ConfigError(str(error)) from None


def recording_lock(
    recording: RecordingOptions | None, store: LineageStore
) -> contextlib.AbstractContextManager[object]:
    """One command records into an output directory at a time. Raises ConfigError where another one does."""
    from xray_runtime.kernel.history.recorded import recorded_lock

    return contextlib.nullcontext() if recording is None else recorded_lock(store.output)


def start(recording: RecordingOptions, store: LineageStore, logs: Path) -> RecorderHandle:
    """Start the recorder after checking existing records. Raises NotServedError if they are not sound."""
    from xray_runtime.kernel.evidence.envelope import Verifier
    from xray_runtime.kernel.history.audit_check import read_log
    from xray_runtime.live.serving import NotServedError
    from xray_runtime.live.serving.recorder import RecorderSettings, start_recorder
    from xray_runtime.trust.audit.checks.recorded import check_recorded
    from xray_runtime.trust.keys import trusted_keys
    from xray_runtime.trust.signing import signing_key

    private = signing_key(store.output)
    verifier = Verifier(trusted_keys(store.output))
    findings = [*check_recorded(store, read_log(store.output, verifier)[0].folded.view, verifier, hashing=False)]
    if findings:
        raise NotServedError(f"--record: {findings[0].subject}: {findings[0].detail}; see `xray recorded`")
    settings = RecorderSettings(
        output=store.output.absolute(),
        private=private.absolute(),
        config=recording.config,
        applications=recording.applications,
        redaction=recording.redaction,
        path=tuple(path for path in sys.path if path and "site-packages" not in path and Path(path).is_dir()),
        logs=logs,
    )
    return start_recorder(settings)
