"""bench/offline_peers.py without d3rlpy: rows as d3rlpy reads them, resumed runs, verdicts."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import offline_peers
from bench.against.link import pack, unpack
from bench.contestants import REQUIREMENTS
from bench.offline import batch_of, learner_of, recorded, recorded_episodes, returns_at_once
from bench.offline_peers import main, misses, peer_inputs, peer_rows, places, sent_of, train
from bench.people import GAMES, RANDOM, Person
from bench.players import true_returns, truth_chances
from understudy.core.errors import UnderstudyError
from understudy.learn.replay_source import ReplaySource
from understudy.training.train_request import TrainRequest, resolve

each_game = pytest.mark.parametrize("name", ["lander", "vault", "courier", "breakout", "pendulum"])


def transitions_of(rows: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Observation, action, reward, next observation and terminal, as d3rlpy picks them.

    The last row of an episode that did not terminate is no transition.
    """
    picked = []
    first = 0
    for end, terminated in zip(rows["ends"].tolist(), rows["terminated"].tolist(), strict=True):
        for at in range(first, end if terminated else end - 1):
            is_terminal = terminated and at == end - 1
            following = None if is_terminal else rows["observations"][at + 1]
            picked.append(
                (
                    rows["observations"][at],
                    rows["actions"][at],
                    float(rows["rewards"][at, 0]),
                    following,
                    is_terminal,
                )
            )
        first = end
    return picked


@each_game
def test_d3rlpy_picks_exactly_the_recorded_transitions(name):
    game = GAMES[name]
    spec = game.spec()
    episodes = recorded_episodes(game, spec, 700, seed=0)
    rows = peer_rows(spec, episodes)
    picked = transitions_of(rows)
    flat = list(itertools.chain(*episodes))
    assert len(picked) == len(flat) == 700
    for transition, row in zip(picked, flat, strict=True):
        obs, action, reward, next_obs, discount, *_ = row
        inputs, played, earned, following, is_terminal = transition
        one = {column: value[None] for column, value in obs.items()}
        after = {column: value[None] for column, value in next_obs.items()}
        assert (inputs == peer_inputs(spec, one)[0]).all()
        assert played.tolist() == np.ravel(action).tolist()
        assert earned == np.float32(reward)
        assert is_terminal == (discount == 0)
        if not is_terminal:
            assert (following == peer_inputs(spec, after)[0]).all()
    assert len(rows["ends"]) == len(episodes)
    # The last episode is cut, which is no end of the game.
    assert rows["terminated"].tolist() == [episode[-1][4] == 0 for episode in episodes]


def test_observations_are_one_hot_vectors_or_an_image():
    def inputs(name: str, columns: dict[str, Any]) -> Any:
        return peer_inputs(GAMES[name].spec(), columns)

    courier: dict[str, Any] = {
        "obs.map": np.zeros((1, 6, 9), np.int64),
        "obs.robot.battery": np.array([[0.5]], np.float32),
        "obs.robot.cargo": np.array([3]),
        "obs.robot.place": np.array([[2, 7]]),
    }
    courier["obs.map"][0, 0, 1] = 4
    vector = inputs("courier", courier)
    assert vector.shape == (1, 6 * 9 * 9 + 1 + 4 + 2 * 9)
    cells = vector[0, : 6 * 9 * 9].reshape(54, 9)
    assert cells.argmax(1).tolist() == [0, 4, *[0] * 52]
    others = [0.5, *np.eye(4)[3], *np.eye(9)[2], *np.eye(9)[7]]
    assert vector[0, 6 * 9 * 9 :].tolist() == others
    grid = np.random.default_rng(0).integers(0, 2, (2, 10, 10, 4)).astype(np.uint8)
    image = inputs("breakout", {"obs": grid})
    assert image.shape == (2, 4, 10, 10)
    assert image.dtype == np.float32
    assert image[1, 3, 2, 7] == grid[1, 2, 7, 3]
    vault = {"obs.grid": np.ones((1, 7, 7, 6), np.uint8), "obs.status": np.zeros((1, 2))}
    assert inputs("vault", vault).shape == (1, 7 * 7 * 6 + 2)


def test_episodes_are_the_steps_that_were_recorded_before():
    game = GAMES["poker"]
    spec = game.spec()
    episodes = recorded_episodes(game, spec, 300, seed=1)
    steps = recorded(game, spec, 300, seed=1)
    joined = batch_of(spec, itertools.chain(*episodes))
    assert len(joined.action) == 300
    for name in ("action", "reward", "discount", "action_mask", "next_action_mask"):
        assert (getattr(steps, name) == getattr(joined, name)).all()
    assert steps.action_mask.all(1).mean() < 1, "some actions are not valid"


def test_our_learner_gets_the_same_steps():
    game = GAMES["courier"]
    spec = game.spec()
    episodes = recorded_episodes(game, spec, 500, seed=0)
    request = TrainRequest(algorithm="bc", preset="bc-people", settings={"widths": [8]})
    learner = learner_of(spec, resolve(request, spec), sent_of(spec, episodes, seed=0), seed=0)
    assert isinstance(learner.source, ReplaySource)
    assert learner.counts.inserted_steps == 500
    assert len({player for player, _ in sent_of(spec, episodes, seed=0)}) == min(5, len(episodes))


def test_training_stops_at_its_updates_or_seconds():
    class Steps:
        def __init__(self) -> None:
            self.counts = SimpleNamespace(updates=0)
            self.progress = list[float]()

        def step(self, progress: float) -> Any:
            self.progress.append(progress)
            self.counts.updates += 10
            return SimpleNamespace(must_restore=False)

    fast: Any = Steps()
    assert train(fast, updates=40, seconds=9.0, clock=lambda: 0.0) == 0
    assert fast.progress == [0, 0.25, 0.5, 0.75]
    slow: Any = Steps()
    seconds = itertools.count()
    train(slow, updates=1_000, seconds=4.0, clock=lambda: float(next(seconds)))
    assert slow.progress == [0, 0.25, 0.5, 0.75]


def test_all_episodes_at_once_are_the_true_episodes():
    game = GAMES["pendulum"]
    seeds = [int(truth_chances(number).integers(1 << 31)) for number in range(3)]
    at_once = returns_at_once(game, lambda obs, _: np.zeros((len(obs["obs"]), 1)), seeds)

    class Still:
        def player(self) -> Any:
            zero = np.zeros(1, np.float32)
            return SimpleNamespace(reset=lambda: None, act=lambda *_, **__: zero)

    still: Any = Still()
    assert at_once.tolist() == pytest.approx(true_returns(game, still, episodes=3))


def test_masks_reach_the_one_who_chooses():
    game = GAMES["vault"]
    person = Person(game, RANDOM)
    rng = np.random.default_rng(0)

    def choose(obs: Any, mask: Any) -> Any:
        assert mask.shape == (len(obs["obs.grid"]), 6)
        return np.array([person.act(None, rng, action_mask=row) for row in mask])

    assert returns_at_once(game, choose, [1, 2]).shape == (2,)


def test_arrays_travel_as_text():
    for array in (np.array([True, False]), np.ones((2, 3), np.float32), np.arange(3)):
        received = unpack(pack(array))
        assert received.dtype == array.dtype
        assert (received == array).all()


# --- Runs -----------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Replaces every measurement; the list of those made."""
    made = list[str]()

    def row(algorithm: str) -> dict[str, Any]:
        made.append(algorithm)
        fields = {"algorithm": algorithm, "updates": 1, "seconds": 1.0, "inputs": "vector"}
        return fields | {"mean": 1.0, "standard_error": 0.1, "on_scale": 0.5}

    def rates(pair: Any, *_: Any, **__: Any) -> dict[str, Any]:
        made.append(f"{pair.ours} and {pair.peer}")
        sides = {"ours_per_s": [90.0], "peer_per_s": [9.0]}
        return sides | {"ratio": 10.0, "low": 9.0, "high": 11.0}

    monkeypatch.setattr(offline_peers, "Recorded", lambda *_, **__: None)
    monkeypatch.setattr(
        offline_peers, "measure_ours", lambda *_: [row(name) for name in offline_peers.OURS]
    )
    monkeypatch.setattr(offline_peers, "measure_peer", lambda _, name, __: row(name))
    monkeypatch.setattr(offline_peers, "measure_rates", rates)
    monkeypatch.setattr(offline_peers, "commit", lambda: "abc")
    return made


def test_a_second_call_measures_only_what_is_missing(measured, tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    call = ["returns", "--game", "pendulum", "--seeds", "1", "--out", str(out)]
    everything = ["bc", "iql", "released", "BC", "IQL"]
    assert main(call) == 0
    assert measured == everything
    result = json.loads(out.read_text())
    assert [row["algorithm"] for row in result["rows"]] == everything
    assert {row["commit"] for row in result["rows"]} == {"abc"}
    assert result["machine"]["cores"] >= 1
    measured.clear()
    main(call)
    assert measured == []
    main([*call, "--seconds", "60"])
    assert measured == everything, "of another length"
    result["rows"] = [row for row in result["rows"] if row["algorithm"] != "BC"]
    out.write_text(json.dumps(result))
    measured.clear()
    main(call)
    assert measured == ["BC"]
    measured.clear()
    monkeypatch.setattr(offline_peers, "commit", lambda: "def")
    main([*call, "--keep"])
    assert measured == []
    main(call)
    assert measured == everything
    assert len(json.loads(out.read_text())["rows"]) == len(everything), "rows are replaced"
    measured.clear()
    monkeypatch.setattr(offline_peers, "commit", lambda: "def (changed)")
    main(call)
    main(call)
    assert measured == 2 * everything, "changed code has no name"


def test_an_interrupted_run_keeps_its_rows(measured, tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    call = ["returns", "--game", "lander", "--seeds", "2", "--out", str(out)]

    def interrupted(_: Any, name: str, __: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as change:
        change.setattr(offline_peers, "measure_peer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(call)
    assert measured == ["bc", "iql", "released"]
    measured.clear()
    main(call)
    peers = ["DiscreteBC", "DiscreteCQL", "DiscreteBCQ"]
    assert measured == [*peers, "bc", "iql", "released", *peers]


def test_rates_are_kept_too_and_a_quick_run_writes_nothing(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(offline_peers, "RESULT", tmp_path / "record.json")
    main(["--quick", "--game", "breakout"])
    assert measured[-2:] == ["bc and DiscreteBC", "iql and DiscreteCQL"]
    assert not (tmp_path / "record.json").exists()
    main(["rates"])
    assert len(json.loads((tmp_path / "record.json").read_text())["rates"]) == 10
    measured.clear()
    main(["rates"])
    assert measured == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (["--seconds", "0"], "--seconds is 0.0; pass a number of at least 1"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--episodes", "1"], "--episodes is 1"),
        (["--threads", "0"], "--threads is 0"),
        (["--game", "chess"], "invalid choice: 'chess'"),
        (["speed"], "unknown measure 'speed'; give returns or rates"),
    ],
)
def test_bad_arguments_are_rejected(call, says, measured, capsys):
    with pytest.raises(SystemExit):
        main(call)
    assert says in capsys.readouterr().err
    assert measured == []


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"rows": [{"game": "lander"}], "rates": []}'])
def test_a_foreign_result_file_is_not_overwritten(text, measured, tmp_path):
    out = tmp_path / "result.json"
    out.write_text(text)
    with pytest.raises(UnderstudyError, match="not a result of this command"):
        main(["--out", str(out)])
    assert out.read_text() == text
    assert measured == []


@pytest.mark.parametrize(
    ("here", "environment"), [({"d3rlpy", "torch"}, ""), ({"torch"}, "d3rlpy"), (set(), "d3rlpy")]
)
def test_d3rlpy_is_installed_only_if_it_cannot_be_imported_here(here, environment, monkeypatch):
    find = SimpleNamespace(find_spec=lambda name: name if name in here else None)
    monkeypatch.setattr(offline_peers, "importlib", SimpleNamespace(util=find))
    contestant = offline_peers.peer_contestant(threads=2)
    assert (contestant.environment, contestant.threads) == (environment, 2)
    assert (REQUIREMENTS / "d3rlpy.txt").exists()


# --- Verdicts -------------------------------------------------------------------------------------


def test_what_is_released_should_be_the_best_in_three_of_four_games():
    def rows(released: float, *, game: str) -> list[dict[str, Any]]:
        means = {"bc": 9.0, "iql": 9.0, "released": released, "BC": 0.4, "IQL": 0.5}
        return [
            {"game": game, "algorithm": name, "seed": seed, "on_scale": mean + 0.1 * seed}
            for name, mean in means.items()
            for seed in range(2)
        ]

    def missed(*released: float) -> list[str]:
        every = [row for at, mean in enumerate(released) for row in rows(mean, game=f"g{at}")]
        return misses(places(every), [])

    assert places(rows(0.3, game="g"))["g"]["IQL"] == pytest.approx(0.55)
    assert missed(0.5, 0.6, 0.7, 0.1) == []
    assert missed(0.5, 0.6, 0.2, 0.1) == ["below the best of d3rlpy in g2, g3"]


def test_the_lower_end_of_a_ratio_must_reach_its_goal():
    rate = {"game": "lander", "ours": "bc", "peer": "DiscreteBC", "widths": [64, 64], "batch": 64}
    rate |= {"ratio": 8.2, "low": 7.9, "goal": 8.0}
    assert misses({}, [rate]) == [
        "lander bc and DiscreteBC, 64-64, batch 64: 8.2 times, the goal is 8"
    ]
    assert misses({}, [rate | {"low": 8.0}, rate | {"goal": None}]) == []
