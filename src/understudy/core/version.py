"""The version of this build."""


def version() -> str:
    """The installed version, or `0+source` where nothing is installed."""
    from importlib import metadata  # late: it takes a sixth of what importing the client may

    try:
        return metadata.version("understudy")
    except metadata.PackageNotFoundError:
        return "0+source"
