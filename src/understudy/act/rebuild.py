"""Open episodes rebuilt: each env is reset with its seed and given its actions again, until it shows what it showed.

Envs step together, so one whose episode is shorter plays part of it and then the whole, once or more: every action it
is given is one that it took in that place before.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from understudy.act.live import LiveEnvs
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array


def rebuild(live: LiveEnvs, seen: Mapping[str, Array], *, seeds: Sequence[int], actions: Sequence[Array]) -> None:
    """Leave the envs where their episodes stood; `seen` is what `live.inputs` was there, and must be again."""
    lengths = np.array([len(one) for one in actions])
    longest = int(lengths.max())
    head = longest % np.maximum(lengths, 1)  # the part played before the first whole
    stack = next(iter(seen.values())).shape[1] if _has_stacks(live, seen) else 1
    live.reset(seeds)
    live.keep_stacks(stack)
    if longest and not lengths.all():
        spare = _first_legal(live)
    for step in range(longest):
        # An env with nothing to play again takes any legal first step, and is reset behind it.
        place = np.where(step < head, step, (step - head) % np.maximum(lengths, 1))
        if step and (place == 0).any():
            live.reset(seeds, place == 0)
        now = [one[place[env]] if len(one) else spare[env] for env, one in enumerate(actions)]
        _, terminated, truncated = live.step(np.array(now))
        if (over := (terminated | truncated) & (lengths > 0)).any():
            raise _not_reproducible(live, int(np.flatnonzero(over)[0]), "its episode ended earlier than it did")
    if longest and not lengths.all():
        live.reset(seeds, lengths == 0)
    for name, wanted in seen.items():
        got = live.inputs[name]
        for env in range(live.num_envs):
            if got[env].astype(wanted.dtype).tobytes() != wanted[env].tobytes():
                raise _not_reproducible(live, env, f"{name!r} is {str(got[env])[:60]}, was {str(wanted[env])[:60]}")


def _has_stacks(live: LiveEnvs, seen: Mapping[str, Array]) -> bool:
    name, rows = next(iter(seen.items()))
    return rows.ndim == len(live.game.obs_columns[name].shape) + 2


def _first_legal(live: LiveEnvs) -> Array:
    """For each env an action that is legal where it stands."""
    space = live.game.action_columns["action"]
    if live.game.discrete is None:
        zeros = np.zeros((live.num_envs, *space.shape), space.dtype)
        return np.clip(zeros, live.envs.action_space.low, live.envs.action_space.high)  # type: ignore[attr-defined]
    legal = live.legal
    first = np.zeros(live.num_envs, np.int32) if legal is None else legal.argmax(1).astype(np.int32)
    return first + np.int32(live.game.discrete.start)


def _not_reproducible(live: LiveEnvs, env: int, what: str) -> ConfigError:
    return ConfigError(
        f"env {env} of {live.game.game} cannot be rebuilt from its seed and actions: {what}; make the env draw all its "
        "chance from reset(seed=...), or train with --set asynchronous=true, which goes on with new episodes instead"
    )
