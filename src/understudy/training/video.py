"""Videos: episodes of a policy as animated GIFs, from an env that renders into arrays."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import SyncVectorEnv

from understudy.act.vector_envs import MASK
from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.log import make_folder, write_file
from understudy.core.tensors import Array
from understudy.nn.policy import Policy
from understudy.training.env_info import GameChoice

MAX_FPS = 25
MAX_SIDE = 400
"""Pixels; larger frames are scaled down."""
MAX_FRAMES = 1_500
"""Frames kept of one episode: a minute at the highest rate."""

Env = gymnasium.Env[Any, Any]


def check_video(choice: GameChoice, *, asked: str = "video") -> None:
    """ConfigError, or MissingExtra, when this game cannot be filmed; asked before a run, not after
    it.

    `asked` is what to leave out then: the flag, or the parameter, that asked for films.
    """
    with rendering(choice, asked=asked) as env:
        env.reset(seed=0)
        frame_of(env, choice, asked=asked)
        _small(np.zeros((2, 2, 3), np.uint8))


def film(
    choice: GameChoice, policy: Policy, folder: Path, *, seeds: Sequence[int], asked: str = "video"
) -> list[Path]:
    """One GIF for each seed in the folder, each there as a whole or not at all."""
    make_folder(folder.absolute())
    paths = []
    with rendering(choice, asked=asked) as env:
        fps = float(env.metadata.get("render_fps") or 30.0)
        every = max(1, round(fps / MAX_FPS))  # one frame of so many is kept
        shown_ms = round(1000 / (fps / every))
        for number, seed in enumerate(seeds, start=1):
            first, *others = _episode(env, choice, policy, seed=seed, every=every)
            gif = io.BytesIO()
            first.save(
                gif, format="GIF", save_all=True, append_images=others, duration=shown_ms, loop=0
            )
            paths.append(folder / f"episode-{number}.gif")
            write_file(paths[-1], gif.getvalue(), mode=0o644)
    return paths


@contextlib.contextmanager
def rendering(choice: GameChoice, *, asked: str = "video") -> Iterator[Env]:
    """An env of this game that renders into arrays; ConfigError or MissingExtra where there is
    none."""
    if choice.is_named:
        choice = replace(choice, env_kwargs={**choice.env_kwargs, "render_mode": "rgb_array"})
    with contextlib.closing(choice.make(1)) as envs:
        mode = envs.envs[0].render_mode if isinstance(envs, SyncVectorEnv) else None
        if not isinstance(envs, SyncVectorEnv) or mode != "rgb_array":
            raise ConfigError(
                f"{choice.name} does not render into arrays (its render_mode is {mode!r}); make it "
                "with "
                f"render_mode='rgb_array', or leave out {asked}"
            )
        try:
            yield envs.envs[0]
        except (DependencyNotInstalled, ImportError) as error:
            raise MissingExtra(
                f"{choice.name} cannot be filmed: {error}; {_install(error)}, or leave out {asked}"
            ) from error


def _install(error: Exception) -> str:
    """How to get what is missing; Gymnasium says the command itself."""
    if "pip install" in str(error):
        return "do that"
    name = (getattr(error, "name", None) or "").partition(".")[0]
    package = {"PIL": "pillow", "cv2": "opencv-python"}.get(name, name)
    return f"run `pip install {package}`" if package else "install that"


def frame_of(env: Env, choice: GameChoice, *, asked: str = "video") -> Array:
    """What an env shows now, as uint8[height, width, 3]."""
    frame = env.render()
    if (
        not isinstance(frame, np.ndarray)
        or frame.dtype != np.uint8
        or frame.ndim != 3
        or frame.shape[2] != 3
    ):
        raise ConfigError(
            f"{choice.name} cannot be filmed: render() gave "
            f"{getattr(frame, 'shape', type(frame).__name__)}, wanted is "
            f"uint8[height, width, 3]; leave out {asked}"
        )
    return frame


def _episode(
    env: Env, choice: GameChoice, policy: Policy, *, seed: int, every: int
) -> Iterator[Any]:
    player = policy.player()
    obs, info = env.reset(seed=seed)
    is_over = False
    for step in range(MAX_FRAMES * every):
        if step % every == 0 or is_over:
            yield _small(frame_of(env, choice))
        if is_over:
            return
        obs, _, terminated, truncated, info = env.step(player.act(obs, legal=info.get(MASK)))
        is_over = bool(terminated or truncated)


def _small(frame: Array) -> Any:
    from PIL import Image  # comes with matplotlib

    image = Image.fromarray(frame)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    # A palette at once: an episode of full frames would fill the memory.
    return image.quantize(colors=128)
