"""The version of this build."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed


def version() -> str:
    """The installed version, or `0+source` where nothing is installed."""
    try:
        return _installed("understudy")
    except PackageNotFoundError:
        return "0+source"
