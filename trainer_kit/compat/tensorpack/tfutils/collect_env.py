"""collect_env_info: the versions of a program, for reports."""

from __future__ import annotations

from trainer_kit.process.run_directory import get_versions

__all__ = ["collect_env_info"]


def collect_env_info() -> str:
    """Returns the versions of Python and of the packages, one in a line."""
    return "\n".join(f"{name} {version}" for name, version in get_versions().items())
