"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str:
    """Such as "2.13.0"; empty where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
