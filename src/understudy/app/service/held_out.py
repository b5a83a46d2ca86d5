"""Held-out episodes for the gate, where the game is installed beside the learner; a learner does without."""

import contextlib
from collections.abc import Iterator

from understudy.app.service.gatekeeper import Play
from understudy.core.errors import ConfigError, GameFailed
from understudy.core.game import GameSpec
from understudy.core.policy import Policy
from understudy.core.tensors import Array


@contextlib.contextmanager
def held_out(env_id: str | None, spec: GameSpec, *, attempt: int) -> Iterator[Play | None]:
    """What plays a policy on seeds nobody has trained on; None where the game is not here, or is another one."""
    with contextlib.ExitStack() as opened:
        yield _play(env_id, spec, attempt=attempt, opened=opened) if env_id else None


def _play(env_id: str, spec: GameSpec, *, attempt: int, opened: contextlib.ExitStack) -> Play | None:
    try:
        from understudy.app.runs.choice import GameChoice, look_at  # late: they need gymnasium
        from understudy.app.runs.evaluation import AFTERWARDS, judge_of

        choice = GameChoice(game=env_id)
        seen = look_at(choice)
    except (ImportError, ConfigError):
        return None
    if (seen.spec.obs, seen.spec.action) != (spec.obs, spec.action):
        return None
    judge = judge_of(choice, seen, 100, opened)

    def play(policy: Policy, episodes: int) -> Array:
        returns = judge.returns(policy, episodes=episodes, series=AFTERWARDS, attempt=attempt)
        if returns is None:
            raise GameFailed(f"{env_id} could not be played; leave it out of `envs`, and live play judges")
        return returns

    return play
