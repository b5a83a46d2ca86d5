"""Requests to the process that has the store open: a request file, and an answer file beside it."""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from understudy.core.errors import Locked, UnderstudyError
from understudy.core.log import remove

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]
_POLL_S = 0.02


def send_request(
    folder: Path, command: str, *, timeout_s: float, check: str = "", **arguments: Any
) -> Mapping[str, Any]:
    """Return the answer of the process that has the store open; Locked if none arrives in time.

    It may have begun by then, and finish later; `check` says how to find out. Raises
    UnderstudyError if that process reports an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
    request = folder / f"{name}.request"
    answer = folder / f"{name}.answer"
    _write(request, {"command": command, **arguments})
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            if answer.exists():
                fields: dict[str, Any] = json.loads(answer.read_text())
                if "error" in fields:
                    raise UnderstudyError(fields["error"])
                return fields
            time.sleep(_POLL_S)
    finally:
        remove(request)
        remove(answer)
    later = f"it may still carry it out; to check, {check}" if check else "try again later"
    raise Locked(
        f"the process that has the store open did not answer '{command}' within {timeout_s:g} s; "
        f"{later}; otherwise stop that process first, or raise --timeout if the command has it"
    )


def handle_requests(folder: Path, handlers: Mapping[str, Handler]) -> int:
    """Execute every waiting request, oldest first; return their number."""
    if not folder.is_dir():
        return 0
    waiting = sorted(folder.glob("*.request"))
    for request in waiting:
        try:
            arguments = json.loads(request.read_text())
            handler = handlers.get(arguments.pop("command"))
            if handler:
                result = handler(arguments)
            else:
                result = {
                    "error": "the process that has the store open does not support this command; "
                    "restart it with this version of understudy"
                }
        except FileNotFoundError:
            continue
        except Exception as error:
            # A failing request must not stop the process that answers all of them.
            result = {"error": str(error) or repr(error)}
        remove(request)
        with contextlib.suppress(OSError):
            _write(request.with_suffix(".answer"), result)
    return len(waiting)


def remove_stale_answers(folder: Path, *, older_than_s: float) -> None:
    """Remove requests and answers older than `older_than_s`, whose senders no longer wait."""
    if folder.is_dir():
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if (
                    path.suffix in (".request", ".answer", ".tmp")
                    and time.time() - path.stat().st_mtime > older_than_s
                ):
                    remove(path)


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")  # not matched by *.request
    temporary.write_text(json.dumps(fields))
    temporary.rename(path)
