"""Skills: publishes how much noise makes a champion play as well as people do."""

from typing import Any

import structlog

from understudy.experience.skill import DEFAULT_NOISE
from understudy.models.calibration import calibrate, has_moved, is_due, measured
from understudy.models.catalogue import Alias, Catalogue
from understudy.models.manifest import model_name
from understudy.release.game_training import ServiceContext

_log = structlog.get_logger("understudy.learner")


class Skills:
    """The skills of one game's champions, and the share of episodes in which they explore."""

    def __init__(self, game: str, context: ServiceContext, *, epoch: int) -> None:
        self._game = game
        self._context = context
        self._epoch = epoch
        self._calibrated: dict[str, int] = {}
        """Episodes at a skill at the last calibration, by model."""

    def publish(self, now: Catalogue, champion: Alias) -> None:
        """Publish what has changed: the noise of the skills, the share of exploring episodes."""
        self._calibrate(now, champion)
        self._publish_explore_share(champion)

    def _calibrate(self, now: Catalogue, champion: Alias) -> None:
        """Publish the noise of each skill, if enough was played at the last one."""
        model = model_name(self._game, champion.model_no)
        stats = self._context.store_stats
        n_episodes, skilled = stats.skilled(model)
        last = now.noise.get(champion.schema)
        n_before = self._calibrated.get(model, 0)
        if last is not None and last.model_no == champion.model_no:
            n_before = max(n_before, last.episodes)
        if not is_due(n_episodes, n_before):
            return
        self._calibrated[model] = n_episodes
        before = DEFAULT_NOISE if last is None else last.noise
        released = stats.returns(model, since_s=0.0)[-len(skilled) :]
        noise = calibrate(before, stats.newest_people(champion.schema), released, skilled)
        if has_moved(noise, before):
            self._context.registry.set_noise(
                self._game,
                champion.model_no,
                noise,
                episodes=n_episodes,
                epoch=self._epoch,
                explore_share=self._explore_share,
            )
            _log.info("skills_calibrated", model=model, episodes=n_episodes, noise=noise)

    @property
    def _explore_share(self) -> float:
        """The share of bots' episodes in which they explore; clones do not learn from bots."""
        config = self._context.config
        return config.explore_share if config.schedule.improve_with != "bc" else 0.0

    def _publish_explore_share(self, champion: Alias) -> None:
        """Publish the share of a schema's episodes in which bots explore, if it has changed."""
        registry = self._context.registry
        last = registry.catalogue(self._game).noise.get(champion.schema)
        if self._explore_share == (0.0 if last is None else last.explore_share):
            return
        registry.set_noise(
            self._game,
            champion.model_no if last is None else last.model_no,
            DEFAULT_NOISE if last is None else last.noise,
            episodes=0 if last is None else last.episodes,
            epoch=self._epoch,
            explore_share=self._explore_share,
        )

    def status(self, now: Catalogue, schema: str) -> dict[str, Any]:
        """The noise, target and returns of each skill of a schema's champion, for display."""
        stats = self._context.store_stats
        last = now.noise.get(schema)
        model = model_name(self._game, now.model_of("champion", schema))
        noise = DEFAULT_NOISE if last is None else last.noise
        return measured(noise, stats.newest_people(schema), stats.skilled(model)[1])
