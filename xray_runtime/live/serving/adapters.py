"""Adapters that are served by name beside their base: each is a checkpoint with an audit of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.training_config import unserved
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.history.reference import require_language_model, resolve
from xray_runtime.live.serving.choice import ModelChoice, require_sound
from xray_runtime.live.serving.replica import ServedAdapter
from xray_runtime.models.adapter_files import read_fields


def chosen_adapters(
    given: Sequence[str], base: ModelChoice, output: Path | None, tracking_uri: str | None, public: Path | None
) -> tuple[ServedAdapter, ...]:
    """The adapters that `--adapter` names (NAME=REF), on the model `base`.

    Raises:
        ConfigError: a name is taken or missing, or a REF is no adapter on this base.
        NotServedError: an audit finds something.
    """
    found: dict[str, ServedAdapter] = {}
    for text in given:
        name, _, reference = text.partition("=")
        refused = f"--adapter: {text!r} is not allowed"
        if not name or not reference:
            raise ConfigError(f"{refused}: must be NAME=REF")
        if name in found or name in base.names:
            raise ConfigError(f"{refused}: {name!r} already names a model")
        store, node = resolve(reference, output, tracking_uri)
        require_language_model(node)
        if not (node.directory / ADAPTER).is_dir():
            raise ConfigError(f"{refused}: {node.name} was published without an adapter")
        fields = read_fields(node.directory / ADAPTER)
        if fields.base_sha256 != base.node.sha256:
            of = f"{fields.base} ({fields.base_sha256[:12]})"
            raise ConfigError(f"{refused}: {node.name} belongs to {of}, not to {base.node.name}")
        if (problem := unserved(fields.lora, GeneratorConfig())) is not None:
            raise ConfigError(f"{refused}: {problem}")
        require_sound(ModelChoice(store, node, (name,)), public)
        layers = tuple(fields.lora.target_modules or ())
        found[name] = ServedAdapter(name, node.directory.absolute(), node.sha256, fields.lora.rank, layers)
    return tuple(found.values())
