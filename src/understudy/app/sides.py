"""Sides of a duel: whoever a word on the command line names."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.app.deployment import Deployment
from understudy.app.runs.folder import RunFolder
from understudy.arena.duel import Decide, Side
from understudy.core.errors import ConfigError, Refused
from understudy.core.game import GameSpec
from understudy.core.manifest import MAX_POLICY_BYTES, open_policy
from understudy.core.policy import Policy, decode_policy
from understudy.games import rally
from understudy.games.rally import Court
from understudy.models.catalogue import ALIASES


def side_of(text: str, deployment: Callable[[], Deployment]) -> Side:
    """Whoever a word names: a scripted skill, a model, an alias, a run's folder or a policy's file."""
    if text in rally.SKILLS:
        return Side(text, _scripted(rally.skill_of(text)))
    policy = _policy(text, deployment)
    if policy.game.game != rally.GAME_ID:
        raise ConfigError(f"{text} plays {policy.game.game}; a duel is played in rally, which has two seats")
    if policy.stack > 1 or not _is_ours(policy.game):
        raise ConfigError(
            f"{text} plays another rally than ours, or looks at several observations at once; give a model of "
            f"{len(rally.OBS_NAMES)} observed numbers and {len(rally.ACTION_NAMES)} actions"
        )
    return Side(text, _by_policy(policy))


def _is_ours(game: GameSpec) -> bool:
    """Whether it sees and does what is seen and done at our court; another action would be a faster paddle."""
    seen, done = game.obs_columns.get("obs"), game.discrete
    return (
        seen is not None and seen.shape == rally.SCALES.shape
        and done is not None and (done.n, done.start) == (len(rally.ACTION_NAMES), 0)
    )  # fmt: skip


def _policy(text: str, deployment: Callable[[], Deployment]) -> Policy:
    path = Path(text)
    if text and _is(path.is_dir):
        return RunFolder(path).policy()
    if _is(path.is_file):
        try:
            return decode_policy(_read(path))
        except Refused as error:
            raise ConfigError(
                f"{text} is no policy: {error}; give one that a run or 'models export --safetensors' wrote"
            ) from None
    if "/" not in text and text not in ALIASES and not text.isdigit():
        raise ConfigError(
            f"{text[:60]!r} is nobody who plays rally; give a model (rally/3, champion), a run's folder, a policy's "
            f"file, or one of {', '.join(rally.SKILLS)}"
        )
    registry = deployment().registry
    manifest = registry.find(text, game=None if "/" in text else rally.GAME_ID)
    return open_policy(manifest, registry.policy_bytes(manifest))


def _is(asked: Callable[[], bool]) -> bool:
    with contextlib.suppress(OSError):  # a word may be too long for a file's name
        return asked()
    return False


def _read(path: Path) -> bytes:
    if (size := path.stat().st_size) > MAX_POLICY_BYTES:
        raise Refused("too_large", f"{size} bytes; at most {MAX_POLICY_BYTES} are taken")
    return path.read_bytes()


def _by_policy(policy: Policy) -> Decide:
    def decide(court: Court, seat: int, seeds: NDArray[np.int64], decision: int) -> NDArray[np.int64]:
        found: Any = policy.decide({"obs": rally.observed(court, seat)}, None, deterministic=True).action
        return np.asarray(found, np.int64).reshape(-1)

    return decide


def _scripted(skill: rally.Skill) -> Decide:
    def decide(court: Court, seat: int, seeds: NDArray[np.int64], decision: int) -> NDArray[np.int64]:
        drawn = rally.drawn_at(seeds * 2 + seat, decision)
        return np.asarray(rally.scripted(np, rally.seen(court, seat), skill, drawn), np.int64)

    return decide
