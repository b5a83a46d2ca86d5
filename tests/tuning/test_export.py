"""Exports of studies, read back by those who read them."""

import csv
import importlib.util
import json
import sys
import warnings
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.test_pictures import EVIL, SPACE, result_of
from understudy.core.errors import ConfigError, MissingExtra, StorageFailed
from understudy.tuning import export
from understudy.tuning.export import export_csv, export_optuna
from understudy.tuning.journal import Row
from understudy.tuning.result import StudyResult
from understudy.tuning.study_config import Constraint

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="the extra `optuna` is not installed"
)
STATES = ("done", "stopped", "failed")


def study_of(n_trials: int, **changes: Any) -> StudyResult:
    result = result_of(n_trials, states=STATES, reports=2, **changes)
    constraints = (Constraint(metric="cost", low=1.0, high=5.0), Constraint(metric="none", low=0))
    return StudyResult(
        result.folder,
        replace(result.config, constraints=constraints),
        result.trials,
        "",
        leases=result.leases,
    )


def read_back(address: str, name: str) -> Any:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage: Any = address
    if "://" not in address:
        storage = optuna.storages.JournalStorage(JournalFileBackend(address))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.load_study(study_name=name, storage=storage)


# --- Optuna ---------------------------------------------------------------------------------------


@needs_optuna
@pytest.mark.parametrize("file", ["trials.log", "new/trials.db"])
def test_optuna_reads_the_trials_that_were_exported(tmp_path: Path, file: str):
    space = {
        **SPACE,
        EVIL: {"min": 0.0, "max": 1.0, "step": 0.3},
        "odd": {"min": 1, "max": 8, "step": 3},
    }
    result = study_of(7, name="a study", space=space, criteria="min")
    address = export_optuna(result, str(tmp_path / file))
    assert address.startswith("sqlite:///") == file.endswith(".db")
    study = read_back(address, "a study")
    assert study.direction.name == "MINIMIZE"
    assert study.metric_names == ["reward"]
    assert study.user_attrs == {"search": "random", "stopping": "none", "seed": 0}
    assert len(study.trials) == 7
    kinds = {"done": "COMPLETE", "stopped": "PRUNED", "failed": "FAIL"}
    for trial, (ours, ended) in zip(study.trials, result.trials, strict=True):
        assert trial.state.name == kinds[ended.state]
        assert trial.value == ended.metrics.get("reward")
        assert trial.intermediate_values == dict(ended.reports)
        # Of 1, true, a list and None, Optuna knows the JSON texts.
        assert trial.params == {**ours.values, "kind": json.dumps(ours.values["kind"])}
        assert trial.user_attrs["trial_no"] == ours.trial_no
        assert trial.user_attrs["seed"] == ours.seed
        assert trial.user_attrs.get("error", "") == ended.error
        assert trial.user_attrs.get("cost") == ended.metrics.get("cost")
        lease = result.leases[ours.trial_no]
        assert trial.datetime_start == datetime.fromtimestamp(lease.start_s)
        assert (trial.datetime_complete - trial.datetime_start).total_seconds() == 1.0
    assert study.trials[6].constraints == {
        "cost max": 1.0,
        "cost min": -5.0,
        "none min": sys.float_info.max,
    }
    assert study.trials[1].constraints == {}
    distributions = study.trials[0].distributions
    assert (distributions["rate"].low, distributions["rate"].log) == (1e-5, True)
    assert (distributions[EVIL].high, distributions[EVIL].step) == (0.9, 0.3)
    assert (distributions["odd"].high, distributions["odd"].step) == (7, 3)
    assert distributions["kind"].choices[1] == "[64, 64]"
    assert distributions["fixed"].choices == (3,)


@needs_optuna
def test_nothing_in_a_storage_is_replaced(tmp_path: Path):
    file = str(tmp_path / "trials.log")
    export_optuna(study_of(2), file)
    before = Path(file).read_bytes()
    with pytest.raises(ConfigError, match="already has a study named 'study'; give another"):
        export_optuna(study_of(3), file)
    assert Path(file).read_bytes() == before
    with pytest.raises(ConfigError, match=r"^name is 'a\\x1bb', which has the control character"):
        export_optuna(study_of(3), file, name="a\x1bb")
    export_optuna(study_of(3, leases=False), file, name="second")
    assert len(read_back(file, "study").trials) == 2
    assert len(read_back(file, "second").trials) == 3


@needs_optuna
def test_an_export_that_fails_leaves_no_study(tmp_path: Path, monkeypatch: Any):
    file = str(tmp_path / "trials.log")
    calls: list[Row] = []

    def fail(row: Row, *others: Any) -> Any:
        calls.append(row)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return frozen_trial(row, *others)

    frozen_trial = export._frozen_trial
    monkeypatch.setattr(export, "_frozen_trial", fail)
    with pytest.raises(KeyboardInterrupt):
        export_optuna(study_of(3), file)
    monkeypatch.undo()
    export_optuna(study_of(3), file)
    assert len(read_back(file, "study").trials) == 3


@needs_optuna
def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine\n")
    with pytest.raises(ConfigError, match="no journal of Optuna; give a file that does not"):
        export_optuna(study_of(1), str(notes))
    assert notes.read_text() == "mine\n"
    (tmp_path / "damaged.log").write_text('{"op_code": 99, "worker_id": "a"}\n')
    with pytest.raises(ConfigError, match=r"damaged.log is not a storage that this Optuna can re"):
        export_optuna(study_of(1), str(tmp_path / "damaged.log"))


@needs_optuna
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "the storage is empty, which is no file; give a file, such as trials.db"),
        ("folder", "the storage is folder, which is no file; give a file"),
        ("notes.db", "the database notes.db cannot be used: file is not a database; check that"),
        ("sqlite:////none/x.db", "the database .* cannot be used: unable to open database file; c"),
        ("sqlite:///file:ok.db?mode=ro&uri=true", "cannot be used: attempt to write a readonly "),
        ("sqlite://", "sqlite:// is a database in memory, which ends with the export; give a file"),
        ("sqlite:///:memory:", "sqlite:///:memory: is a database in memory"),
        ("magic://me:se/cret@host/db", r"knows no database magic \(magic://\*\*\*@host/db\); give"),
        (
            "mysql+pyodbc://me:secret@host/db",
            r"^mysql\+pyodbc://\*\*\*@host/db needs the driver pyo",
        ),
        ("mysql://host:port/db", "mysql://host:port/db is not the URL of a database: .*; give a"),
        ("://", ":// is not the URL of a database; give a file, such as trials.db, or a URL, such"),
    ],
)
def test_a_storage_that_cannot_be_used_is_one_line_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.db").write_text("mine\n" * 1000)
    export_optuna(study_of(1), "ok.db")
    with pytest.raises(ConfigError, match=message) as caught:
        export_optuna(study_of(1), target, name="second")
    for word in ("\n", "cret", "sqlalche.me", "Background"):
        assert word not in str(caught.value)


def test_without_the_extra_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"pip install 'understudy\[optuna\]'"):
        export_optuna(study_of(1), str(tmp_path / "trials.log"))
    assert list(tmp_path.iterdir()) == []


# --- CSV ------------------------------------------------------------------------------------------


def test_the_table_has_one_line_per_trial(tmp_path: Path):
    result = study_of(4, error=f"{EVIL}, and more")
    path = tmp_path / "new" / "trials.csv"
    export_csv(result, path)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0])[:5] == [
        "trial_no",
        "state",
        "metrics.cost",
        "metrics.reward",
        "values.rate",
    ]
    assert [line["state"] for line in lines] == ["done", "stopped", "failed", "done"]
    for line, (trial, ended) in zip(lines, result.trials, strict=True):
        assert float(line["values.rate"]) == trial.values["rate"]
        assert line["metrics.reward"] == str(ended.metrics.get("reward", ""))
        assert (line["error"], line["reports"]) == (ended.error, "2")
    with pytest.raises(StorageFailed, match="give another --csv file"):
        export_csv(result, path / "trials.csv")
    journal = tmp_path / "journal.jsonl"
    journal.write_text("{}")
    with pytest.raises(ConfigError, match=r"does not end in \.csv, so it is not replaced"):
        export_csv(result, journal)
    assert journal.read_text() == "{}"
