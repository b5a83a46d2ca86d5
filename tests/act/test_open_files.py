"""A limit of open files that is too low for a team is named before a process starts."""

import os
import resource
from collections.abc import Iterator

import pytest

from tests.contracts.test_teams import plan
from understudy.act.open_files import check_open_files
from understudy.act.process_team import process_team
from understudy.core.errors import ConfigError


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_team_of_processes_names_the_limit_the_need_and_the_command():
    n_open = len(os.listdir("/dev/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = n_open + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    said = (
        rf"4 actors in processes of their own need {n_open + 16} open files, but the limit of this "
        rf"process is {limit}; raise it in the shell first \(ulimit -n \d+\), or use fewer actors"
    )
    with pytest.raises(ConfigError, match=said):
        process_team(plan(4))
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 60, hard))
    process_team(plan(1)).close()


@pytest.mark.parametrize(
    ("hard", "said"), [(900, "ulimit -n 900"), (100, "administrator .*hard limit is 100")]
)
def test_the_command_respects_the_hard_limit(hard: int, said: str, monkeypatch: pytest.MonkeyPatch):
    # Only an administrator could raise a real hard limit again after the test.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    with pytest.raises(ConfigError, match=said):
        check_open_files(200, what="200 actors")
