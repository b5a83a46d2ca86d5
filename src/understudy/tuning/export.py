"""export_csv, export_optuna: the trials of a study for other programs."""

import csv
import io
import json
import math
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.log import make_folder, storage_error, write_file
from understudy.core.settings import mask_secrets
from understudy.tuning.base_file import text
from understudy.tuning.journal import Row
from understudy.tuning.result import StudyResult
from understudy.tuning.space import Choice, Dimension
from understudy.tuning.study_config import StudyConfig


def export_csv(result: StudyResult, path: Path) -> None:
    """Write one line per trial; a CSV file of this name is replaced, another file never.

    Settings have the prefix `values.`, metrics `metrics.`.
    """
    check_replaceable(path, (".csv",), flag="--csv")
    settings = list(result.config.space.dimensions)
    metrics = sorted({name for row in result.trials for name in row.result.metrics})
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(
        [
            *("trial_no", "state"),
            *(f"metrics.{name}" for name in metrics),
            *(f"values.{name}" for name in settings),
            *("reports", "seconds", "seed", "error"),
        ]
    )
    for trial, ended in result.trials:
        lines.writerow(
            [
                *(trial.trial_no, ended.state),
                *(ended.metrics.get(name, "") for name in metrics),
                *(_plain(trial.values[name]) for name in settings),
                *(len(ended.reports), ended.seconds, trial.seed, ended.error),
            ]
        )
    try:
        make_folder(path.parent.resolve())
        write_file(path, out.getvalue().encode(), mode=0o644)
    except OSError as error:
        raise storage_error(error, f"writing {path}", then="give another --csv file") from error


def check_replaceable(path: Path, suffixes: Sequence[str], *, flag: str) -> None:
    """ConfigError if a file is there whose name does not end as such files do."""
    if path.exists() and path.suffix.lower() not in suffixes:
        raise ConfigError(
            f"{path} exists, and its name does not end in {suffixes[0]}, so it is not replaced; "
            f"give another {flag} file"
        )


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


# --- Optuna ---------------------------------------------------------------------------------------

_SQLITE = (".db", ".sqlite", ".sqlite3")
_INSTEAD = "give a file, such as trials.db, or a URL, such as sqlite:///trials.db"
_IN_MEMORY = re.compile(r"sqlite(\+\w+)?://(/(:memory:)?)?(\?.*)?")


def export_optuna(result: StudyResult, target: str, *, name: str = "") -> str:
    """Write the trials as a new study into a storage of Optuna; return what Optuna opens it by.

    `target` is the URL of a database, or a file: SQLite if it ends so (.db, .sqlite, .sqlite3),
    else a journal of Optuna. `name` is that of the study there, by default the study's own.
    Nothing there is replaced, and an export that fails leaves no study.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtra(
            "the export for Optuna needs the package optuna: pip install 'understudy[optuna]'"
        ) from None
    name = text(name or result.config.name, "name")
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings(), _storage_errors(target):
            warnings.simplefilter("ignore")  # of parts that Optuna calls experimental
            storage, address = _open_storage(target)
            if name in optuna.get_all_study_names(storage):
                raise ConfigError(
                    f"{mask_secrets(target)} already has a study named {name!r}; give another "
                    "--name or another file, or delete it there: optuna delete-study --study-name "
                    f"{shlex.quote(name)} --storage {mask_secrets(address)}"
                )
            is_max = result.config.metric.criteria == "max"
            study = optuna.create_study(
                storage=storage, study_name=name, direction="maximize" if is_max else "minimize"
            )
            try:
                _fill(study, result)
            except BaseException:
                optuna.delete_study(study_name=name, storage=storage)
                raise
    finally:
        optuna.logging.set_verbosity(verbosity)
    return address


def _open_storage(target: str) -> tuple[Any, str]:
    """The storage, and what Optuna's own programs open it by."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    path = Path(target)
    is_url = "://" in target
    is_sqlite = path.suffix in _SQLITE
    if not target or path.is_dir():
        raise ConfigError(
            f"the storage is {target or 'empty'}, which is no file; give a file, such as trials.db"
        )
    if _IN_MEMORY.fullmatch(target):
        raise ConfigError(
            f"{target} is a database in memory, which ends with the export; give a file, such as "
            "sqlite:///trials.db"
        )
    if not is_url and not is_sqlite and not _may_be_journal(path):
        raise ConfigError(
            f"{target} is a file, but no journal of Optuna; give a file that does not exist yet, "
            "such as trials.db"
        )
    if not is_url:
        make_folder(path.parent.resolve())
    try:
        if is_url or is_sqlite:
            address = target if is_url else f"sqlite:///{path}"
            return optuna.storages.RDBStorage(address), address
        return optuna.storages.JournalStorage(JournalFileBackend(target)), target
    except (ValueError, LookupError, AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        # A RuntimeError is that of a database with tables of another version of Optuna.
        is_bad_url = is_url and not isinstance(error, RuntimeError)
        what = "the URL of a database" if is_bad_url else "a storage that this Optuna can read"
        raise ConfigError(f"{mask_secrets(target)} is not {what}: {reason}; {_INSTEAD}") from None


@contextmanager
def _storage_errors(target: str) -> Iterator[None]:
    """Raise what goes wrong with a storage in one line of ours."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy import exc

    shown = mask_secrets(target)
    try:
        yield
    except OSError as error:
        raise storage_error(error, f"writing {shown}", then="give another file") from error
    except ImportError as error:
        module = getattr(error.__cause__, "name", None) or "of this database"
        raise ConfigError(
            f"{shown} needs the driver {module}, which is not installed; install it with pip, or "
            "give a file, such as trials.db"
        ) from None
    except exc.NoSuchModuleError:
        kind = target.partition("://")[0]
        raise ConfigError(f"Optuna knows no database {kind} ({shown}); {_INSTEAD}") from None
    except (exc.SQLAlchemyError, StorageInternalError) as error:
        cause = error if isinstance(error, exc.SQLAlchemyError) else error.__cause__
        if isinstance(cause, exc.ArgumentError):
            raise ConfigError(f"{shown} is not the URL of a database; {_INSTEAD}") from None
        driver_error = getattr(cause, "orig", None) or error
        reason = str((driver_error.args or ("unknown",))[-1]).strip().partition("\n")[0]
        is_sqlite = target.startswith("sqlite") or "://" not in target
        raise ConfigError(
            f"the database {shown} cannot be used: {mask_secrets(reason)}; check "
            + (
                "that its folder exists and can be written to, and that no other program uses it"
                if is_sqlite
                else "that it runs, and its address, user and password"
            )
        ) from None


def _may_be_journal(path: Path) -> bool:
    """Whether Optuna can append to this file without damage to another program's."""
    if not path.exists():
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline(100_000)
    return not first or (first.startswith(b"{") and b'"op_code"' in first)


def _fill(study: Any, result: StudyResult) -> None:
    """Add the trials, and what a reader needs to know of the study."""
    config = result.config
    study.set_metric_names([config.metric.name])
    for key, value in {
        "search": config.search.method,
        "stopping": config.stopping.rule,
        "seed": config.seed,
    }.items():
        study.set_user_attr(key, value)
    converted = {
        name: _distribution(dimension) for name, dimension in config.space.dimensions.items()
    }
    times = {lease.trial_no: lease for lease in result.leases}
    for row in result.trials:
        trial = _frozen_trial(row, config, converted)
        lease = times.get(row.trial.trial_no)
        if lease is not None and lease.end_s is not None:
            trial.datetime_start = datetime.fromtimestamp(lease.start_s)  # Optuna's are local
            trial.datetime_complete = datetime.fromtimestamp(lease.end_s)
        study.add_trial(trial)


def _frozen_trial(row: Row, config: StudyConfig, converted: Mapping[str, Any]) -> Any:
    import optuna

    trial = row.trial
    ended = row.result
    states = optuna.trial.TrialState
    state = {"done": states.COMPLETE, "stopped": states.PRUNED, "failed": states.FAIL}[ended.state]
    attributes: dict[str, Any] = {"trial_no": trial.trial_no, "seed": trial.seed}
    attributes |= {"error": ended.error} if ended.error else {}
    attributes |= {
        name: value for name, value in ended.metrics.items() if name != config.metric.name
    }
    constraints = {}
    for constraint in config.constraints if ended.state == "done" else ():
        # Optuna's constraints are satisfied at 0 and below.
        value = ended.metrics.get(constraint.metric)
        if constraint.high is not None:
            over = math.inf if value is None else value - constraint.high
            constraints[f"{constraint.metric} max"] = min(over, sys.float_info.max)
        if constraint.low is not None:
            under = math.inf if value is None else constraint.low - value
            constraints[f"{constraint.metric} min"] = min(under, sys.float_info.max)
    return optuna.trial.create_trial(
        state=state,
        value=ended.metrics.get(config.metric.name),
        params={name: to_optuna(trial.values[name]) for name, (_, to_optuna) in converted.items()},
        distributions={name: distribution for name, (distribution, _) in converted.items()},
        user_attrs=attributes,
        intermediate_values=dict(ended.reports),
        constraints=constraints or None,
    )


def _distribution(dimension: Dimension) -> tuple[Any, Callable[[Any], Any]]:
    """The distribution, and from a value of ours to one of Optuna's."""
    from optuna import distributions

    if isinstance(dimension, Choice):
        # Optuna has no lists as values, and 1, 1.0 and true are one to it.
        is_plain = all(
            value is None or isinstance(value, str | int | float) for value in dimension.values
        )
        if is_plain and len(set(dimension.values)) == dimension.size:
            return distributions.CategoricalDistribution(dimension.values), lambda value: value
        texts = [json.dumps(value) for value in dimension.values]
        return distributions.CategoricalDistribution(texts), json.dumps
    low = dimension.low
    high = dimension.high if dimension.step is None else dimension.at(1.0)  # the last step
    is_log = dimension.scale == "log"
    if dimension.is_integer:
        step = int(dimension.step or 1)
        return distributions.IntDistribution(int(low), int(high), log=is_log, step=step), int
    return distributions.FloatDistribution(low, high, log=is_log, step=dimension.step), float
