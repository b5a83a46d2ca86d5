"""Every stored transition equals the played one, bit for bit, however chunks are cut."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.client.fakes import MemoryLink, Transition, as_bytes, client, episodes
from tests.faults.profiles import property_of
from understudy.client import RecordingWarning
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import FrameKind
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space


def f32(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def test_a_scripted_game_is_stored_as_it_was_played(tmp_path):
    link = MemoryLink()
    s = [f32(i, -i) for i in range(4)]
    with client(link, tmp_path) as game:
        ep = game.episode(player="anna")
        ep.acted(s[0], 0)
        ep.reward(1.0)
        ep.acted(s[1], 1)
        ep.reward(0.25)
        ep.reward(0.25)
        ep.acted(s[2], 2)
        ep.end(s[3], result="won")
    (frames,) = link.by_session().values()
    expected = [
        (s[0], 0, 1.0, s[1], False),
        (s[1], 1, 0.5, s[2], False),
        (s[2], 2, 0.0, s[3], True),
    ]
    assert episodes(frames) == [
        [
            Transition(
                (obs.tobytes(),),
                (np.int32(action).tobytes(),),
                reward,
                (after.tobytes(),),
                ended,
                False,
            )
            for obs, action, reward, after, ended in expected
        ]
    ]
    assert frames[max(frames)].kind is FrameKind.CLOSE


LEAVES = st.one_of(
    st.builds(
        Box,
        st.lists(st.integers(1, 4), max_size=3).map(tuple),
        st.sampled_from(
            [
                DTYPES[name]
                for name in ("F16", "F32", "F64", "U8", "I8", "I16", "U16", "I32", "I64", "U64")
            ]
        ),
    ),
    st.builds(Box, st.just((24, 24)), st.just(DTYPES["U8"])),
    st.builds(Discrete, st.integers(1, 9), st.integers(-3, 3)),
    st.builds(
        lambda counts: MultiDiscrete(tuple(counts), (len(counts),)),
        st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ),
    st.builds(MultiBinary, st.just((5,))),
)
PARTS = st.one_of(
    LEAVES.map(lambda leaf: {"": leaf}),
    st.dictionaries(
        st.sampled_from(["a", "b.c", "b.d", "0", "x-y"]), LEAVES, min_size=1, max_size=3
    ),
)


@st.composite
def specs(draw: Any) -> GameSpec:
    action: Mapping[str, Space] = draw(PARTS)
    has_action_mask = isinstance(action.get(""), Discrete) and draw(st.booleans())
    return game_spec("any-game", obs=draw(PARTS), actions=action, has_action_mask=has_action_mask)


def sample(space: Space, rng: np.random.Generator) -> np.ndarray:
    match space:
        case Discrete():
            return np.array(rng.integers(space.start, space.start + space.n), space.dtype)
        case MultiDiscrete():
            return rng.integers(0, space.counts).astype(space.dtype)
        case MultiBinary():
            return rng.integers(0, 2, space.shape).astype(space.dtype)
    if space.dtype.kind == "f":
        return np.asarray(rng.normal(size=space.shape)).astype(space.dtype)
    info = np.iinfo(space.dtype)
    return np.asarray(
        rng.integers(info.min, info.max, space.shape, dtype=space.dtype, endpoint=True)
    )


def tree(values: Mapping[str, Any]) -> Any:
    """Return values by dotted path as a game passes them: nested mappings, or the value itself."""
    if set(values) == {""}:
        return values[""]
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *above, last = path.split(".")
        place = nested
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return nested


PLAN = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.sampled_from(
            ["terminated", "truncated", "both_unseen", "truncated_unseen", "cut", "result"]
        ),
        st.sampled_from(["granted", "denied", "unknown"]),
    ),
    min_size=1,
    max_size=6,
)


@property_of(
    short=30,
    full=120,
    spec=specs(),
    plans=st.lists(PLAN, min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    cuts=st.sampled_from([0.0, 0.1, 0.5]),
    small=st.booleans(),
)
def test_every_stored_transition_is_the_true_one(spec, plans, seed, cuts, small):
    """Random spaces, lengths and cuts; interleaved sessions; ends with or without an obs."""
    rng = np.random.default_rng(seed)
    link = MemoryLink()
    with TemporaryDirectory() as folder:
        game = client(link, Path(folder), game=spec)
        if small:
            game._sessions.layout.n_rows = 4
        truth = play(game, spec, plans, rng, cuts)
        game.close()
    stored = {
        str(player): episodes(link.by_session()[session], padded_final=False)
        for session, player in link.players.items()
    }
    for player, expected in truth.items():
        found = stored.get(player, [])
        assert len(found) == len(expected)
        for mine, true in zip(found, expected, strict=True):
            assert mine == [
                one
                if one.next_obs is not None
                else Transition(
                    one.obs,
                    one.action,
                    one.reward,
                    mine[at].next_obs,
                    one.terminated,
                    one.truncated,
                )
                for at, one in enumerate(true)
            ]


def play(
    game: Any, spec: GameSpec, plans: list[Any], rng: np.random.Generator, cuts: float
) -> dict[str, list[Any]]:
    """Play one script per player, interleaved at random; returns the true transitions by player."""
    truth: dict[str, list[Any]] = {f"player {n}": [] for n in range(len(plans))}
    scripts = [
        script(game, spec, f"player {n}", plan, rng, truth[f"player {n}"])
        for n, plan in enumerate(plans)
    ]
    while scripts:
        one = scripts[int(rng.integers(len(scripts)))]
        if next(one, "over") == "over":
            scripts.remove(one)
        if rng.random() < cuts:
            game._config.clock.advance(2.0)
        # Without a thread, the test must empty the handoff before it drops its oldest block.
        game.pump()
    return truth


def script(
    game: Any,
    spec: GameSpec,
    player: str,
    plan: list[Any],
    rng: np.random.Generator,
    truth: list[Any],
) -> Any:
    for n_steps, ending, consent in plan:
        ep = game.episode(player=player, consent=consent)
        obs = {path: sample(space, rng) for path, space in spec.obs.items()}
        steps: list[Transition] = []
        for at in range(n_steps):
            action = {path: sample(space, rng) for path, space in spec.action.items()}
            ep.acted(tree(obs), tree(action), action_mask=mask(spec, action, rng))
            reward = float(np.float32(rng.normal()))
            ep.reward(reward)
            yield
            last = at == n_steps - 1
            after = {path: sample(space, rng) for path, space in spec.obs.items()}
            terminated = last and ending in ("terminated", "both_unseen", "result")
            steps.append(
                Transition(
                    as_bytes(obs),
                    as_bytes(action),
                    reward,
                    None if last and ending == "both_unseen" else as_bytes(after),
                    terminated,
                    last and ending == "truncated",
                )
            )
            obs = after
        finish(ep, ending, tree(obs))
        if ending in ("truncated_unseen", "cut"):
            steps.pop()
        if steps:
            truth.append(steps)
        yield


def mask(spec: GameSpec, action: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray | None:
    discrete = spec.discrete
    if not spec.has_action_mask or discrete is None:
        return None
    action_mask = rng.random(discrete.n) < 0.5
    action_mask[int(action[""]) - discrete.start] = True
    return action_mask


def finish(ep: Any, ending: str, obs: Any) -> None:
    match ending:
        case "terminated":
            ep.end(obs)
        case "result":
            ep.end(obs, result=0.5)
        case "both_unseen":
            ep.end()
        case "truncated":
            ep.end(obs, truncated=True)
        case "truncated_unseen":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecordingWarning)  # it warns once for each game
                ep.end(truncated=True)
        case "cut":
            ep.cut()


@pytest.mark.parametrize("ending", ["truncated_unseen", "cut"])
def test_a_cut_episode_is_marked_and_keeps_its_closed_steps(tmp_path, ending):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        ep = game.episode(player="anna", match="m-1")
        for i in range(3):
            ep.acted(f32(i, i), 1)
        finish(ep, ending, None)
    (frames,) = link.by_session().values()
    ((first, second),) = episodes(frames)
    assert (first.next_obs, second.next_obs) == ((f32(1, 1).tobytes(),), (f32(2, 2).tobytes(),))
    assert (second.terminated, second.truncated) == (False, False)
    (note,) = chunk_of(frames[0]).meta.episodes
    assert note.cut
    assert note.match == "m-1"
