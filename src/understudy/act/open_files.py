"""check_open_files: whether this process may open the files that a team needs."""

import os

from understudy.core.errors import ConfigError

_SPARE = 12
"""Files that a run opens besides: its store, checkpoints, logs and the start of processes."""


def check_open_files(n_more: int, *, what: str) -> None:
    """ConfigError unless this process may open `n_more` files, and some more, at the same time."""
    try:
        import resource

        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        n_open = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # the system has no such limit, or does not tell
        return
    needed = n_open + n_more + _SPARE
    if limit in (resource.RLIM_INFINITY, -1) or needed <= limit:
        return
    raised = max(1_024, 1 << needed.bit_length())
    next_step = f"raise it in the shell first (ulimit -n {raised})"
    if most not in (resource.RLIM_INFINITY, -1) and most < raised:
        next_step = f"raise it up to {most} in the shell first (ulimit -n {most})"
        if most < needed:
            next_step = f"let the administrator raise it (the hard limit is {most})"
    raise ConfigError(
        f"{what} need {needed} open files, but the limit of this process is {limit}; {next_step}, "
        "or use fewer actors"
    )
