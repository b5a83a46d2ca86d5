"""The examples run unchanged against a real gateway, and their steps are in its stream."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.serve.gateways import Running, running
from understudy.experience.chunk import By, Chunk, RowKind, chunk_of
from understudy.experience.frame import FrameKind
from understudy.experience.game import GameSpec
from understudy.models.manifest import Lineage
from understudy.models.registry import Registry

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = {"guess.py": 30, "cartpole.py": 10, "node_client.mjs": 40}


def run(gateway: Running, folder: Path, *words: str, says: str = "") -> str:
    environment = {
        **os.environ,
        "UNDERSTUDY_URL": gateway.url,
        "UNDERSTUDY_KEY": gateway.key("play", registers=True),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HOME": str(folder),
    }
    done = subprocess.run(
        words, env=environment, input=says, capture_output=True, text=True, timeout=120, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def played(gateway: Running, game: str) -> list[Chunk]:
    chunks = [chunk_of(frame) for frame in gateway.streamed() if frame.kind is FrameKind.DATA]
    return [chunk for chunk in chunks if chunk.meta.game == game]


def deciders(chunks: list[Chunk]) -> set[int]:
    return {
        int(code)
        for chunk in chunks
        for code in chunk.columns["by"][chunk.columns["row"] == RowKind.STEP]
    }


def release(registry: Registry, spec: GameSpec) -> None:
    epoch = registry.takeover(spec.game, owner="test")
    manifest = registry.release(
        random_policy(spec, "categorical"), Lineage(algorithm="bc"), epoch=epoch
    )
    registry.set_alias(spec.game, "champion", manifest.model_no, why="test")


@pytest.mark.parametrize("name", MOST_LINES)
def test_examples_are_as_short_as_promised(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    most = MOST_LINES[name]
    assert len(lines) <= most or (
        name == "cartpole.py" and len([line for line in lines if line.strip()]) <= most
    )


def test_a_custom_game_is_recorded_and_then_played_by_its_bot(tmp_path: Path) -> None:
    guess = (sys.executable, str(EXAMPLES / "guess.py"))
    with running(tmp_path / "D") as gateway:
        assert run(gateway, tmp_path, *guess, "script", "30").startswith(
            "script won 30 of 30 rounds; bot: none"
        )
        run(
            gateway,
            tmp_path,
            *guess,
            "person",
            "1",
            says="\n".join(["7", "0"] + ["99"] * 20).replace("99", "15"),
        )
        first = played(gateway, "guess")
        assert deciders(first) == {By.SCRIPT, By.PERSON}
        (spec,) = gateway.registry.specs("guess")
        release(gateway.registry, spec)
        assert run(gateway, tmp_path, *guess, "bot", "20").endswith("bot: guess/1")
        by_bot = played(gateway, "guess")[len(first) :]
        assert deciders(by_bot) == {By.BOT}
        assert {note.model for chunk in by_bot for note in chunk.meta.episodes} == {"guess/1"}


def test_a_gymnasium_env_is_recorded_and_played_in_ten_lines(tmp_path: Path) -> None:
    with running(tmp_path / "D") as gateway:
        run(gateway, tmp_path, sys.executable, str(EXAMPLES / "cartpole.py"))
        chunks = played(gateway, "CartPole-v1")
        assert 1900 < sum(chunk.meta.n_steps for chunk in chunks) <= 2000
        assert deciders(chunks) == {By.SCRIPT}


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
def test_a_client_in_plain_javascript_plays_and_sends(tmp_path: Path) -> None:
    node = ("node", str(EXAMPLES / "node_client.mjs"), "15")
    with running(tmp_path / "D") as gateway:
        printed = run(gateway, tmp_path, *node)
        result = re.fullmatch(r"won (\d+) of 15 rounds in (\d+) guesses", printed)
        assert result is not None
        chunks = played(gateway, "guess-js")
        assert len(chunks) == 15
        assert sum(chunk.meta.n_steps for chunk in chunks) == int(result[2])
        won = sum(float(np.sum(chunk.columns["reward"] == 1)) for chunk in chunks)
        assert won == int(result[1])
        assert deciders(chunks) == {By.SCRIPT}
        (spec,) = gateway.registry.specs("guess-js")
        release(gateway.registry, spec)
        run(gateway, tmp_path, *node)
        assert By.BOT in deciders(played(gateway, "guess-js")[15:])
