"""Videos: episodes of a policy as animated GIFs, from an env with render_mode rgb_array."""

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
"""The most frames in one episode's video: a minute at the highest rate."""

Env = gymnasium.Env[Any, Any]


def check_video(choice: GameChoice, *, option: str = "video") -> None:
    """ConfigError or MissingExtra if this game cannot be filmed; called before a run starts.

    `option` names the flag or parameter that requested videos, for the message.
    """
    with open_rendering_env(choice, option=option) as env:
        env.reset(seed=0)
        frame_of(env, choice, option=option)
        _small(np.zeros((2, 2, 3), np.uint8))


def film(
    choice: GameChoice, policy: Policy, folder: Path, *, seeds: Sequence[int], option: str = "video"
) -> list[Path]:
    """Write one GIF per seed into the folder; a file is complete or does not exist."""
    make_folder(folder.absolute())
    paths = []
    with open_rendering_env(choice, option=option) as env:
        fps = float(env.metadata.get("render_fps") or 30.0)
        every = max(1, round(fps / MAX_FPS))  # keeps one frame in `every`
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
def open_rendering_env(choice: GameChoice, *, option: str = "video") -> Iterator[Env]:
    """An env that renders arrays; ConfigError or MissingExtra if the game cannot do so."""
    if choice.is_named:
        choice = replace(choice, env_kwargs={**choice.env_kwargs, "render_mode": "rgb_array"})
    with contextlib.closing(choice.make(1)) as envs:
        mode = envs.envs[0].render_mode if isinstance(envs, SyncVectorEnv) else None
        if not isinstance(envs, SyncVectorEnv) or mode != "rgb_array":
            raise ConfigError(
                f"{choice.name} does not render arrays (its render_mode is {mode!r}); create it "
                f"with render_mode='rgb_array', or omit {option}"
            )
        try:
            yield envs.envs[0]
        except (DependencyNotInstalled, ImportError) as error:
            raise MissingExtra(
                f"{choice.name} cannot be filmed: {error}; {_install(error)}, or omit {option}"
            ) from error


def _install(error: Exception) -> str:
    """How to install the missing package; Gymnasium's own errors include the command."""
    if "pip install" in str(error):
        return "run that command"
    name = (getattr(error, "name", None) or "").partition(".")[0]
    package = {"PIL": "pillow", "cv2": "opencv-python"}.get(name, name)
    return f"run `pip install {package}`" if package else "install the package"


def frame_of(env: Env, choice: GameChoice, *, option: str = "video") -> Array:
    """The env's current frame, uint8[height, width, 3]."""
    frame = env.render()
    if (
        not isinstance(frame, np.ndarray)
        or frame.dtype != np.uint8
        or frame.ndim != 3
        or frame.shape[2] != 3
    ):
        raise ConfigError(
            f"{choice.name} cannot be filmed: render() returned "
            f"{getattr(frame, 'shape', type(frame).__name__)}, expected "
            f"uint8[height, width, 3]; omit {option}"
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
        obs, _, terminated, truncated, info = env.step(player.act(obs, action_mask=info.get(MASK)))
        is_over = bool(terminated or truncated)


def _small(frame: Array) -> Any:
    from PIL import Image  # installed with matplotlib

    image = Image.fromarray(frame)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    # Quantised at once: an episode of full frames would fill the memory.
    return image.quantize(colors=128)
