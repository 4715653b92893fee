"""Extras of the installation, such as `studio`: whether their packages, which pyproject.toml lists, are installed."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from xray_runtime.kernel.config.validation import ConfigError

DISTRIBUTION = "xray-rlhf"


def packages_of(extra: str) -> list[Requirement]:
    """The packages that an extra installs beside X-ray's own requirements."""
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    marked = [each for each in requirements if each.marker is not None and not each.marker.evaluate({"extra": ""})]
    return [each for each in marked if each.marker is not None and each.marker.evaluate({"extra": extra})]


def missing_packages(extra: str) -> list[str]:
    """Names of packages of an extra that are not installed."""
    installed = {}
    for each in packages_of(extra):
        try:
            installed[each.name] = bool(metadata.version(each.name))
        except metadata.PackageNotFoundError:
            installed[each.name] = False
    return [name for name, is_there in installed.items() if not is_there]


def require_extra(extra: str) -> None:
    """Raises ConfigError: a package of the extra is not installed."""
    if missing := missing_packages(extra):
        raise ConfigError(f"{', '.join(missing)}: is not installed; pip install '{DISTRIBUTION}[{extra}]'")
