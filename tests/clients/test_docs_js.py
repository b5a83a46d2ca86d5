"""The guide of the JavaScript client: its examples run unchanged, and its types check."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.nodes import CLIENT, needs_node
from tests.serve.gateways import Running, running
from understudy.experience.game import game_spec
from understudy.games import rally

PAGE = (CLIENT.parents[1] / "docs" / "javascript.md").read_text()
EXAMPLES: list[str] = re.findall(r"^```js\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
RALLY = game_spec("rally", obs=list(rally.OBS_NAMES), actions=list(rally.ACTION_NAMES))


def run(gateway: Running, folder: Path, example: str) -> str:
    """The output of an example, run beside the client with the variables of `understudy up`."""
    for file in CLIENT.glob("*.js*"):
        shutil.copy(file, folder)
    (folder / "example.mjs").write_text(example)
    key = gateway.key("play", registers=True)
    environment = {**os.environ, "UNDERSTUDY_URL": gateway.url, "UNDERSTUDY_KEY": key}
    done = subprocess.run(
        ["node", "example.mjs"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@needs_node
def test_the_examples_of_the_guide_record_and_play(tmp_path: Path):
    with running(tmp_path / "platform") as gateway:
        record, play = EXAMPLES
        assert run(gateway, tmp_path, record) == "60 steps are durable\n"
        gateway.register(RALLY)
        gateway.release(RALLY, "categorical")
        assert "\nrally/1 [" in "\n" + run(gateway, tmp_path, play)
        assert len({frame.session for frame in gateway.streamed()}) == 3


def test_every_call_named_in_the_guide_exists():
    source = (CLIENT / "understudy.js").read_text()
    for name in set(re.findall(r"`(?:game|ep)\.(\w+)", PAGE)):
        assert re.search(rf"^  (?:async |get )?{name}\(|this\.{name} =", source, re.MULTILINE), name


def test_the_play_page_uses_nothing_private_of_the_client():
    for file in (CLIENT.parents[1] / "src" / "understudy" / "serve" / "static").glob("*.js"):
        assert re.findall(r"\bgame\??\._\w+", file.read_text()) == [], file.name


def typescript() -> str | None:
    """The compiler's path, installed in clients/js or globally; None without one."""
    own = CLIENT / "node_modules" / ".bin" / "tsc"
    return str(own) if own.exists() else shutil.which("tsc")


@pytest.mark.skipif(
    typescript() is None,
    reason="typescript is missing: `npm install` in clients/js, or `npm install --global "
    "typescript`, installs tsc",
)
def test_the_types_of_the_client_check():
    done = subprocess.run(
        [typescript() or "tsc", "--project", str(CLIENT / "tsconfig.json")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
