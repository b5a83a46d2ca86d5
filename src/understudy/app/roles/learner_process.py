"""The learner role as a process of its own: reports lines of JSON, and ends when its standard input closes.

Run as `python -m understudy.app.roles.learner_process DATA [CONFIG]`, where CONFIG is the file that `up` wrote. It ends
with 4 when another learner has taken over: starting it again would only take turns with the other.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from understudy.app.backends import open_store
from understudy.app.config import Config, read_config
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.roles.children import FENCED, report, run_role, stop_with_parent
from understudy.app.roles.learner_role import LearnerRole
from understudy.app.roles.logs import log_to_stderr
from understudy.app.service.game_learner import LearnerServiceConfig
from understudy.app.specs import RegistrySpecs
from understudy.core.errors import Fenced
from understudy.core.names import game_name_of_env
from understudy.learn.compile_cache import use_compile_cache
from understudy.models.registry import Registry
from understudy.stores.window import Window


class Follower:
    """Fills a window until told to stop; a context manager that raises what the thread died of, behind the role's end.

    A learner must not go on with old data: what ends the thread sets `stop` as well, and whoever runs the role starts
    it again. A store that is away for a while ends nothing; `fields` tells.
    """

    def __init__(self, window: Window, stop: threading.Event) -> None:
        self._window, self._stop = window, stop
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow)

    def _follow(self) -> None:
        try:
            self._window.run(self._stop)
        except BaseException as error:
            self._error = error
            self._stop.set()

    def fields(self) -> dict[str, Any]:
        """What a role reports about it: how much was copied, and why nothing is at present, if so."""
        return {"window": {"items": self._window.items, "error": self._window.trouble}}

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


Fields = Callable[[], dict[str, Any]]
"""What else a report says."""

_REPORT_EVERY_S = 0.25


def service_config(config: Config) -> LearnerServiceConfig:
    """What the deployment's config says about its learner."""
    part = config.learner
    envs = {str(game_name_of_env(part.simulator)): part.simulator} if part.simulator else {}
    return LearnerServiceConfig(
        learn_from=config.learn_from, schedule=config.schedule, bounds=config.bounds, envs=envs
    )  # fmt: skip


def main(data: DataFolder, config: Config) -> int:
    """Learn until told to stop, as a config says; the process's exit code."""
    stop = stop_with_parent()
    registry = open_deployment(data, models=config.models.url).registry
    with _copied(data, config, registry, stop) as (folder, fields):
        return learn(folder, registry, service_config(config), stop, fields=fields)


def learn(
    data: DataFolder, registry: Registry, config: LearnerServiceConfig, stop: threading.Event, *,
    fields: Fields = dict,
) -> int:  # fmt: skip
    """Learn from the store of a data folder until told to stop; the process's exit code."""
    use_compile_cache()
    with LearnerRole(data, registry, config=config) as role:

        def tell(**more: str) -> None:
            report(role.status() | {"is_ready": True} | fields() | more)

        reporter = threading.Thread(target=_repeat, args=(tell, stop), daemon=True)
        reporter.start()
        fenced = ""
        try:
            role.run(stop)
        except Fenced as error:
            fenced = str(error)
            stop.set()
        reporter.join()
        tell(fenced=fenced)
    if fenced:
        sys.stderr.write(f"{fenced}\n")
    return FENCED if fenced else 0


@contextlib.contextmanager
def _copied(
    data: DataFolder, config: Config, registry: Registry, stop: threading.Event
) -> Iterator[tuple[DataFolder, Fields]]:
    """The folder to learn from; where experience is kept elsewhere, with a copy of it that grows while this lasts."""
    if not config.store.url:
        yield data, dict
        return
    folder = DataFolder(data.root, store_name="window")
    specs = RegistrySpecs(registry)
    keep_s = config.store.window_hours * 3600 or None
    with (
        contextlib.closing(open_store(config.store.url, specs=specs)) as remote,
        Window(remote, folder.store, specs=specs, keep_s=keep_s) as window,
        Follower(window, stop) as follower,
    ):
        yield folder, follower.fields


def _repeat(tell: Callable[[], None], stop: threading.Event) -> None:
    while not stop.is_set():
        tell()
        stop.wait(_REPORT_EVERY_S)


def _carry_out(folder: str, config: str = "") -> int:
    return main(DataFolder(Path(folder)), read_config(Path(config)) if config else Config())


if __name__ == "__main__":
    log_to_stderr()
    raise SystemExit(run_role(lambda: _carry_out(*sys.argv[1:])))
