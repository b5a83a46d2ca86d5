"""What an algorithm learns from recorded steps of scripted people, without the platform.

    python bench/offline.py vault iql                    30,000 steps, settings of the service's
                                                         preset; prints the bot's true return
    python bench/offline.py vault iql --set centre=none  with another setting
    python bench/offline.py courier bc --updates 1024 --steps 10000 --seeds 3

The five people of the game (`bench/people.py`) play in turn until there are so many steps. The
algorithm trains on them as the learner service does: from new weights, with the preset's batch and
schedules, and the centre of the grid that the steps show. The bot then plays true episodes at the
service's temperature. On the printed scale the average person is 0 and the best one is 1, as in
`bench/players.py`, which plays through the whole platform instead.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from bench.people import GAMES, PeopleGame, Person, play  # noqa: E402
from bench.players import scale_of, true_returns  # noqa: E402
from understudy.algorithm import Batch, Schedule  # noqa: E402
from understudy.experience.game import GameSpec  # noqa: E402
from understudy.learn.centre import find_centre  # noqa: E402
from understudy.nn.policy import Policy  # noqa: E402
from understudy.release.schedule import LearningSchedule  # noqa: E402
from understudy.training.settings import RunSettings, TrainRequest, resolve  # noqa: E402

_PER_CALL = 64
"""Updates in one compiled call."""


def main() -> int:
    """Train on people's steps and print the bot's place on their scale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("game", choices=sorted(GAMES))
    parser.add_argument("algorithm", choices=("bc", "iql"))
    parser.add_argument("--steps", type=int, default=30_000, help="steps of people")
    parser.add_argument("--updates", type=int, help="default: those of the service")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=300, help="true episodes of the bot")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change one setting"
    )
    options = parser.parse_args()
    schedule = LearningSchedule()
    updates = options.updates or getattr(schedule, f"{options.algorithm}_updates")
    game = GAMES[options.game]
    spec = game.spec()
    overrides: dict[str, Any] = {"steps": updates, "horizon": updates}
    for change in options.set:
        name, _, value = change.partition("=")  # a number, or else text
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        overrides[name] = value
    request = TrainRequest(
        algorithm=options.algorithm, preset=f"{options.algorithm}-people", settings=overrides
    )
    scale = scale_of(options.game)
    for seed in range(options.seeds):
        steps = recorded(game, spec, options.steps, seed=seed)
        settings = resolve(request, spec)
        if settings.config.centre == "":
            centre = find_centre(spec, jax.tree.map(lambda column: column[:4_096], steps))
            settings = dataclasses.replace(
                settings, config=dataclasses.replace(settings.config, centre=centre)
            )
        began_s = time.monotonic()
        policy = trained(spec, settings, steps, updates=updates, seed=seed)
        minutes = (time.monotonic() - began_s) / 60
        bot = policy.at_temperature(schedule.temperature)
        returns = true_returns(game, bot, episodes=options.episodes)
        print(
            f"{options.game} {options.algorithm}, {options.steps} steps, {updates} updates, seed "
            f"{seed}, centre {settings.config.centre!r}: {scale.place(float(np.mean(returns))):.2f}"
            f" ({minutes:.1f} minutes)",
            flush=True,
        )
    return 0


class _Recorder:
    """An episode that keeps transitions, as `play` records them."""

    def __init__(self, spec: GameSpec) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self._columns = list(spec.obs_columns)
        self._open: list[Any] | None = None

    def acted(self, obs: Any, action: Any, *, action_mask: Any = None) -> None:
        self._close(obs, action_mask, discount=1.0)
        self._open = [self._flat(obs), action, 0.0, action_mask]

    def reward(self, reward: float) -> None:
        assert self._open is not None
        self._open[2] += reward

    def end(self, obs: Any, *, action_mask: Any = None, truncated: bool = False) -> None:
        self._close(obs, action_mask, discount=float(truncated))

    def _close(self, obs: Any, action_mask: Any, *, discount: float) -> None:
        if self._open is not None:
            before, action, reward, mask = self._open
            self.rows.append((before, action, reward, self._flat(obs), discount, mask, action_mask))
            self._open = None

    def _flat(self, obs: Any) -> dict[str, Any]:
        columns = {}
        for name in self._columns:
            value = obs
            for part in name.split(".")[1:]:
                value = value[part]
            columns[name] = np.asarray(value)
        return columns


def recorded(game: PeopleGame, spec: GameSpec, n_steps: int, *, seed: int) -> Batch:
    """The first steps of the game's people, who play in turn."""
    people = [Person(game, skill) for skill in game.people]
    recorder: Any = _Recorder(spec)
    with contextlib.closing(game.make()) as env:
        number = 0
        while len(recorder.rows) < n_steps:
            rng = np.random.default_rng([seed, number, 1])
            play(env, people[number % len(people)], rng, episode=recorder)
            number += 1
    obs, action, reward, next_obs, discount, mask, next_mask = zip(
        *recorder.rows[:n_steps], strict=True
    )
    ones = np.ones(n_steps, np.float32)

    def columns(rows: Any) -> dict[str, Any]:
        return {name: np.stack([row[name] for row in rows]) for name in spec.obs_columns}

    return Batch(
        columns(obs),
        np.array(action, np.int32 if spec.discrete is not None else np.float32),
        np.array(reward, np.float32),
        columns(next_obs),
        np.array(discount, np.float32),
        ones,
        np.stack(mask) if game.has_action_mask else None,
        np.stack(next_mask) if game.has_action_mask else None,
    )


def trained(
    spec: GameSpec, settings: RunSettings, steps: Batch, *, updates: int, seed: int
) -> Policy:
    """The policy after so many updates on uniformly sampled steps."""
    algorithm = settings.algorithm_type(spec, settings.config)
    discount = steps.discount * np.float32(algorithm.needs.discount)
    data = jax.tree.map(jnp.asarray, steps._replace(discount=discount))
    knobs = {
        field.name: getattr(settings.knobs, field.name)
        for field in dataclasses.fields(settings.knobs)
    }

    def update(state: Any, given: Any) -> tuple[Any, None]:
        rows, values = given
        batch = jax.tree.map(lambda column: column[rows], data)
        return algorithm.update(state, batch, values)[0], None

    call = jax.jit(lambda state, given: jax.lax.scan(update, state, given)[0])
    state = algorithm.init(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    for first in range(0, updates, _PER_CALL):
        progress = (first + np.arange(_PER_CALL)) / updates
        values = {
            name: np.array(
                [knob.at(share) if isinstance(knob, Schedule) else knob for share in progress],
                np.float32,
            )
            for name, knob in knobs.items()
        }
        rows = rng.integers(len(steps.action), size=(_PER_CALL, algorithm.needs.batch))
        state = call(state, (rows, values))
    policy: Policy = algorithm.policy(state)
    return policy


if __name__ == "__main__":
    sys.exit(main())
