"""What an algorithm learns from recorded steps of scripted people, without the platform.

    python bench/offline.py vault iql                    30,000 steps, settings of the service's
                                                         preset; prints the bot's true return
    python bench/offline.py vault iql --set centre=none  with another setting
    python bench/offline.py courier bc --updates 1024 --steps 10000 --seeds 3
    python bench/offline.py cartpole bc --poison         30 players, of whom 0, 1, 5 and 10 % are
                                                         malicious, with each attack of
                                                         understudy.testing.poisoning; writes
                                                         --out, if it is given
    python bench/offline.py poker rank --seeds 2         orders 30 policies by recorded steps alone,
                                                         and compares that with their true returns

The five people of the game (`bench/people.py`) play in turn until there are so many steps. The
algorithm trains on them as the learner service does: from new weights, with the preset's batch and
schedules, and the centre of the grid that the steps show. The bot then plays true episodes at the
service's temperature. On the printed scale the average person is 0 and the best one is 1, as in
`bench/players.py`, which plays through the whole platform instead.

With --poison, the steps are chunks of players and go through the service's replay, which leaves out
what most players' steps do not allow to believe. On the scale of this table random play is 0.

`rank` makes 30 policies: bc and iql after many and few updates on many and few steps, each at four
temperatures, mixtures with random play, a clone whose actions are shuffled, and random play. It
writes Spearman's correlation of their estimated values (`learn/ranking.py`) with their true returns
to bench/results/ranking.json.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from bench.machine import commit, load_average, machine  # noqa: E402
from bench.people import GAMES, PeopleGame, Person, play  # noqa: E402
from bench.players import scale_of, true_returns  # noqa: E402
from understudy.algorithm import Batch, Schedule  # noqa: E402
from understudy.core.names import new_session  # noqa: E402
from understudy.experience.chunk import By, Chunk, ChunkMeta, EpisodeNote, RowKind  # noqa: E402
from understudy.experience.game import GameSpec  # noqa: E402
from understudy.learn.centre import find_centre  # noqa: E402
from understudy.learn.held_out import symmetry_choice  # noqa: E402
from understudy.learn.learner import Learner  # noqa: E402
from understudy.learn.ranking import Choices, Estimate, RankingConfig, estimates  # noqa: E402
from understudy.learn.replay_source import ReplaySource  # noqa: E402
from understudy.learn.symmetry import find_symmetry  # noqa: E402
from understudy.nn.policy import Policy  # noqa: E402
from understudy.release.schedule import LearningSchedule  # noqa: E402
from understudy.testing.poisoning import ATTACKS, Attack, poison  # noqa: E402
from understudy.training.settings import RunSettings  # noqa: E402
from understudy.training.train_request import TrainRequest, resolve  # noqa: E402

_PER_CALL = 64
"""Updates in one compiled call."""
VIEW_STEPS = 4_096
"""Steps in which the player's cell is looked for."""
N_PLAYERS = 30
MALICIOUS_SHARES = (0.01, 0.05, 0.1)
TOLERANCE = 0.05
"""How far below the clean bot a poisoned one may be."""
RANKING = ROOT / "bench" / "results" / "ranking.json"


def main() -> int:
    """Train on people's steps and print the bot's place on their scale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("game", choices=sorted(GAMES))
    parser.add_argument("algorithm", choices=("bc", "iql", "rank"))
    parser.add_argument("--steps", type=int, default=30_000, help="steps of people")
    parser.add_argument("--updates", type=int, help="default: those of the service")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=300, help="true episodes of the bot")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change one setting"
    )
    parser.add_argument("--poison", action="store_true", help="compare with malicious players")
    parser.add_argument(
        "--attack", action="append", choices=ATTACKS, help="only this one; may be repeated"
    )
    parser.add_argument(
        "--most-active",
        action="store_true",
        help="the malicious players are those with the most steps; default: average ones",
    )
    parser.add_argument("--out", type=Path, help="file for the result of --poison")
    options = parser.parse_args()
    if options.algorithm == "rank":
        for seed in range(options.seeds):
            _rank(GAMES[options.game], options.steps, options.episodes, seed=seed)
        return 0
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
    if options.poison:
        return _measure_poisoning(options, request, updates=updates)
    for seed in range(options.seeds):
        settings = resolve(request, spec)
        episodes = recorded_episodes(game, spec, options.steps, seed=seed)
        settings = with_view(spec, settings, batch_of(spec, itertools.chain(*episodes)))
        steps = batch_of(spec, itertools.chain(*best_episodes(episodes, settings.config)))
        began_s = time.monotonic()
        policy = trained(spec, settings, steps, updates=updates, seed=seed)
        minutes = (time.monotonic() - began_s) / 60
        bot = policy.at_temperature(schedule.temperature)
        returns = true_returns(game, bot, episodes=options.episodes)
        print(
            f"{options.game} {options.algorithm}, {options.steps} steps, {updates} updates, seed "
            f"{seed}, centre {settings.config.centre!r}, symmetry {settings.config.symmetry!r}: "
            f"{scale.place(float(np.mean(returns))):.2f}"
            f" ({minutes:.1f} minutes)",
            flush=True,
        )
    return 0


class _Recorder:
    """An episode that keeps transitions, as `play` records them."""

    def __init__(self, spec: GameSpec) -> None:
        self.rows: list[Row] = []
        self._spec = spec
        self._open: list[Any] | None = None

    def acted(self, obs: Any, action: Any, *, action_mask: Any = None) -> None:
        self._close(obs, action_mask, discount=1.0)
        self._open = [_columns(self._spec, obs), action, 0.0, action_mask]

    def reward(self, reward: float) -> None:
        assert self._open is not None
        self._open[2] += reward

    def end(self, obs: Any, *, action_mask: Any = None, truncated: bool = False) -> None:
        self._close(obs, action_mask, discount=float(truncated))

    def _close(self, obs: Any, action_mask: Any, *, discount: float) -> None:
        if self._open is not None:
            before, action, reward, mask = self._open
            self.rows.append(
                (before, action, reward, _columns(self._spec, obs), discount, mask, action_mask)
            )
            self._open = None


def _columns(spec: GameSpec, obs: Any) -> dict[str, Any]:
    """An observation of an env as columns."""
    columns = {}
    for name in spec.obs_columns:
        value = obs
        for part in name.split(".")[1:]:
            value = value[part]
        columns[name] = np.asarray(value)
    return columns


Row = tuple[Any, ...]
"""Observation, action, reward, next observation, discount (0: the game terminated), both masks."""


def recorded_episodes(
    game: PeopleGame, spec: GameSpec, n_steps: int, *, seed: int
) -> list[list[Row]]:
    """The first episodes of the game's people, who play in turn; the last is cut to `n_steps`."""
    people = [Person(game, skill) for skill in game.people]
    episodes: list[list[Row]] = []
    missing = n_steps
    with contextlib.closing(game.make()) as env:
        while missing > 0:
            number = len(episodes)
            recorder: Any = _Recorder(spec)
            rng = np.random.default_rng([seed, number, 1])
            play(env, people[number % len(people)], rng, episode=recorder)
            episodes.append(recorder.rows[:missing])
            missing -= len(episodes[-1])
    return episodes


def best_episodes(episodes: Sequence[list[Row]], config: Any) -> Sequence[list[Row]]:
    """The episodes that are learned from with these settings; not the last one, which is cut."""
    share = getattr(config, "best_share", 1.0)
    if share == 1:
        return episodes
    n_steps = sum(map(len, episodes[:-1]))
    share = max(share, min(0.5, config.best_steps / max(1, n_steps)))
    returns = [sum(row[2] for row in rows) for rows in episodes[:-1]]
    least = sorted(returns)[-math.ceil(share * len(returns))]
    return [rows for rows, own in zip(episodes, returns, strict=False) if own >= least]


def recorded(game: PeopleGame, spec: GameSpec, n_steps: int, *, seed: int) -> Batch:
    """The first steps of the game's people, who play in turn."""
    return batch_of(spec, itertools.chain(*recorded_episodes(game, spec, n_steps, seed=seed)))


def batch_of(spec: GameSpec, rows: Iterable[Row]) -> Batch:
    """Recorded steps as one batch, in their order."""
    obs, action, reward, next_obs, discount, mask, next_mask = zip(*rows, strict=True)

    def columns(rows: Any) -> dict[str, Any]:
        return {name: np.stack([row[name] for row in rows]) for name in spec.obs_columns}

    has_action_mask = mask[0] is not None
    return Batch(
        columns(obs),
        np.array(action, np.int32 if spec.discrete is not None else np.float32),
        np.array(reward, np.float32),
        columns(next_obs),
        np.array(discount, np.float32),
        np.ones(len(action), np.float32),
        np.stack(mask) if has_action_mask else None,
        np.stack(next_mask) if has_action_mask else None,
    )


def with_view(spec: GameSpec, settings: RunSettings, steps: Batch) -> RunSettings:
    """The settings with the player's cell and the mirror images that the service would find.

    The last fifth of the steps is held out to choose among images.
    """
    config = settings.config
    first = jax.tree.map(lambda column: column[:VIEW_STEPS], steps)
    centre = config.centre or find_centre(spec, first)
    symmetry = config.symmetry
    found = "" if symmetry else find_symmetry(spec, centre, first)
    if found:
        n_learned = len(steps.action) * 4 // 5
        choice = symmetry_choice(
            spec,
            centre=centre,
            symmetry=found,
            learned=jax.tree.map(lambda column: column[:n_learned], steps),
            held_out=jax.tree.map(lambda column: column[n_learned:], steps),
            temperature=LearningSchedule().temperature,
            stack=config.stack,
        )
        while choice.step():
            pass
        symmetry = choice.best().symmetry
    return dataclasses.replace(
        settings, config=dataclasses.replace(config, centre=centre, symmetry=symmetry)
    )


def trained(
    spec: GameSpec, settings: RunSettings, steps: Batch, *, updates: int, seed: int
) -> Policy:
    """The policy after so many updates on uniformly sampled steps."""
    *_, policy = policies_of(spec, settings, steps, updates=updates, seed=seed)
    return policy


def policies_of(
    spec: GameSpec,
    settings: RunSettings,
    steps: Batch,
    *,
    updates: int,
    seed: int,
    every: int | None = None,
    horizon: int | None = None,
) -> Iterator[Policy]:
    """The policies of one training: after every so many updates, or only the last one.

    `horizon`: updates that schedules span, by default all of them.
    """
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
        progress = (first + np.arange(_PER_CALL)) / (horizon or updates)
        values = {
            name: np.array(
                [knob.at(share) if isinstance(knob, Schedule) else knob for share in progress],
                np.float32,
            )
            for name, knob in knobs.items()
        }
        rows = rng.integers(len(steps.action), size=(_PER_CALL, algorithm.needs.batch))
        state = call(state, (rows, values))
        made = first + _PER_CALL
        if made >= updates or (every and made % every == 0):
            yield algorithm.policy(state)


# --- Malicious players ----------------------------------------------------------------------------

Sent = tuple[bytes, Chunk]
"""A chunk and its player's pseudonym."""


def _measure_poisoning(options: argparse.Namespace, request: TrainRequest, *, updates: int) -> int:
    """Train on clean and on poisoned steps, and compare true returns; 1 if a bot is too bad."""
    game = GAMES[options.game]
    spec = game.spec()
    scale = scale_of(options.game)
    settings = resolve(request, spec)
    began_s = time.monotonic()
    rows = []
    for seed in range(options.seeds):
        honest = sent_by_players(game, spec, options.steps, seed=seed)
        n_steps = sum(chunk.meta.n_steps for _, chunk in honest)
        clean = math.nan
        cells = [
            (attack, share) for attack in options.attack or ATTACKS for share in MALICIOUS_SHARES
        ]
        for attack, share in ((None, 0.0), *cells):
            sent = honest
            n_false = 0
            if attack is not None:
                n_malicious = math.ceil(share * N_PLAYERS)
                malicious = malicious_among(honest, n_malicious, most_active=options.most_active)
                sent, n_false = poisoned(honest, attack, spec, malicious=malicious, seed=seed)
            learner = learned(spec, settings, sent, updates=updates, seed=seed)
            bot = learner.current().at_temperature(LearningSchedule().temperature)
            mean = float(np.mean(true_returns(game, bot, episodes=options.episodes)))
            place = round((mean - scale.random) / (scale.best - scale.random), 3)
            clean = place if attack is None else clean
            rows.append(
                {
                    "seed": seed,
                    "attack": attack,
                    "malicious_players": math.ceil(share * N_PLAYERS),
                    "share": share,
                    "false_steps": round(n_false / n_steps, 3),
                    "on_scale": place,
                    "holds": place >= clean - TOLERANCE,
                    "skipped_updates": learner.counts.skipped_updates,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        result = {
            "format": 1,
            "commit": commit(),
            "machine": machine(),
            "game": options.game,
            "algorithm": options.algorithm,
            "players": N_PLAYERS,
            "most_active": options.most_active,
            "steps": options.steps,
            "updates": updates,
            "episodes": options.episodes,
            "minutes": round((time.monotonic() - began_s) / 60, 1),
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["holds"] for row in rows) else 1


def sent_by_players(game: PeopleGame, spec: GameSpec, n_steps: int, *, seed: int) -> list[Sent]:
    """Chunks of thirty players in turn, one for each episode: six of each of the game's people."""
    people = [Person(game, skill) for skill in game.people]
    sessions = [
        new_session(0, np.random.default_rng([seed, at]).bytes(10)) for at in range(N_PLAYERS)
    ]
    counts = [[0, 0] for _ in sessions]  # chunks and steps of each session
    sent: list[Sent] = []
    with contextlib.closing(game.make()) as env:
        while sum(n for _, n in counts) < n_steps:
            at = len(sent) % N_PLAYERS
            recorder: Any = _Recorder(spec)
            rng = np.random.default_rng([seed, len(sent), 1])
            play(env, people[at % len(people)], rng, episode=recorder)
            n_chunks, first_step = counts[at]
            chunk = chunk_of(spec, recorder.rows, sessions[at], n_chunks, first_step=first_step)
            counts[at] = [n_chunks + 1, first_step + chunk.meta.n_steps]
            sent.append((at.to_bytes(16, "big"), chunk))
    return sent


def chunk_of(
    spec: GameSpec,
    rows: Sequence[Row],
    session: uuid.UUID,
    chunk_no: int,
    *,
    first_step: int,
) -> Chunk:
    """An episode, whose last step ends it, as a chunk."""
    obs, action, reward, next_obs, discount, mask, next_mask = zip(*rows, strict=True)
    n = len(rows)
    is_last = np.arange(n + 1) == n - 1
    (action_name, space), *_ = spec.action_columns.items()
    actions = np.zeros((n + 1, *space.shape), space.dtype)
    actions[:n] = np.array(action).reshape(n, *space.shape)
    columns: dict[str, Any] = {
        action_name: actions,
        "reward": np.append(np.array(reward), 0).astype(np.float32),
        "is_first": np.arange(n + 1) == 0,
        "terminated": is_last & (discount[-1] == 0),
        "truncated": is_last & (discount[-1] > 0),
        "row": np.append(np.zeros(n), RowKind.FINAL).astype(np.uint8),
        "by": np.append(np.full(n, By.PERSON), 0).astype(np.uint8),
    }
    for name, column in spec.obs_columns.items():
        every = [row[name] for row in (*obs, next_obs[-1])]
        columns[name] = np.stack(every).astype(column.dtype).reshape(n + 1, *column.shape)
    if mask[0] is not None:
        columns["action_mask"] = np.stack([*mask, next_mask[-1]]).astype(np.bool_)
    meta = ChunkMeta(
        game=spec.game,
        schema=spec.schema,
        session=session,
        chunk_no=chunk_no,
        first_step=first_step,
        n_steps=n,
        consent="granted",
        client="bench/1",
        episodes=(EpisodeNote(row=0),),
    )
    return Chunk(meta, columns).validate()


def malicious_among(honest: Sequence[Sent], count: int, *, most_active: bool) -> set[bytes]:
    """The players with the most steps, or those whose steps are closest to the average."""
    steps = Counter[bytes]()
    for player, chunk in honest:
        steps[player] += chunk.meta.n_steps
    if most_active:
        return {player for player, _ in steps.most_common(count)}
    average = steps.total() / len(steps)
    return set(sorted(steps, key=lambda player: abs(steps[player] - average))[:count])


def poisoned(
    honest: Sequence[Sent], attack: Attack, spec: GameSpec, *, malicious: set[bytes], seed: int
) -> tuple[list[Sent], int]:
    """The same chunks with those of some players poisoned, and how many steps that are.

    Sock puppets have another name in each episode.
    """
    rng = np.random.default_rng([seed, 2])
    sent: list[Sent] = []
    n_false = 0
    for player, chunk in honest:
        if player in malicious:
            chunk = poison(chunk, attack, spec, rng)
            n_false += chunk.meta.n_steps
            if attack == "sock_puppets":
                player = rng.bytes(16)
                meta = dataclasses.replace(
                    chunk.meta, session=new_session(0, rng.bytes(10)), chunk_no=0, first_step=0
                )
                chunk = Chunk(meta, chunk.columns)
        sent.append((player, chunk))
    return sent, n_false


def learned(
    spec: GameSpec, settings: RunSettings, sent: Sequence[Sent], *, updates: int, seed: int
) -> Learner:
    """The service's learner after so many updates on these chunks."""
    learner = learner_of(spec, settings, sent, seed=seed)
    while learner.counts.updates < updates:
        report = learner.step(learner.counts.updates / updates)
        assert not report.must_restore, "too many updates were not finite"
    return learner


def learner_of(
    spec: GameSpec, settings: RunSettings, sent: Sequence[Sent], *, seed: int
) -> Learner:
    """The service's learner with these chunks, before its first update."""
    config = dataclasses.replace(settings.learner_config(), limiter=None)
    algorithm = settings.algorithm_type(spec, settings.config)
    learner = Learner(algorithm, settings.knobs, root_seed=seed, config=config)
    assert isinstance(learner.source, ReplaySource)
    for _, chunk in sent:
        learner.insert(chunk, is_own=False)
    learner.source.end_sessions()
    learner.source.measure({chunk.meta.session: player for player, chunk in sent})
    return learner


# --- Ranking --------------------------------------------------------------------------------------

_TRAININGS = {
    "bc": ("bc", 1.0, 2_048),
    "bc of few steps": ("bc", 0.1, 512),
    "bc of few updates": ("bc", 1.0, 64),
    "iql": ("iql", 1.0, 4_096),
    "iql of few steps": ("iql", 0.1, 1_024),
    "iql of few updates": ("iql", 1.0, 256),
}
"""Algorithm, share of the steps, and updates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Choosing:
    """How a policy chooses by the logits of a training."""

    training: str
    temperature: float = 0.25
    noise: float = 0.0
    """Share of random choices."""
    is_shuffled: bool = False
    """Whether each action stands for the next one."""

    def chances(self, logits: Any, mask: Any) -> Any:
        """float64[rows, actions]"""
        logits = np.roll(logits, int(self.is_shuffled), axis=1).astype(np.float64)
        is_valid = np.ones(logits.shape, np.bool_)
        if mask is not None:
            is_valid = mask | ~mask.any(1, keepdims=True)
        logits = np.where(is_valid, logits, -np.inf) / self.temperature
        odds = np.exp(logits - logits.max(1, keepdims=True))
        own = odds / odds.sum(1, keepdims=True)
        return (1 - self.noise) * own + self.noise * is_valid / is_valid.sum(1, keepdims=True)

    def __str__(self) -> str:
        shuffled = ", shuffled" if self.is_shuffled else ""
        return f"{self.training} at {self.temperature:g}, noise {self.noise:g}{shuffled}"


_POLICIES = (
    *(
        _Choosing(training=training, temperature=temperature)
        for training in _TRAININGS
        for temperature in (0.05, 0.25, 0.5, 1.0)
    ),
    *(_Choosing(training=name, noise=noise) for name in ("bc", "iql") for noise in (0.3, 0.6)),
    _Choosing(training="bc", noise=1.0),
    _Choosing(training="bc", is_shuffled=True),
)


def _rank(game: PeopleGame, n_steps: int, episodes: int, *, seed: int) -> None:
    """Add a game and seed to the result file."""
    spec = game.spec()
    steps = recorded(game, spec, n_steps, seed=seed)
    policies = {}
    for name, (algorithm, share, updates) in _TRAININGS.items():
        request = TrainRequest(
            algorithm=algorithm,
            preset=f"{algorithm}-people",
            settings={"steps": updates, "horizon": updates},
        )
        some = jax.tree.map(lambda column, n=int(share * n_steps): column[:n], steps)
        policies[name] = trained(spec, resolve(request, spec), some, updates=updates, seed=seed)

    def chances(choosing: _Choosing, obs: Any, mask: Any) -> Any:
        return choosing.chances(policies[choosing.training].outputs(obs)["logits"], mask)

    def all_chances(obs: Any, mask: Any) -> Any:
        return np.stack([chances(policy, obs, mask).astype(np.float32) for policy in _POLICIES])

    choices = Choices(
        all_chances(steps.obs, steps.action_mask),
        all_chances(steps.next_obs, steps.next_action_mask),
    )
    clone = _POLICIES.index(_Choosing(training="bc", temperature=1.0))
    began_s = time.monotonic()
    ranked = estimates(
        spec,
        steps._replace(discount=steps.discount * np.float32(0.99)),
        choices,
        recorded=choices.now[clone],
        config=RankingConfig(),
        seed=seed,
    )
    minutes = (time.monotonic() - began_s) / 60
    returns = [
        _returns(game, lambda obs, mask, p=policy: chances(p, obs, mask), episodes, seed=seed)
        for policy in _POLICIES
    ]
    _write(game.name, seed, ranked, returns, n_steps=n_steps, minutes=minutes)


def _returns(game: PeopleGame, chances: Any, episodes: int, *, seed: int) -> Any:
    """float64[episodes]: true returns of a policy, which plays all episodes at once."""
    rng = np.random.default_rng([seed, episodes])

    def choose(obs: Any, mask: Any) -> Any:
        probabilities = chances(obs, mask)
        drawn = probabilities.cumsum(1) < rng.random((len(probabilities), 1))
        return np.minimum(drawn.sum(1), drawn.shape[1] - 1)

    return returns_at_once(game, choose, [1_000_000 + number for number in range(episodes)])


def returns_at_once(
    game: PeopleGame, choose: Callable[[Any, Any], Any], seeds: Sequence[int]
) -> Any:
    """float64[seeds]: true returns of one episode for each seed, all of them played at once.

    `choose`: from the columns and the action masks (or None) of all episodes to their actions.
    """
    spec = game.spec()
    with contextlib.ExitStack() as stack:
        envs = [stack.enter_context(contextlib.closing(game.make())) for _ in seeds]
        now = [env.reset(seed=seed) for env, seed in zip(envs, seeds, strict=True)]
        returns = np.zeros(len(seeds))
        live = list(range(len(seeds)))
        while live:
            rows = [_columns(spec, now[number][0]) for number in live]
            obs = {name: np.stack([row[name] for row in rows]) for name in spec.obs_columns}
            mask = None
            if game.has_action_mask:
                mask = np.stack([now[number][1]["action_mask"] for number in live])
            actions = choose(obs, mask)
            still = []
            # Envs of discrete actions expect Python's numbers.
            each = actions.tolist() if actions.ndim == 1 else actions
            for number, action in zip(live, each, strict=True):
                after, reward, terminated, truncated, info = envs[number].step(action)
                now[number] = (after, info)
                returns[number] += float(reward)
                if not terminated and not truncated:
                    still.append(number)
            live = still
    return returns


def spearman(first: Any, second: Any) -> float:
    """Spearman's rank correlation; equal numbers share the mean of their ranks."""

    def ranks(values: Any) -> Any:
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = counts.cumsum()
        return (ends - (counts + 1) / 2)[places]

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def _write(
    game: str,
    seed: int,
    ranked: list[Estimate],
    returns: list[Any],
    *,
    n_steps: int,
    minutes: float,
) -> None:
    truth = [float(own.mean()) for own in returns]
    correlation = spearman([estimate.value for estimate in ranked], truth)
    rows = [
        {
            "policy": str(policy),
            "true_return": round(mean, 3),
            "standard_error": round(float(own.std() / len(own) ** 0.5), 3),
            "value": round(estimate.value, 3),
            "support": round(estimate.support, 3),
        }
        for policy, mean, own, estimate in zip(_POLICIES, truth, returns, ranked, strict=True)
    ]
    result: dict[str, Any] = (
        json.loads(RANKING.read_text()) if RANKING.exists() else {"format": 1, "runs": {}}
    )
    result["runs"][f"{game}, seed {seed}"] = {
        "spearman": round(correlation, 3),
        "steps": n_steps,
        "episodes": len(returns[0]),
        "minutes_of_ranking": round(minutes, 2),
        "load_average": load_average(),
        "commit": commit(),
        "machine": machine(),
        "policies": rows,
    }
    RANKING.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{game}, seed {seed}: Spearman {correlation:.2f} ({minutes:.1f} minutes)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
