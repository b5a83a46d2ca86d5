"""Skills agree in Python, in JavaScript and over HTTP: the same noise, probabilities and notes."""

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.clients.nodes import needs_node, run_script
from tests.serve.gateways import Running, running
from understudy.client.connect import ClientConfig, connect
from understudy.core.errors import Refused
from understudy.core.names import new_session
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import Chunk, chunk_of
from understudy.experience.frame import FrameKind
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.skill import DEFAULT_NOISE
from understudy.experience.spaces import Box
from understudy.serve.state import GatewayConfig

pytestmark = needs_node
SPEC = game_spec("doors", obs=2, actions=4)
SLIDE = game_spec("slide", obs=2, actions=Box((2,), DTYPES["F32"], -1.0, 1.0))
OBS = [0.5, -1.0]
PATIENT = GatewayConfig(decide_within_s=10.0)
NOISE = {"easy": 0.7, "even": 0.3}
N = 500
PLAYS: list[dict[str, Any]] = [{"skill": "even"}, {"skill": "easy"}, {"temperature": 4}]
INVALID: list[dict[str, Any]] = [
    {"skill": "medium"},
    {"skill": 1},
    {"temperature": 0},
    {"temperature": 101},
    {"temperature": "hot"},
    {"skill": "easy", "temperature": 2},
]


def prepare(gateway: Running, spec: GameSpec, kind: str) -> None:
    gateway.register(spec)
    gateway.release(spec, kind)
    epoch = gateway.registry.catalogue(spec.game).epoch
    gateway.registry.set_noise(spec.game, 1, NOISE, episodes=20, epoch=epoch)


def in_javascript(gateway: Running, spec: GameSpec, plays: list[dict[str, Any]]) -> Any:
    request = {
        "url": gateway.url,
        "key": gateway.key("play"),
        "spec": json.loads(spec.to_json()),
        "obs": OBS,
        "plays": plays,
        "invalid": INVALID,
        "defaults": list(DEFAULT_NOISE),
    }
    return run_script("skills.mjs", request)


def in_python(gateway: Running, spec: GameSpec, folder: Path, plays: list[dict[str, Any]]) -> None:
    config = ClientConfig(spool=folder / "spool")
    key = gateway.key("play")
    with connect(spec, url=gateway.url, key=key, consent="granted", config=config) as game:
        assert game.wait_for_bot(30)
        for play in plays:
            how = {name: value for name, value in play.items() if name != "count"}
            episode = game.episode("py", **how)
            for _ in range(play["count"]):
                episode.act(OBS)
            episode.end(OBS)
        assert game.flush(60)


def recorded(gateway: Running, client: str) -> dict[tuple[Any, ...], list[Chunk]]:
    """Chunks of one client by the skill, noise and temperature of their only episode."""
    found: dict[tuple[Any, ...], list[Chunk]] = {}
    for frame in gateway.streamed():
        if frame.kind is FrameKind.DATA and (chunk := chunk_of(frame)).meta.client.startswith(
            f"understudy-{client}"
        ):
            for note in chunk.meta.episodes:
                assert (note.model, note.ticket) == (f"{chunk.meta.game}/1", None)
                found.setdefault((note.skill, note.noise, note.temperature), []).append(chunk)
    return found


def chances(chunks: list[Chunk], key: tuple[Any, ...]) -> dict[int, float]:
    """The recorded probability of each action in the episode with this note."""
    by_action: dict[int, float] = {}
    for chunk in chunks:
        notes = chunk.meta.episodes
        ends = [*(note.row for note in notes[1:]), chunk.n_rows]
        for note, end in zip(notes, ends, strict=True):
            if (note.skill, note.noise, note.temperature) == key:
                for row in range(note.row, end):
                    if chunk.columns["row"][row] == 0:
                        action = int(chunk.columns["action"][row])
                        by_action[action] = math.exp(chunk.columns["logp"][row])
    return by_action


def test_python_javascript_and_http_play_the_same_skill(tmp_path: Path):
    with running(tmp_path, PATIENT) as gateway:
        prepare(gateway, SPEC, "categorical")
        plays = [{"count": N, **play} for play in PLAYS]
        told = in_javascript(gateway, SPEC, plays)
        in_python(gateway, SPEC, tmp_path, plays)
        assert told["sent"]
        assert told["before"] == [DEFAULT_NOISE[skill] for skill in DEFAULT_NOISE]
        assert told["noises"] == [0.3, 0.7, None]
        js, py = recorded(gateway, "js"), recorded(gateway, "python")
        assert js.keys() == py.keys() == {("even", 0.3, None), ("easy", 0.7, None), (None, None, 4)}
        policy = random_policy(SPEC, "categorical")
        logits = policy.outputs({"obs": np.array([OBS], np.float32)})["logits"][0].astype(float)
        key = gateway.key("play")
        for play, note in zip(PLAYS, js, strict=True):
            shares = np.exp(logits / (note[2] or 1)) / np.exp(logits / (note[2] or 1)).sum()
            noise = note[1] or 0.0
            wanted = dict(enumerate((1 - noise) * shares + noise / 4))
            assert chances(js[note], note) == pytest.approx(wanted, abs=1e-5)
            assert chances(py[note], note) == pytest.approx(wanted, abs=1e-5)
            asked = {"obs": OBS, "deterministic": False, **play}
            replies = [
                gateway.ask("POST", "/v1/games/doors/act", key, asked).json for _ in range(400)
            ]
            assert {reply.get("noise") for reply in replies} == {note[1]}
            counts = Counter(reply["action"] for reply in replies)
            shares_of = {at: counts[at] / len(replies) for at in wanted}
            assert shares_of == pytest.approx(wanted, abs=0.13)
        # Unrecorded play with a picked bot is noisy too: its best action, or a random one.
        best = policy.act(np.array(OBS, np.float32))
        assert np.mean(np.array(told["free"]) == best) == pytest.approx(0.3 + 0.7 / 4, abs=0.13)


def test_a_picked_bot_takes_its_skill_into_its_episode(tmp_path: Path):
    with running(tmp_path, PATIENT) as gateway:
        prepare(gateway, SPEC, "argmax")
        plays: list[dict[str, Any]] = [
            {"count": 5, "skill": "easy", "isPicked": True},
            {"count": 5, "skill": None, "temperature": None, "isPicked": True},
        ]
        assert in_javascript(gateway, SPEC, plays)
        assert recorded(gateway, "js").keys() == {("easy", 0.7, None), (None, None, None)}


def test_box_actions_at_a_skill_stay_within_bounds_and_have_no_density(tmp_path: Path):
    with running(tmp_path, PATIENT) as gateway:
        prepare(gateway, SLIDE, "gaussian_clipped")
        plays = [{"count": 300, "skill": "easy"}]
        in_javascript(gateway, SLIDE, plays)
        in_python(gateway, SLIDE, tmp_path, plays)
        widths = []
        for client in ("js", "python"):
            ((chunk, *_),) = recorded(gateway, client).values()
            actions = chunk.columns["action"][chunk.columns["row"] == 0]
            assert np.abs(actions).max() <= 1.0
            assert "logp" not in chunk.columns
            assert "raw_action" not in chunk.columns
            widths.append(actions.std(0))
        assert widths[0] == pytest.approx(widths[1], rel=0.2)
        reply = gateway.ask(
            "POST", "/v1/games/slide/act", gateway.key("play"), {"obs": OBS, "skill": "even"}
        ).json
        assert reply["noise"] == 0.3
        assert np.abs(reply["action"]).max() <= 1.0


def test_bad_values_are_refused_alike(tmp_path: Path):
    with running(tmp_path, PATIENT) as gateway:
        prepare(gateway, SPEC, "argmax")
        in_js = in_javascript(gateway, SPEC, [])["codes"]
        config = ClientConfig(spool=tmp_path / "spool")
        key = gateway.key("play")
        with connect(SPEC, url=gateway.url, key=key, config=config) as game:
            for invalid, codes in zip(INVALID, in_js, strict=True):
                with pytest.raises(Refused) as caught:
                    game.episode(**invalid)
                assert codes == [caught.value.reason] * 2
                reply = gateway.ask("POST", "/v1/games/doors/act", key, {"obs": OBS, **invalid})
                is_text = isinstance(invalid.get("skill", ""), str) and invalid != INVALID[4]
                assert (reply.status, reply.code) == (
                    400,
                    caught.value.reason if is_text else "bad_body",
                )


def test_an_episode_played_over_http_notes_its_skill(tmp_path: Path):
    with running(tmp_path, PATIENT) as gateway:
        prepare(gateway, SPEC, "argmax")
        key = gateway.key("play")
        acted = gateway.ask("POST", "/v1/games/doors/act", key, {"obs": OBS, "skill": "even"}).json
        columns = {
            "obs": [OBS, OBS],
            "action": [acted["action"], 0],
            "reward": [1.0, 0.0],
            "row": [0, 1],
            "is_first": [True, False],
            "terminated": [True, False],
            "truncated": [False, False],
            "by": [2, 0],
        }
        note = {"row": 0, "model": "doors/1", "skill": "even", "noise": acted["noise"]}
        session = str(new_session(time.time(), bytes(10)))
        chunk = {"player": "bot", "session": session, "chunk_no": 0, "columns": columns}
        for wrong in ({"noise": 2}, {"skill": "hard"}, {"temperature": 0}):
            sent = {**chunk, "episodes": [note | wrong]}
            assert gateway.ask("POST", "/v1/games/doors/columns", key, sent).status == 400
        reply = gateway.ask("POST", "/v1/games/doors/columns", key, {**chunk, "episodes": [note]})
        assert reply.json["acks"][0]["accepted"]
        (frame,) = gateway.streamed()
        (stored,) = chunk_of(frame).meta.episodes
        assert (stored.model, stored.skill, stored.noise) == ("doors/1", "even", 0.3)
