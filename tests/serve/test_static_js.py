"""The play page's games, run by node: CartPole's equations, and a match of rally without a page."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.nodes import CLIENT
from tests.clients.test_docs_js import typescript
from tests.serve.page_modules import page_modules, run
from understudy.games import cartpole, rally


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_modules(tmp_path_factory.mktemp("static"))


@pytest.mark.skipif(
    typescript() is None,
    reason="typescript is missing: `npm install` in clients/js, or `npm install --global "
    "typescript`, brings tsc",
)
def test_every_type_of_the_page_holds(tmp_path: Path):
    folder = page_modules(tmp_path, as_served=False)
    shutil.copy(CLIENT / "tsconfig.json", folder)
    command = [typescript() or "tsc", "--project", str(folder / "tsconfig.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_cartpole_moves_as_in_python(modules: Path):
    rng = np.random.default_rng(3)
    states = rng.uniform(-0.2, 0.2, (500, 4))
    actions = rng.integers(0, 2, 500)
    (modules / "given.json").write_text(json.dumps([states.tolist(), actions.tolist()]))
    got = run(
        modules,
        """
        import { readFileSync } from "node:fs";
        import { hasFallen, step } from "./cartpole.js";
        const [states, actions] = JSON.parse(readFileSync(new URL("given.json", import.meta.url)));
        const after = states.map((state, at) => step(state, actions[at]));
        console.log(JSON.stringify([after, after.map(hasFallen)]));
    """,
    )
    after, _, fallen = cartpole.step(np, states.T, actions)
    # Sines and cosines may differ in their last bit between machines.
    np.testing.assert_allclose(got[0], after.T, rtol=1e-13, atol=1e-15)
    assert got[1] == fallen.tolist()


MATCH = """
import { Match } from "./match.js";
import { script } from "./opponents.js";
const calls = [], events = [];
const episode = (name) => ({
  acted: (obs, action, how) => calls.push([name, "acted", Array.from(obs), action, how.by]),
  reward: (x) => calls.push([name, "reward", x]),
  end: (obs, how) => calls.push([name, "end", Array.from(obs), how]),
  cancel: () => calls.push([name, "cancel"]),
});
let drawn = 1;
const match = new Match({
  opponent: () => script("strong"),
  random: () => (drawn = (drawn * 16807) % 2147483647) / 2147483647,
  record: (seat, facts) => (calls.push(["note", seat, facts]), episode(seat ? "other" : "person")),
  hear: (event) => events.push(event.kind),
});
for (let at = 0; at < 100000 && !match.isOver; at++) match.frame({ take: () => 0 });
const { points, words, summary } = match;
console.log(JSON.stringify({ calls, events, points, words, summary }));
"""


def test_a_match_ends_at_seven_and_its_serves_are_those_of_the_python_game(modules: Path):
    played = run(modules, MATCH)
    assert max(played["points"]) == 7
    assert played["events"].count("over") == 1
    assert played["events"].count("point") == sum(played["points"]) - 1
    serves: list[list[Any]] = []
    for call in played["calls"]:
        if call[:2] == ["note", 1]:
            serves.append([])
        serves[-1].append(call)
    assert len(serves) == sum(played["points"])
    assert len({serve[0][2]["match"] for serve in serves}) == 1
    for serve in serves:
        notes = {call[1]: call[2] for call in serve if call[0] == "note"}
        assert (notes[0]["opponents"], notes[1]["opponents"]) == (["script"], ["person"])
        assert (notes[0]["by"], notes[1]["by"]) == ("person", "script")
        assert notes[0]["seed"] == notes[1]["seed"]
        check_serve(notes[0]["seed"], [call for call in serve if call[0] != "note"])


def check_serve(seed: int, calls: list[list[Any]]) -> None:
    """Play the same decisions in Python: the same observations, the same opponent, the same end."""
    court = rally.serve(seed)
    got = 0
    ints = rally.Ints
    decided = [call for call in calls if call[1] == "acted"]
    for at, (theirs, mine) in enumerate(zip(decided[::2], decided[1::2], strict=True)):
        assert (mine[0], mine[4], theirs[0], theirs[4]) == ("person", "person", "other", "script")
        assert mine[2] == rally.observation(court, 0).tolist()
        assert theirs[2] == rally.observation(court, 1).tolist()
        drawn = rally.random_bits(seed, at)
        assert theirs[3] == rally.scripted(
            ints, rally.seat_view(court, 1), rally.SKILLS["strong"], drawn
        )
        assert got == 0
        court, got = rally.step(ints, court, mine[3], theirs[3])
    ended = {call[0]: call for call in calls if call[1] == "end"}
    assert got != 0
    assert [call[1:] for call in calls if call[1] == "reward"] == [
        ["reward", got],
        ["reward", -got],
    ]
    assert ended["person"][3] == {"truncated": False, "result": "win" if got > 0 else "loss"}
    assert ended["other"][2] == rally.observation(court, 1).tolist()


def test_withdrawn_consent_cancels_both_seats_and_play_continues(modules: Path):
    script = MATCH.replace(
        "for (let at = 0; at < 100000",
        "for (let at = 0; at < 60; at++) match.frame({ take: () => 0 });\n"
        "match.record = () => null; match.forget();\nfor (let at = 0; at < 100000",
    )
    played = run(modules, script)
    assert [call[:2] for call in played["calls"][-2:]] == [
        ["person", "cancel"],
        ["other", "cancel"],
    ]
    assert max(played["points"]) == 7
