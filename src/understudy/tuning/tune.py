"""understudy.tune: searches settings, in a study's folder.

STUDY/journal.jsonl   everything that happened; a study is resumed from it
STUDY/study.json      the study, its trials and the best of them
STUDY/best.toml       the settings of the best trial, for `understudy train --preset STUDY`
STUDY/trials/         what trials write
STUDY/test-A-B/       the best trial A and the runner-up B on held-out seeds, a study like this one
STUDY/slots/          the output of the processes that run trials
"""

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.log import FileLock, write_file
from understudy.core.plural import plural
from understudy.core.wording import joined
from understudy.training.preset import BEST
from understudy.training.settings import (
    ALGORITHMS,
    Resolver,
    algorithm_name,
    describe_algorithm,
    preset_text,
)
from understudy.tuning.journal import NAME, Journal, create_journal, read_journal
from understudy.tuning.result import StudyResult, load_study, ranked, winner_study
from understudy.tuning.slots import Fields, LocalSlots, Slot, Slots
from understudy.tuning.space import Interval, Space
from understudy.tuning.study import OnStudyEvent, Study, StudyStarted
from understudy.tuning.study_config import SlotsConfig, StudyConfig, study_from_json
from understudy.tuning.study_file import read_study, rliable_results, with_settings
from understudy.tuning.trainables import rliable_settings
from understudy.tuning.trial import Searcher

MIN_LAG = 8
_MAY_CHANGE = {"slots", "max_trials", "engine", "address"}
"""Settings that a resumed study may have others of."""
_DIFFERENCES_SHOWN = 3
LOCK = ".lock"
LOCK_S = 3.0
"""How long a resumed study waits until the slots of a killed one have ended."""


def tune(
    study: str | Path | StudyConfig | None = None,
    *,
    level: int = 0,
    settings: Mapping[str, Any] | None = None,
    slots: int | None = None,
    trials: int | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_event: OnStudyEvent | None = None,
    oversubscribe: bool = False,
) -> StudyResult:
    """Search the settings that a study describes; return its trials and the best of them.

    `study` is a file, TOML or RLiable's JSON, or a StudyConfig. `settings` are single settings of
    the study by name, such as `{"method": "tpe"}`. `slots` trials run at once; the result does not
    depend on it, nor on where they run: `{"engine": "ray"}` or "spark", with an "address" for a
    cluster. `level` applies to RLiable's files: 1 runs trials in parallel, 2 the rollouts of each
    trial. To resume a study, its folder `out` is enough, on any engine; more `trials` extend it.
    `on_event` receives every event of a study, and may return `understudy.Stop` to end it, to be
    resumed. `oversubscribe` allows more processes than this machine has cores. After the search,
    the best trial and the runner-up are trained again on held-out seeds (`test_seeds` of them; 0:
    none).
    """
    changes = {**(settings or {})}
    arguments = {"max_trials": trials, "seed": seed, "slots": slots}
    changes |= {name: value for name, value in arguments.items() if value is not None}
    config: StudyConfig | None = None
    if isinstance(study, StudyConfig):
        config = with_settings(study, changes)
    elif study is not None:
        config = read_study(study, level=level, **changes)
    if config is None and (out is None or not resume):
        raise ConfigError(
            "no study was given; pass its file, such as study.toml, or resume one: out=DIR, "
            "resume=True"
        )
    kept = sorted({*changes} - _MAY_CHANGE | ({"level"} if level else set()))
    if config is None and kept:
        raise ConfigError(
            f"a resumed study keeps its {joined(kept)}; omit it, or start another study with its "
            "file"
        )
    folder = _folder(config, out, resume=resume)
    if _is_new(folder) and config is None:
        raise ConfigError(f"{folder} is not a study; give the folder that 'tune' printed")
    with FileLock(folder / LOCK, what="the study", timeout_s=LOCK_S) as lock:
        is_new = _is_new(folder)  # another process may have created it since
        try:
            if is_new:
                assert config is not None
                config = _created(config, folder)
            return _run(
                folder,
                config,
                lock,
                slots=slots,
                trials=trials,
                place={name: changes[name] for name in ("engine", "address") if name in changes},
                on_event=on_event or (lambda event: None),
                oversubscribe=oversubscribe,
            )
        except ConfigError:
            if is_new and not _has_leases(folder):
                shutil.rmtree(folder)
            raise


def _folder(config: StudyConfig | None, out: str | Path | None, *, resume: bool) -> Path:
    """The study's folder: `out`, or the first free one; to resume, the last that is not free."""
    if out is not None:
        return Path(out)
    assert config is not None
    stem = Path(config.trainable.config["folder"])
    number = 1
    path = stem
    before = stem
    while path.exists():
        number += 1
        before = path
        path = stem.with_name(f"{stem.name}-{number}")
    return before if resume else path


def _is_new(folder: Path) -> bool:
    """Whether there is no study in the folder; ConfigError if there is anything else."""
    is_new = not (folder / NAME).exists()
    if is_new and folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give another folder, or resume the study in it")
    return is_new


def _has_leases(folder: Path) -> bool:
    path = folder / NAME
    return path.exists() and bool(read_journal(path).state.leases)


def _created(config: StudyConfig, folder: Path) -> StudyConfig:
    """The study with its folder and lag, as its journal keeps it."""
    at_once = config.slots.slots * max(1, config.slots.lanes)
    lag = config.search.lag or max(MIN_LAG, 2 * at_once)
    trainable = replace(config.trainable, config={**config.trainable.config, "folder": str(folder)})
    config = replace(
        config,
        search=replace(config.search, lag=lag),
        trainable=trainable,
        notes=[*config.notes, *_untuned(config.space)],
    )
    _create(folder / NAME, config)
    return config


def _untuned(space: Space) -> list[str]:
    """A note on settings with an interval of one value; a list of one value is intended."""
    if len(space.fixed) == len(space.dimensions):
        return ["each setting of the space has only one value: trials differ only in their seeds"]
    fixed = [name for name in space.fixed if isinstance(space.dimensions[name], Interval)]
    if not fixed:
        return []
    are = plural(len(fixed), "is", "are")
    return [f"{joined(fixed)} {are} not tuned: min and max allow only one value"]


def _create(path: Path, config: StudyConfig) -> None:
    create_journal(
        path,
        id=str(uuid.uuid4()),
        study=config.to_json(),
        created_ms=int(time.time() * 1000),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("understudy", "numpy", "optuna"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _run(
    folder: Path,
    requested: StudyConfig | None,
    lock: FileLock,
    *,
    slots: int | None,
    trials: int | None,
    place: Mapping[str, Any],
    on_event: OnStudyEvent,
    oversubscribe: bool,
) -> StudyResult:
    with closing(Journal(folder / NAME)) as journal:
        state = journal.state
        config = study_from_json(state.created["study"])
        if place.get("engine", config.slots.engine) != config.slots.engine:
            place = {"address": "", **place}  # it was that of the other engine
        config = with_settings(config, place)
        if requested is not None:
            _check_agrees(folder, config, requested)
        num_slots, notes = _num_slots(config, folder, slots, oversubscribe=oversubscribe)
        if journal.cut_bytes:
            notes.append(f"{journal.path}: an unfinished line at the end was cut off")
        max_trials = state.max_trials or config.max_trials
        if trials is not None and trials != max_trials:
            if state.is_out_of_time:
                raise ConfigError(
                    f"trials is {trials}, but the study in {folder} has ended: {state.ended}; "
                    "start another study with a larger max_seconds, or without one"
                )
            if trials < max(1, len(state.records)):
                raise ConfigError(
                    f"trials is {trials}, and {folder} has {len(state.records)} trials; give more "
                    "to extend it"
                )
            journal.append("extended", max_trials=trials)

        def run(
            engine: Engine,
            config: StudyConfig,
            journal: Journal,
            searcher: Searcher | None = None,
        ) -> bool:
            """Run the search, or its test; False if an event's receiver stopped it."""
            place = journal.path.parent
            rows = journal.state.rows()
            with closing(
                Study(
                    config,
                    journal,
                    engine(place / "slots"),
                    num_slots=num_slots,
                    searcher=searcher,
                    on_event=on_event,
                )
            ) as study:
                on_event(
                    StudyStarted(
                        folder=str(folder),
                        name=config.name,
                        max_trials=journal.state.max_trials or config.max_trials,
                        metric=config.metric,
                        rows=rows,
                        best=next(iter(ranked(config, rows)), None),
                        slots=num_slots,
                        is_test=place != folder,
                        notes=[*config.notes, *notes] if place == folder else (),
                        limit_s=study.limit_s,
                    )
                )
                study.run()
            return not study.is_stopped

        try:
            with _engine(config.slots, folder, lock, num_slots=num_slots) as engine:
                if run(engine, config, journal) and (test := winner_study(load_study(folder))):
                    path = Path(test[0].trainable.config["folder"]) / NAME
                    if not path.exists():
                        _create(path, test[0])
                    with closing(Journal(path)) as test_journal:
                        run(engine, test[0], test_journal, test[1])
        finally:
            result = load_study(folder)
            text = json.dumps(result.to_json(), indent=1) + "\n"
            write_file(folder / "study.json", text.encode(), mode=0o644)
        _write_best(result)
        if result.ended:
            _write_rliable_results(result, state.created["id"])
        return result


Engine = Callable[[Path], Slots]
"""Starts slots, whose output is in a folder."""


class _LateSlots:
    """Slots of an engine that starts with the first of them; a study that has ended needs none."""

    def __init__(self, start: Callable[[], Slots]) -> None:
        self._start = start
        self._slots: Slots | None = None

    def open(self, index: int, request: Fields) -> Slot:
        self._slots = self._slots or self._start()
        return self._slots.open(index, request)

    def wait(self, slots: Sequence[Any], timeout_s: float | None) -> Sequence[Any]:
        assert self._slots is not None, "a study waits only for slots that it has opened"
        return self._slots.wait(slots, timeout_s)

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()


@contextmanager
def _engine(
    slots: SlotsConfig, folder: Path, lock: FileLock, *, num_slots: int
) -> Iterator[Engine]:
    """What runs the slots of a study, search and test, until the block ends."""
    with ExitStack() as opened:
        match slots.engine:
            case "ray":
                from understudy.act.ray_session import RaySession
                from understudy.tuning.ray_slots import RaySlots

                cpus = 1 + slots.rollout_workers

                @cache
                def session() -> RaySession:
                    session = RaySession(slots.address or None, num_cpus=num_slots * cpus)
                    return opened.enter_context(closing(session))

                yield lambda output: _LateSlots(lambda: RaySlots(session(), output, cpus=cpus))
            case "spark":
                from understudy.tuning.spark_slots import SparkSlots, spark_context

                @cache
                def context() -> Any:
                    place = spark_context(
                        folder / "spark", address=slots.address, num_slots=num_slots
                    )
                    return opened.enter_context(place)

                yield lambda output: _LateSlots(
                    lambda: SparkSlots(context(), output, num_tasks=num_slots)
                )
            case _:
                yield lambda output: LocalSlots(output, descriptors=[lock.descriptor])


def _is_here(slots: SlotsConfig) -> bool:
    """Whether the slots share the cores of this machine, as far as is known before they start."""
    match slots.engine:
        case "ray":
            ray = sys.modules.get("ray")
            is_connected = ray is not None and ray.is_initialized()
            return not (slots.address or os.environ.get("RAY_ADDRESS") or is_connected)
        case "spark":
            from understudy.tuning.spark_slots import active_context

            context = active_context()
            master = slots.address or (context.master if context else "local")
            return master.startswith("local") and "PYSPARK_GATEWAY_PORT" not in os.environ
        case _:
            return True


def _num_slots(
    config: StudyConfig, folder: Path, requested: int | None, *, oversubscribe: bool
) -> tuple[int, list[str]]:
    """How many slots run, and what to say about it; ConfigError if more than fit were requested.

    Those of a file are reduced instead, since no result depends on them.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    per_slot = max(1, config.slots.rollout_workers)
    fit = max(1, cores // per_slot)
    if requested is not None and requested < 1:
        raise ConfigError(f"slots is {requested}; give a whole number from 1")
    num_slots = min(requested or config.slots.slots, config.search.lag)
    has = f"this machine has {cores} {plural(cores, 'core')}"
    if not _is_here(config.slots):
        note = (
            f"trials write to {folder} on the machines that run them, and only their results come "
            "back; if all machines share this folder, their files are here, too, and a trial whose "
            "machine is lost resumes from its checkpoint"
        )
        return num_slots, [note]
    if oversubscribe:
        return num_slots, []
    if requested is not None and num_slots > fit:
        raise ConfigError(
            f"{requested} slots of {per_slot} {plural(per_slot, 'process', 'processes')} were "
            f"requested, and {has}; give at most {fit} slots, or allow more processes than cores "
            "(oversubscribe, --oversubscribe)"
        )
    notes = []
    if num_slots > fit:
        notes.append(
            f"{num_slots} slots are set, and {has}: {fit} "
            f"{plural(fit, 'is', 'are')} used, with the same results"
        )
    if per_slot > cores:
        notes.append(f"each trial has {per_slot} rollout workers, and {has}")
    return min(num_slots, fit), notes


def _check_agrees(folder: Path, config: StudyConfig, requested: StudyConfig) -> None:
    """ConfigError if the study in a folder is another one than the requested."""
    ours = _plain(config)
    requested = replace(
        requested,
        search=replace(requested.search, lag=requested.search.lag or config.search.lag),
        trainable=replace(
            requested.trainable,
            config={**requested.trainable.config, "folder": config.trainable.config["folder"]},
        ),
    )
    theirs = _plain(requested)
    for fields in (ours, theirs):
        for name in ("slots", "max_trials", "notes"):
            fields.pop(name)
    differences = list(_differences(ours, theirs))
    if differences:
        more = len(differences) - _DIFFERENCES_SHOWN
        shown = [*differences[:_DIFFERENCES_SHOWN], *([f"{more} more"] if more > 0 else [])]
        raise ConfigError(
            f"the study in {folder} is another one: {joined(shown)}; resume it without changes, or "
            "start another one with out=DIR"
        )


def _differences(ours: Any, theirs: Any, name: str = "") -> Iterator[str]:
    """What is not as requested, such as "seed is 4 here and 0 in the study"."""
    if ours == theirs:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from _differences(
                ours.get(key), theirs.get(key), f"{name}.{key}" if name else key
            )
    else:
        yield f"{name} is {theirs!r} here and {ours!r} in the study"


def _plain(config: StudyConfig) -> dict[str, Any]:
    """The study as it is read from a file."""
    fields: dict[str, Any] = json.loads(json.dumps(config.to_json()))
    return fields


def _write_best(result: StudyResult) -> None:
    """Write the settings of the best trial, if it trains an algorithm of ours, for `train`."""
    config = result.config.trainable.config
    if result.best is None or "algorithm" not in config:
        return
    settings = {**config["settings"], **result.best.trial.values}
    if config["is_rliable"]:
        settings = rliable_settings(settings)
    name = algorithm_name(config["algorithm"])
    resolver = Resolver(name, describe_algorithm(name) if name in ALGORITHMS else None)
    for setting, value in settings.items():
        resolver.set(setting, value)
    sections = {section: values for section, values in resolver.values().items() if values}
    write_file(result.folder / BEST, preset_text(name, sections).encode(), mode=0o644)


def _write_rliable_results(result: StudyResult, study_id: str) -> None:
    """Write the results in RLiable's format beside the model, if the study is from its files."""
    config = result.config
    if not config.trainable.config.get("is_rliable"):
        return
    is_parallel = config.slots.slots > 1 or config.slots.rollout_workers > 0
    kind = "parallel_cv_2" if is_parallel else "single_cv"
    path = Path(config.trainable.config["mdl_file"]).parent / f"{kind}-{study_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rliable_results(config, result.trials), indent=1) + "\n"
    write_file(path, text.encode(), mode=0o644)
