"""A learner's config from the flat settings of a run; needs no game."""

import math

from understudy.app.runs.settings import Settings
from understudy.learn.learner import LearnerConfig
from understudy.learn.limiter import LimiterConfig
from understudy.learn.replay import ReplayConfig


def learner_config(settings: Settings) -> LearnerConfig:
    """What these settings say about the learner."""
    part = settings.learner
    # Room for two compiled calls, counted in the steps that pay for them.
    slack = math.ceil(2 * part.updates_per_call * getattr(settings.config, "batch", 1) / part.samples_per_insert)
    limiter = LimiterConfig(
        samples_per_insert=part.samples_per_insert, min_inserts=part.min_inserts, slack=max(2_048, slack)
    )
    replay = ReplayConfig(capacity=part.capacity, alpha=part.alpha)
    return LearnerConfig(
        updates_per_call=part.updates_per_call, limiter=limiter, replay=replay, max_lag_versions=part.max_lag_versions
    )
