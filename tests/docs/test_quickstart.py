"""The quickstart, run as it stands: a game records its player, and a clone of them plays in it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
COMMANDS = [
    text.strip() for text in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
]
SETUP = "make setup && "
TEN_MINUTES_S = 600.0


def test_three_commands_are_enough() -> None:
    assert len(COMMANDS) == 3
    assert all("\n" not in command for command in COMMANDS)
    assert COMMANDS[0].startswith(SETUP)


@pytest.mark.timeout(TEN_MINUTES_S + 60)
def test_a_clone_of_the_player_plays_in_the_game_within_ten_minutes(tmp_path: Path) -> None:
    """May take more than 20 seconds: a platform starts, a person plays 400 rounds and a learner
    makes a bot of them."""
    # The folder of somebody who has cloned the project and run `make setup`.
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("UNDERSTUDY_")
    }
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    start, play, watch = COMMANDS
    deadline_s = time.monotonic() + TEN_MINUTES_S
    with platform(start.removeprefix(SETUP), tmp_path, environment) as exports:
        said = []
        for command in (play, watch):
            remaining_s = deadline_s - time.monotonic()
            ran = subprocess.run(
                command.split(),
                cwd=tmp_path,
                env=environment | exports,
                capture_output=True,
                text=True,
                timeout=remaining_s,
            )
            assert ran.returncode == 0, ran.stderr
            said.append(ran.stdout.strip())
    assert said[0].startswith("friend won 400 of 400 rounds")
    found = re.fullmatch(r"bot won (\d+) of 100 rounds; bot: guess/1", said[1])
    assert found, said[1]
    # By chance it would be a sixth: a guess outside what is left loses the round.
    assert int(found.group(1)) >= 50


@contextlib.contextmanager
def platform(command: str, folder: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """What it asks to export; stopped as by Ctrl-C, which it must survive without a loss."""
    with (
        (folder / "up.log").open("w") as log,
        subprocess.Popen(
            command.split(),
            cwd=folder,
            env=environment | {"UNDERSTUDY_GATEWAY_PORT": "0"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            exports: dict[str, str] = {}
            for line in process.stdout:
                if line.startswith("export "):
                    name, _, value = line.removeprefix("export ").strip().partition("=")
                    exports[name] = value
                if len(exports) == 2:
                    break
            assert len(exports) == 2, (folder / "up.log").read_text()
            rest = threading.Thread(target=process.stdout.read, daemon=True)
            rest.start()
            yield exports
            process.send_signal(signal.SIGINT)
            assert process.wait(150.0) in (0, 130)
            rest.join(5.0)
        finally:
            process.kill()
