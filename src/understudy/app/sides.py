"""Sides of a duel: whoever a word on the command line names."""

import contextlib
import hashlib
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
    policy, model = _policy(text, deployment)
    if policy.game.game != rally.GAME_ID:
        raise ConfigError(f"{text} plays {policy.game.game}; a duel is played in rally, which has two seats")
    if policy.stack > 1 or not _is_ours(policy.game):
        raise ConfigError(
            f"{text} plays another rally than ours, or looks at several observations at once; give a model of "
            f"{len(rally.OBS_NAMES)} observed numbers and {len(rally.ACTION_NAMES)} actions"
        )
    return Side(text, _by_policy(policy), model, hashlib.sha256(policy.encode()).hexdigest())


def _is_ours(game: GameSpec) -> bool:
    """Whether it sees and does what is seen and done at our court; another action would be a faster paddle."""
    seen, done = game.obs_columns.get("obs"), game.discrete
    return (
        seen is not None and seen.shape == rally.SCALES.shape
        and done is not None and (done.n, done.start) == (len(rally.ACTION_NAMES), 0)
    )  # fmt: skip


def _policy(text: str, deployment: Callable[[], Deployment]) -> tuple[Policy, str | None]:
    """A policy, and its name where it is a registered model."""
    path = Path(text)
    if text and _is(path.is_dir):
        return RunFolder(path).policy(), None
    if _is(path.is_file):
        return _from_file(path), None
    if "/" not in text and text not in ALIASES and not text.isdigit():
        raise ConfigError(
            f"{text[:60]!r} is nobody who plays rally; give a model (rally/3, champion), a run's folder, a policy's "
            f"file, or one of {', '.join(rally.SKILLS)}"
        )
    registry = deployment().registry
    manifest = registry.find(text, game=None if "/" in text else rally.GAME_ID)
    return open_policy(manifest, registry.policy_bytes(manifest)), manifest.name


def _from_file(path: Path) -> Policy:
    raw = b""
    try:
        return decode_policy(raw := _read(path))
    except Refused as error:
        why = "it is JSON" if raw.lstrip()[:1] == b"{" else error
        raise ConfigError(
            f"{path} is no policy: {why}; give a file that a run or 'models export --safetensors' wrote"
        ) from None


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
