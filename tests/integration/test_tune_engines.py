"""A study ends with the same table on local processes, Ray and Spark, whatever is killed."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.platforms import wait_for
from tests.integration.spark import MARK, left_of
from tests.tuning.cheap import Quadratic, study
from tests.tuning.test_study import ASHA, timeless
from understudy.act.ray_session import RaySession, processes_in
from understudy.core.errors import ConfigError
from understudy.ingest.spark import Spark
from understudy.tuning import slots as slots_module
from understudy.tuning.journal import NAME, read_journal
from understudy.tuning.study import StudyEvent, TrialStarted
from understudy.tuning.study_config import SearchConfig, SlotsConfig, StudyConfig
from understudy.tuning.study_file import read_study
from understudy.tuning.tune import tune

ENGINES = ("ray", "spark")


@pytest.fixture(scope="module")
def ray() -> Iterator[RaySession]:
    """Ray with two CPUs; studies use the connection of their process."""
    pytest.importorskip("ray")
    with contextlib.closing(RaySession(num_cpus=2)) as session:
        yield session


@pytest.fixture(scope="module")
def session(spark: Spark) -> Iterator[Any]:
    """A user's SparkSession, whose Spark has two cores and tries each task twice."""
    from pyspark.sql import SparkSession

    session = SparkSession(spark.context)
    yield session
    assert session.sparkContext.parallelize([1, 2]).sum() == 3  # no study has stopped it


both = pytest.mark.usefixtures("ray", "session")
each = pytest.mark.parametrize("engine", ENGINES)


def on(engine: str, config: StudyConfig, *, slots: int = 2) -> StudyConfig:
    place = replace(config.slots, engine=engine, slots=slots)
    return replace(config, slots=place)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The table of the cheap study on one local slot."""
    folder = tmp_path_factory.mktemp("quiet")
    return timeless(tune(cheap(folder), out=folder).trials)


def cheap(folder: Path) -> StudyConfig:
    return study(
        folder,
        Quadratic,
        config={"reports": 3, "wait_s": 0.1},
        max_trials=12,
        search=SearchConfig(method="sobol", lag=4),
        stopping=ASHA,
        test_seeds=2,
    )


@both
@each
def test_the_table_is_the_same_on_every_engine_also_if_fewer_slots_fit_than_requested(
    tmp_path: Path, engine: str, quiet: list[dict[str, Any]]
):
    events: list[StudyEvent] = []
    place = tmp_path / engine
    result = tune(on(engine, cheap(place), slots=4), out=place, on_event=events.append)
    assert timeless(result.trials) == quiet
    assert result.test is not None
    used = {event.slot for event in events if isinstance(event, TrialStarted)}
    assert len(used) == 2
    wait_for(lambda: not processes_in(str(place)))


@both
def test_trials_of_dqn_end_with_the_same_numbers_on_every_engine(tmp_path: Path):
    (tmp_path / "study.toml").write_text(DQN)
    tables = {}
    for engine in ("local", *ENGINES):
        config = read_study(tmp_path / "study.toml", engine=engine)
        tables[engine] = numbers_of(tune(config, out=tmp_path / engine).trials)
    assert tables["ray"] == tables["local"]
    assert tables["spark"] == tables["local"]


DQN = """
[study]
game = "CartPole-v1"
algorithm = "dqn"
max_trials = 2
[settings]
steps = 200
min_inserts = 100
eval_episodes = 2
test_episodes = 3
[space]
learning_rate = { min = 1e-4, max = 1e-2 }
[search]
test_seeds = 0
"""


def numbers_of(rows: Any) -> list[dict[str, Any]]:
    """The table without what is measured in seconds."""
    return [
        {
            **row,
            "metrics": {
                name: value for name, value in row["metrics"].items() if not name.endswith("_s")
            },
        }
        for row in timeless(rows)
    ]


@both
@each
def test_a_killed_actor_or_task_loses_and_doubles_no_trial(
    tmp_path: Path, engine: str, quiet: list[dict[str, Any]]
):
    kills = {2, 7}

    def kill(event: StudyEvent) -> None:
        if isinstance(event, TrialStarted) and event.trial.trial_no in kills:
            kills.discard(event.trial.trial_no)
            for host in hosts_of(tmp_path):
                os.kill(host, signal.SIGKILL)

    config = replace(cheap(tmp_path), search=SearchConfig(method="sobol", lag=4, test_seeds=0))
    result = tune(on(engine, config), out=tmp_path, on_event=kill)
    assert not kills
    assert timeless(result.trials) == quiet
    state = read_journal(tmp_path / NAME).state
    assert sum(record.losses for record in state.records) >= 2
    lines = (tmp_path / NAME).read_text().splitlines()
    assert sum('"finished"' in line for line in lines) == config.max_trials
    wait_for(lambda: not processes_in(str(tmp_path)))


def hosts_of(folder: Path) -> set[int]:
    """The processes, of Ray actors or Spark tasks, beside which slots run."""
    found = set()
    for pid in processes_in(f"{folder}/slots"):
        with contextlib.suppress(OSError):
            host = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found |= {host} - {1, os.getpid()}
    return found


@pytest.mark.usefixtures("session")
def test_a_killed_study_is_resumed_on_other_engines(
    tmp_path: Path, ray: RaySession, quiet: list[dict[str, Any]]
):
    mark = uuid.uuid4().hex
    script = [sys.executable, "-c", _STUDY, str(tmp_path)]
    environment = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    address = ray.ray.get_runtime_context().gcs_address
    for count, place in ((3, ("ray", address)), (7, ("spark", "local[2]"))):
        with (tmp_path.parent / f"{tmp_path.name}-{place[0]}.log").open("wb") as log:
            command = subprocess.Popen([*script, *place], env=environment, stdout=log, stderr=log)
        try:
            wait_for(functools.partial(has_finished, tmp_path, count))
        finally:
            command.kill()
            command.wait()
        assert n_finished(tmp_path) < 12
        wait_for(lambda: not processes_in(f"{tmp_path}/slots"))
    result = tune(out=tmp_path, resume=True, settings={"engine": "local"})
    assert timeless(result.trials) == quiet
    assert result.test is not None
    assert not left_of(mark)


_STUDY = """
import sys
from pathlib import Path
from tests.integration.test_tune_engines import cheap
from understudy.tuning.tune import tune

folder, engine, address = sys.argv[1:]
settings = {"engine": engine, "address": address}
tune(cheap(Path(folder)), out=folder, resume=True, settings=settings)
"""


def has_finished(folder: Path, count: int) -> bool:
    return n_finished(folder) >= count


def n_finished(folder: Path) -> int:
    try:
        return (folder / NAME).read_text().count('"finished"')
    except FileNotFoundError:
        return 0


@pytest.mark.usefixtures("ray")
def test_a_slot_that_fits_on_no_node_is_refused_with_what_the_cluster_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slots_module, "PLACE_S", 2.0)
    config = replace(cheap(tmp_path), slots=SlotsConfig(engine="ray", rollout_workers=2))
    needs = r"needs 3 CPUs on one node.*2 of its 2 CPUs are free.*largest of its 1 node has 2"
    with pytest.raises(ConfigError, match=needs):
        tune(config, out=tmp_path / "S")
    assert not (tmp_path / "S").exists()


@pytest.mark.usefixtures("session")
def test_spark_refuses_rollout_workers_another_master_and_an_address_without_an_engine(
    tmp_path: Path,
):
    for settings, why in (
        ({"engine": "spark", "rollout_workers": 2}, "rollout_workers is 2, but a Spark task"),
        ({"engine": "spark", "address": "spark://h:7077"}, r"has a SparkSession .* local\[2,2\]"),
        ({"address": "spark://h:7077"}, "the engine local has none"),
    ):
        with pytest.raises(ConfigError, match=why):
            tune(cheap(tmp_path), out=tmp_path / "S", settings=settings)


@pytest.mark.usefixtures("with_spark")
def test_a_class_of_the_original_counts_an_rdd_with_a_real_spark_context(tmp_path: Path):
    tables = {}
    (tmp_path / "count.json").write_text("".join(f'{{"x": {20 + 2 * n}}}\n' for n in range(20)))
    for name, kind, rdd in (
        ("rows", "CountModel", "false"),
        ("rdd", "tests.tuning.classes:RddCount", "true"),
    ):
        (tmp_path / f"{name}.toml").write_text(COUNT.format(kind=kind, rdd=rdd))
        tables[name] = timeless(tune(tmp_path / f"{name}.toml", out=tmp_path / name).trials)
    assert tables["rdd"] == tables["rows"]
    assert [row["metrics"]["reward"] == 0 for row in tables["rdd"]] == [False, True, False, False]
    wait_for(lambda: not processes_in(str(tmp_path)))


COUNT = """
[study]
class = "{kind}"
environment = "count.json"
criteria = "min"
max_trials = 4
rdd = {rdd}
[space]
increment = [1, 2, 4, 6]
[search]
method = "grid"
test_seeds = 0
"""


@pytest.mark.usefixtures("ray")
def test_ctrl_c_ends_the_actors_of_a_study(tmp_path: Path):
    def interrupt(event: StudyEvent) -> None:
        if isinstance(event, TrialStarted) and event.trial.trial_no == 1:
            raise KeyboardInterrupt

    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tune(on("ray", cheap(tmp_path)), out=tmp_path, on_event=interrupt)
    wait_for(lambda: not processes_in(str(tmp_path)))
    assert time.monotonic() - started_s < 60
