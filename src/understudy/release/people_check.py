"""Compares a first bot with people: does it choose what they chose in steps that it never saw?

The mean probability of people's actions must be above that of each of three policies that observe
nothing, by more than the standard error: one chooses each action as often as the bot does on
average, one as often as people do, and one uniformly among valid actions. Continuous actions must
be correlated with people's: their distance says little, since a good clone may act more strongly.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch
from understudy.core.plural import plural
from understudy.models.gate import ModelCheck
from understudy.nn.policy import Policy
from understudy.training.from_store import MIN_COMPARED_STEPS

NAME = "people"
_ROUNDING = 1e-6

Floats = NDArray[np.float64]


def check_with_people(
    policy: Policy, *, learned: Batch, held_out: Sequence[Batch]
) -> ModelCheck | None:
    """Compare a policy with held-out steps of people, a batch for each player.

    Returns None if they are too few to compare. `learned`: steps that it learned from, for the
    constant policy. The median player decides, so that a few players who play unlike all others,
    or whose steps are false, do not.
    """
    n_steps = sum(len(batch.action) for batch in held_out)
    if n_steps < MIN_COMPARED_STEPS:
        return None
    players = plural(len(held_out), "player")
    where = f"{n_steps} held-out steps of {len(held_out)} {players}"
    scores = _agreements if policy.head.is_discrete else _correlations
    bot, *baselines = zip(*(scores(policy, learned, batch) for batch in held_out), strict=True)
    is_better = True
    for baseline in baselines:
        gains = [own - other for own, other in zip(bot, baseline, strict=True)]
        error = float(np.median([gain.std() for gain in gains])) / n_steps**0.5
        is_better &= float(np.median([gain.mean() for gain in gains])) > error + _ROUNDING
    own, *others = (float(np.concatenate(values).mean()) for values in (bot, *baselines))
    constant = max(others[:2])
    if policy.head.is_discrete:
        detail = (
            f"on {where}, it chooses people's actions with probability {own:.3g}; a constant "
            f"policy {constant:.3g}, uniform choice {others[2]:.3g}"
        )
    else:
        detail = (
            f"on {where}, the correlation of its actions with people's is {own:.3g}; that of a "
            "constant action is 0"
        )
    return ModelCheck(NAME, is_better, detail)


def _agreements(policy: Policy, learned: Batch, batch: Batch) -> tuple[Floats, ...]:
    """Probabilities of people's actions by the bot and by the three policies."""
    scores = policy.outputs(batch.obs)[policy.head.outputs[0]].astype(np.float64)
    rows = np.arange(len(scores))
    valid = np.ones(scores.shape, np.bool_)
    if batch.action_mask is not None:
        valid = np.array(batch.action_mask)
        valid[rows, batch.action] = True
    allowed = np.where(valid, scores, -np.inf)
    odds = np.exp(allowed - allowed.max(1, keepdims=True))
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    people = 1.0 + np.bincount(learned.action, minlength=policy.head.size)
    return tuple(
        np.asarray((weights * valid)[rows, batch.action] / (weights * valid).sum(1))
        for weights in (odds, chances.mean(0), people, np.ones(scores.shape[1]))
    )


def _correlations(policy: Policy, learned: Batch, batch: Batch) -> tuple[Floats, ...]:
    """What each step adds to the correlation with people's actions: of the bot, of a constant."""
    own = policy.decide(batch.obs, None, deterministic=True).action.astype(np.float64)
    mean = learned.action.mean(0, dtype=np.float64)
    product = (own - own.mean(0)) * (batch.action - mean)
    scale = own.std(0) * learned.action.std(0, dtype=np.float64)
    return (product / np.maximum(scale, _ROUNDING)).mean(1), np.zeros(len(own))
