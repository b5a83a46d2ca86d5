"""Match: somebody at one seat of a rally court and the current bot at the other; both seats are recorded."""

import uuid
from typing import Any

import numpy as np

from understudy.client.connect import Game
from understudy.client.episode import Episode
from understudy.core.errors import ConfigError
from understudy.games import rally
from understudy.games.rally import Ints

SKILLS = tuple(rally.SKILLS[name] for name in ("beginner", "casual", "good", "beginner", "casual"))
"""Of the people who play, in turn: more of them are weak than strong."""


class Match:
    """One person against the bot, serve after serve; seats and skills go round by the person's number."""

    rows_per_step = 2

    def __init__(self, game: Game, name: str, number: int, rng: np.random.Generator) -> None:
        if game.spec.game != rally.GAME_ID:
            raise ConfigError(f"{game.spec.game} has one seat; a match is played in rally")
        self._game, self._name, self._rng = game, name, rng
        self._seat, self._skill = number // 2 % 2, SKILLS[number % len(SKILLS)]
        self._match = str(uuid.UUID(bytes=rng.bytes(16), version=4))
        self.points: dict[str, list[int]] = {}
        """Points that each bot won, and that were played with it."""
        self._score = [0, 0]
        self._serve()

    def _serve(self) -> None:
        self._seed, self._decisions = int(self._rng.integers(1 << 31)), 0
        self.court = rally.serve(self._seed)
        self._person = self._episode(self._seat, "bot")
        self._bot = self._episode(1 - self._seat, "person")

    def _episode(self, seat: int, opponent: str) -> Episode:
        return self._game.episode(
            self._name, seat=seat, opponents=(opponent,), match=self._match, seed=self._seed
        )  # fmt: skip

    def step(self) -> None:
        court, seat = self.court, self._seat
        drawn = int(self._rng.integers(1 << 32))
        ours = rally.scripted(Ints, rally.seen(court, seat), self._skill, drawn)
        self._person.acted(rally.observed(court, seat), ours)
        theirs = int(self._bot.act(rally.observed(court, 1 - seat)))
        self.court, got = rally.step(Ints, court, *((ours, theirs) if seat == 0 else (theirs, ours)))
        self._decisions += 1
        reward = float(got if seat == 0 else -got)
        self._person.reward(reward)
        self._bot.reward(-reward)
        if got or self._decisions >= rally.MAX_DECISIONS:
            self._end(reward)

    def _end(self, reward: float) -> None:
        for episode, seat, won in ((self._person, self._seat, reward), (self._bot, 1 - self._seat, -reward)):
            result = "win" if won > 0 else "loss" if won < 0 else None
            episode.end(rally.observed(self.court, seat), truncated=reward == 0, result=result)
        if reward and self._bot.model:
            points = self.points.setdefault(self._bot.model, [0, 0])
            points[0] += reward < 0
            points[1] += 1
        self._score[0] += reward > 0
        self._score[1] += reward < 0
        self._serve()

    def view(self) -> dict[str, Any]:
        """What a watcher may draw."""
        return {"court": list(self.court), "seat": self._seat, "score": list(self._score)}
