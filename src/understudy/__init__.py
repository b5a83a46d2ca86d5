"""understudy turns the games people play into bots worth playing against."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.client.connect import connect as connect

    __version__: str

__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> Any:
    # Importing stays silent and cheap: what a game needs is loaded when it is asked for.
    if name == "connect":
        from understudy.client.connect import connect

        return connect
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("understudy")
        except PackageNotFoundError:
            return "0+source"
    raise AttributeError(f"module 'understudy' has no attribute {name!r}")
