"""The games of the benchmarks: a CartPole-like one with identifiable rows, and 84x84 images."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from understudy.core.names import new_session
from understudy.core.tensors import DTYPES, Array
from understudy.experience.builder import ChunkBuilder, encode_block
from understudy.experience.chunk import By, EpisodeNote, decode_chunk
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box

PLAYER = b"bench-player-01."
EPISODE_STEPS = 190
SESSIONS = 16

CART = game_spec("bench-cart", obs=4, actions=2)
"""Four floats: session, step within it, and two random values."""

SCREEN = game_spec("bench-screen", obs=Box((84, 84), DTYPES["U8"]), actions=6)
"""One unstacked Atari frame per step."""


@dataclass(frozen=True, slots=True)
class OneGame:
    """Specs of a single game, in memory."""

    only: GameSpec

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return self.only if (game, schema) == (self.only.game, self.only.schema) else None

    def has_game(self, game: str) -> bool:
        return game == self.only.game


def cart_obs(n: int, *, session: int = 0, seed: int = 0) -> Array:
    """float32[n, 4] whose second number counts the observations of the session."""
    obs = np.random.default_rng(seed).normal(0, 0.5, (n, 4)).astype(np.float32)
    obs[:, 0] = session
    obs[:, 1] = np.arange(n)
    return obs


def screens(n: int, *, seed: int = 0) -> Array:
    """uint8[n, 84, 84] like an Atari game: flat areas, a score, a few moving boxes."""
    rng = np.random.default_rng(seed)
    background = np.zeros((84, 84), np.uint8)
    background[:10] = 0
    background[10:14] = 142
    background[-8:] = 87
    for row in range(5):
        background[20 + 3 * row : 22 + 3 * row] = 60 + 25 * row
    frames = np.repeat(background[None], n, axis=0)
    bricks = rng.random((5, 14)) < 0.7
    for at in range(n):
        if at % 40 == 0:
            bricks &= rng.random((5, 14)) < 0.97
        for row, column in np.argwhere(~bricks):
            frames[at, 20 + 3 * row : 22 + 3 * row, 6 * column : 6 * column + 6] = 0
        x = int(40 + 38 * np.sin(at / 17))
        y = int(50 + 24 * np.sin(at / 11))
        frames[at, y : y + 2, x : x + 2] = 236
        paddle = int(36 + 30 * np.sin(at / 23))
        frames[at, 74:76, paddle : paddle + 12] = 200
        frames[at, 2:7, 30:54:3] = (at // 60) % 9 * 28
    return frames


def noise(n: int, *, seed: int = 0) -> Array:
    """Incompressible uint8[n, 84, 84]: the worst case."""
    return np.random.default_rng(seed).integers(0, 256, (n, 84, 84), np.uint8)


def record(builder: ChunkBuilder, observations: Array, *, by: int = 3) -> Iterator[None]:
    """Record the observations, 190 steps per episode; yields when a block is full.

    The caller takes the block from the builder before it continues.
    """
    builder.begin(EpisodeNote(row=0), consent="granted")
    for at, obs in enumerate(observations):
        if at and at % EPISODE_STEPS == 0:
            if builder.finish(obs, terminated=True):
                yield
            builder.begin(EpisodeNote(row=0), consent="granted")
            continue
        is_full = builder.decide(obs, at & 1, by=by, t_ms=at * 16)
        builder.add_reward(float(at & 7))
        if is_full:
            yield


def client_frames(
    spec: GameSpec, observations: Array, *, max_steps: int, by: int = 3
) -> Iterator[Frame]:
    """The frames of one session, as its client encodes them; the last one may be shorter."""
    builder = ChunkBuilder(
        spec, session=new_session(time.time()), max_steps=max_steps, client="bench"
    )
    chunk_no = 0
    first_step = 0

    def blocks() -> Iterator[None]:
        yield from record(builder, observations, by=by)
        builder.cut()
        yield

    for _ in blocks():
        if (block := builder.take()) is not None:
            for encoded in encode_block(block, chunk_no=chunk_no, first_step=first_step):
                assert encoded.frame is not None
                yield encoded.frame
                chunk_no += 1
                first_step += encoded.n_steps


def session_frames(spec: GameSpec, observations: Array, *, max_steps: int = 512) -> list[Frame]:
    """The frames of one session, with player and time as the intake sets them."""
    frames = client_frames(spec, observations, max_steps=max_steps)
    return [frame.stamped(PLAYER, int(time.time())) for frame in frames]


def person_frames(count: int, *, steps: int, seed: int) -> list[Frame]:
    """The first frames of a person's cart game, encoded by a client, with this many steps each."""
    obs = (
        np.random.default_rng(seed)
        .normal(0, 0.5, (_n_observations(count, steps), 4))
        .astype(np.float32)
    )
    return list(islice(client_frames(CART, obs, max_steps=steps, by=By.PERSON), count))


def cart_frames(n_chunks: int, *, steps: int = 512, sessions: int = SESSIONS) -> list[Frame]:
    """Chunks of many sessions, in the order in which concurrent players would send them."""
    each = -(-n_chunks // sessions)
    n = _n_observations(each, steps)
    played = [
        session_frames(CART, cart_obs(n, session=at, seed=at), max_steps=steps)
        for at in range(sessions)
    ]
    return [
        frame for turn in zip(*(frames[:each] for frames in played), strict=True) for frame in turn
    ][:n_chunks]


def _n_observations(chunks: int, steps: int) -> int:
    """Observations needed for this many full chunks, including those of final rows."""
    return (chunks * steps * (EPISODE_STEPS + 1)) // EPISODE_STEPS + 2 * EPISODE_STEPS


def n_steps(frames: Sequence[Frame]) -> int:
    """Steps in these frames, by decoding them."""
    return sum(decode_chunk(frame.body).meta.n_steps for frame in frames)
