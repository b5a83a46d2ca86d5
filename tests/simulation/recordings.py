"""Recordings of scripted players in a real store: CartPole by its own functions, no env."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from understudy.backends.data import DataFolder
from understudy.core.names import new_session
from understudy.core.signed import Signer
from understudy.experience.chunk import By, Chunk, ChunkMeta, EpisodeNote, RowKind
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.intake import deployment_key
from understudy.experience.spaces import Box
from understudy.experience.ticket import Ticket, TicketSeal
from understudy.games import cartpole
from understudy.ingest.specs import SpecFolder
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.nn.heads import head_for
from understudy.nn.network import Activation, Dense, Input, NetworkSpec
from understudy.nn.policy import Policy
from understudy.ports import Candidate, WriteBatch
from understudy.stores.local import LocalStore
from understudy.testing.clock import START_S, ManualClock

GAME = game_spec("cart", obs=4, actions=2)
CONTINUOUS = game_spec("slide", obs=4, actions=Box((1,), np.dtype(np.float32), -1.0, 1.0))
SIGNER = Signer(bytes(range(32)))
PLAYER = b"player-seventeen"

Plays = Callable[[Any, np.random.Generator], Any]
"""Actions for observations [envs, 4]."""


@dataclass(frozen=True)
class Episode:
    """One cart's episode."""

    obs: Any  # float32[steps + 1, 4]
    action: Any  # int32[steps]
    has_fallen: bool


def person(skill: float = 0.8) -> Plays:
    """Somebody who pushes under the pole, most of the time."""

    def plays(obs: Any, rng: np.random.Generator) -> Any:
        wise = (obs[:, 2] + 0.4 * obs[:, 3] > 0).astype(np.int32)
        return np.where(rng.random(len(obs)) < skill, wise, rng.integers(0, 2, len(obs), np.int32))

    return plays


def episodes(plays: Plays, count: int, *, seed: int = 0, max_steps: int = 500) -> list[Episode]:
    """That many episodes, played side by side."""
    rng = np.random.default_rng(seed)
    state = cartpole.reset_many(np.arange(count) + 1_000 * seed)
    seen = [state.T.astype(np.float32)]
    acted = []
    ends = np.full(count, max_steps)
    for at in range(max_steps):
        acted.append(np.asarray(plays(seen[-1], rng), np.int32))
        state, _, has_ended = cartpole.step(np, state, acted[-1])
        seen.append(state.T.astype(np.float32))
        ends = np.where(has_ended & (ends == max_steps), at + 1, ends)
        if (ends <= at + 1).all():
            break
    obs = np.array(seen)
    action = np.array(acted)
    return [
        Episode(obs[: end + 1, one], action[:end, one], bool(end < max_steps))
        for one, end in enumerate(ends.tolist())
    ]


def returns_of(policy: Policy, count: int, *, seed: int = 0) -> Any:
    """float64[count]: what a policy returns."""
    return np.array([float(len(one.action)) for one in episodes(bot(policy), count, seed=seed)])


def bot(policy: Policy) -> Plays:
    """A policy that plays deterministically."""
    return lambda obs, _: policy.decide({"obs": obs}, None, deterministic=True).action


def chunks_of(
    played: Sequence[Episode],
    session: uuid.UUID,
    *,
    spec: GameSpec = GAME,
    consent: str = "granted",
    model: str | None = None,
    propensity: float | None = None,
    ticket: Callable[[], str] | None = None,
    reward: float = 1.0,
) -> Iterator[Chunk]:
    """A chunk for each episode, by a person, or by a model that is named.

    `ticket` returns one for each; a `propensity` is only stated, as by earlier clients.
    """
    first_step = 0
    for number, one in enumerate(played):
        n = len(one.action)
        action = np.append(one.action, 0).astype(np.int32)
        columns = {
            "obs": one.obs,
            "action": action,
            "reward": np.append(np.full(n, reward), 0).astype(np.float32),
            "is_first": np.arange(n + 1) == 0,
            "terminated": (np.arange(n + 1) == n - 1) & one.has_fallen,
            "truncated": (np.arange(n + 1) == n - 1) & (not one.has_fallen),
            "row": np.append(np.zeros(n), RowKind.FINAL).astype(np.uint8),
            "by": np.append(np.full(n, By.BOT if model else By.PERSON), 0).astype(np.uint8),
        }
        if spec.discrete is None:
            columns["action"] = (columns["action"] * 2.0 - 1).astype(np.float32)[:, None]
            columns["action"][-1] = 0
        meta = ChunkMeta(
            game=spec.game,
            schema=spec.schema,
            session=session,
            chunk_no=number,
            first_step=first_step,
            n_steps=n,
            consent=consent,
            client="recordings/1",
            episodes=(
                EpisodeNote(
                    row=0,
                    model=model,
                    propensity=propensity,
                    ticket=None if ticket is None else ticket(),
                ),
            ),
        )
        first_step += n
        yield Chunk(meta, columns).validate()


@dataclass
class Recording:
    """A data folder with a store that its writer has just left, a registry and a clock."""

    data: DataFolder
    clock: ManualClock = field(default_factory=ManualClock)
    _sessions: int = 0
    _tickets: int = 0

    def registry(self) -> Registry:
        return Registry(
            FolderObjects(self.data.root / "models"),
            trusted={SIGNER.key_id: SIGNER.public},
            signer=SIGNER,
            clock=self.clock,
        )

    @cached_property
    def _gateway(self) -> Registry:
        """The registry of the gateway, which reads each entry of a journal once."""
        return self.registry()

    def ticket(self, model: str, propensity: float, *, spec: GameSpec = GAME, **facts: Any) -> str:
        """A new ticket of the trial that is under way, as a gateway seals it."""
        canary = self._gateway.catalogue(spec.game).pointer("canary", spec.schema)
        self._tickets += 1
        drawn: dict[str, Any] = {
            "entry": canary.number if canary else 1,
            "model_no": int(model.rpartition("/")[2]),
            "propensity": propensity,
            "expires_s": int(self.clock.now()) + 86_400,
            "id": f"{self._tickets:016d}",
        }
        seal = TicketSeal(deployment_key(self.data.root))
        return seal.seal(Ticket(**drawn | facts), game=spec.game, schema=spec.schema)

    def store(self, chunks: Sequence[Chunk], *, player: bytes = PLAYER) -> None:
        """Write chunks as ingest would."""
        with self.open() as store:
            claim = store.claim("test", owner="test", ttl_s=1e6)
            now_s = int(self.clock.now())
            candidates = [
                Candidate(chunk.frame().stamped(player, now_s), chunk) for chunk in chunks
            ]
            receipt = store.write(WriteBatch("test", claim.epoch, None, candidates))
            assert set(receipt.fates) <= {"new"}, receipt

    def open(self) -> LocalStore:
        return LocalStore(self.data.store, specs=SpecFolder(self.data.games))

    def play(
        self,
        plays: Plays,
        count: int,
        *,
        spec: GameSpec = GAME,
        consent: str = "granted",
        model: str | None = None,
        player: bytes = PLAYER,
        max_steps: int = 500,
        reward: float = 1.0,
        obs_scale: Sequence[float] = (1.0,) * 4,
    ) -> int:
        """Let somebody play a session of so many episodes; how many steps that were."""
        self._sessions += 1
        session = new_session(START_S, self._sessions.to_bytes(10, "big"))
        n_numbers = spec.obs_columns["obs"].shape[0]
        played = [
            replace(episode, obs=(episode.obs * np.array(obs_scale, np.float32))[:, :n_numbers])
            for episode in episodes(plays, count, seed=self._sessions, max_steps=max_steps)
        ]
        chunks = chunks_of(played, session, spec=spec, consent=consent, model=model, reward=reward)
        self.store(list(chunks), player=player)
        return sum(len(one.action) for one in played)


def recording(data: DataFolder, *specs: GameSpec) -> Recording:
    """A data folder with a key, in which these games are registered."""
    deployment_key(data.root)
    made = Recording(data)
    for spec in specs or (GAME,):
        made.registry().register(spec)
    return made


def balancing_policy(
    *, angle: float = 1.0, spin: float = 0.0, position: float = 0.0, velocity: float = 0.0
) -> Policy:
    """A small network that pushes by the sign of a sum; with spin, position and velocity it
    never falls."""
    network = NetworkSpec(
        {"obs": Input((4,), np.dtype(np.float32))},
        (Dense(8), Activation("tanh")),
        {"q": (Dense(2),)},
    )
    shapes = network.shapes()
    weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    inner, outer = (
        next(name for name, shape in shapes.items() if shape == wanted)
        for wanted in ((4, 8), (8, 2))
    )
    lean = np.array([position, velocity, angle, spin], np.float32)
    weights[inner][:] = lean[:, None] * np.linspace(0.5, 2.0, 8, dtype=np.float32)
    weights[outer][:] = (
        np.array([-1.0, 1.0], np.float32) * np.linspace(0.5, 1.5, 8, dtype=np.float32)[:, None]
    )
    return Policy(GAME, network, weights, head_for(GAME, "argmax"))


def with_weights(policy: Policy, change: Callable[[Any], Any]) -> Policy:
    """The same network with changed weights."""
    return replace(
        policy, weights={name: change(array.copy()) for name, array in policy.weights.items()}
    )
