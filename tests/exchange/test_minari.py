"""Minari: complete episodes that its own reader opens, exported and imported."""

import json
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage

import understudy
from tests.exchange.exports import (
    from_parquet,
    is_untouched,
    random_chunks,
    recorded,
    stored,
    to_minari,
    to_parquet,
)
from tests.simulation.recordings import GAME, chunks_of, episodes, person, recording
from understudy.backends.data import DataFolder
from understudy.cli.root import run as run_command
from understudy.core.errors import ConfigError, SpecError
from understudy.core.names import game_name, new_session
from understudy.exchange.destination import Destination
from understudy.exchange.importing import Imported, import_files
from understudy.exchange.incoming import ImportedEpisode, content_session_id
from understudy.exchange.incoming import chunks_of as episode_chunks
from understudy.exchange.minari import MinariDataset, dataset_name, flattened
from understudy.experience.chunk import Chunk, EpisodeNote, RowKind
from understudy.experience.game import game_spec, spec_from_gymnasium
from understudy.experience.intake import deployment_key
from understudy.experience.spaces import Box
from understudy.testing.clock import START_S
from understudy.training.evaluation import evaluate_run
from understudy.training.recorded_env import _arguments

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:gymnasium", "ignore::UserWarning:minari"
)


def from_minari(
    data: DataFolder, path: Path, *, game: str | None = None, consent: str = "granted"
) -> Imported:
    return import_files(
        Destination(data),
        [MinariDataset(path, game=None if game is None else game_name(game), consent=consent)],
    )


def bits(path: Path) -> list[tuple[Any, ...]]:
    """A dataset's episodes as bits, whatever their order."""
    found = []
    for one in minari.MinariDataset(path / "data"):
        arrays = {
            **flattened(one.observations, "obs"),
            **flattened(one.actions, "action"),
            **(one.infos or {}),
        }
        columns = tuple(
            (name, arrays[name].dtype, arrays[name].tobytes()) for name in sorted(arrays)
        )
        found.append(
            (one.rewards.tobytes(), one.terminations.tobytes(), one.truncations.tobytes(), *columns)
        )
    return sorted(found, key=str)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32 - 1))
def test_complete_episodes_of_any_game_are_exported_and_imported(
    quick_path: Path, seed: int
) -> None:
    root = quick_path / f"{seed}-{len(list(quick_path.iterdir()))}"
    root.mkdir()
    spec, chunks = random_chunks(seed, n_sessions=3)
    data = recorded(root / "before", spec, chunks)
    expected = list(whole_episodes(chunks))
    with suppress(ConfigError):
        written = to_minari(data, root / "a-v0")
        dataset = minari.MinariDataset(root / "a-v0" / "data")
        assert (len(dataset), dataset.total_steps) == (
            written.written.episodes,
            written.written.steps,
        )
        assert sorted(one.rewards.tobytes() for one in dataset) == sorted(expected)
        for one in dataset:
            assert {len(rows) for rows in flattened(one.observations, "obs").values()} == {
                len(one) + 1
            }
        result = from_minari(DataFolder(root / "after"), root / "a-v0")
        assert (result.stored_steps, result.refused_steps) == (written.written.steps, 0)
        assert result.schema == spec.schema
        to_minari(DataFolder(root / "after"), root / "b-v0")
        assert bits(root / "a-v0") == bits(root / "b-v0")
        return
    assert expected == []


def whole_episodes(chunks: list[Chunk]) -> Iterator[bytes]:
    """The rewards of each episode that begins and ends, by walking the rows of one session after
    the other."""
    rewards: list[Any] | None = None
    session: uuid.UUID | None = None
    for chunk in sorted(chunks, key=lambda one: (one.meta.session.bytes, one.meta.chunk_no)):
        if chunk.meta.session != session:
            session = chunk.meta.session
            rewards = None
        columns = chunk.columns
        for row in range(chunk.n_rows):
            if columns["row"][row] == RowKind.STEP:
                rewards = [] if columns["is_first"][row] else rewards
                if rewards is not None:
                    rewards.append(columns["reward"][row])
            elif columns["row"][row] == RowKind.FINAL:
                if rewards is not None:
                    yield np.array(rewards, np.float32).tobytes()
                rewards = None
            elif row < chunk.n_rows - 1:
                rewards = None


def test_minari_loads_it_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recording(DataFolder(tmp_path / "D"))
    steps = made.play(person(0.2), 4, model="cart/3")
    written = to_minari(made.data, tmp_path / "people-v0")
    assert (written.dataset_id, written.written.steps, written.written.episodes) == (
        "people-v0",
        steps,
        4,
    )
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    dataset = minari.load_dataset("people-v0")
    assert dataset.total_steps == steps
    assert isinstance(dataset.observation_space, gymnasium.spaces.Box)
    one = dataset[0]
    assert one.observations.shape == (len(one) + 1, 4)
    assert one.terminations[-1] or one.truncations[-1]
    assert set(one.infos["by"]) == {2}
    facts = next(iter(dataset.storage.get_episode_metadata([0])))
    assert (facts["model"], facts["consent"]) == ("cart/3", "granted")
    assert len(dataset.sample_episodes(2)) == 2


def test_incomplete_episodes_are_counted_and_left_out(tmp_path: Path) -> None:
    played = episodes(person(0.2), 6)
    made = recording(DataFolder(tmp_path / "D"))
    session = new_session(START_S, b"0123456789")
    chunks = list(chunks_of(played, session))
    cut = opened(chunks[1], is_cut=True)
    # chunk 3 is lost
    torn = opened(chunks[2], is_cut=False)
    rest = chunks[4]
    unfinished = opened(chunks[5], is_cut=False)
    made.store([chunks[0], cut, torn, rest, unfinished])
    written = to_minari(made.data, tmp_path / "a-v0")
    assert written.written.episodes == 2
    assert written.omitted == {"cut": 1, "unfinished": 1, "gaps": 1}


def opened(chunk: Chunk, *, is_cut: bool) -> Chunk:
    """The same steps without the end of the episode."""
    columns = {name: column.copy() for name, column in chunk.columns.items()}
    columns["terminated"][:] = columns["truncated"][:] = False
    columns["row"][-1] = RowKind.BOOTSTRAP
    return Chunk(
        replace(chunk.meta, episodes=(EpisodeNote(row=0, cut=is_cut),)), columns
    ).validate()


def test_a_store_without_a_complete_episode_is_not_exported(tmp_path: Path) -> None:
    made = recording(DataFolder(tmp_path / "D"))
    (chunk,) = chunks_of(episodes(person(), 1), new_session(START_S, b"0123456789"))
    made.store([opened(chunk, is_cut=True)])
    with pytest.raises(ConfigError, match="no episode is complete"):
        to_minari(made.data, tmp_path / "a-v0")
    assert [path.name for path in tmp_path.iterdir()] == ["D"]


def test_steps_without_consent_are_not_in_a_dataset_by_default_of_the_command(
    tmp_path: Path,
) -> None:
    made = recording(DataFolder(tmp_path / "D"))
    steps = made.play(person(0.2), 1)
    made.play(person(0.2), 2, consent="denied")
    assert to_minari(made.data, tmp_path / "a-v0", consent=("granted",)).written.steps == steps


def test_long_episodes_span_chunks_and_stay_complete(tmp_path: Path) -> None:
    path = foreign(tmp_path / "long-v0", lengths=[1500])
    data = DataFolder(tmp_path / "D")
    assert from_minari(data, path, game="walk").stored_steps == 1500
    assert [chunk.meta.n_steps for chunk in stored(data)] == [512, 512, 476]
    to_minari(data, tmp_path / "again-v0")
    (one,), (other,) = (
        minari.MinariDataset(path / "data"),
        minari.MinariDataset(tmp_path / "again-v0" / "data"),
    )
    assert (one.observations["pos"].astype(np.float32) == other.observations["pos"]).all()
    assert (one.actions == other.actions).all()


def foreign(path: Path, *, lengths: list[int], **changes: Any) -> Path:
    """A dataset as Minari's users make them: Dict observations, 64-bit rewards, infos of their
    own."""
    rng = np.random.default_rng(0)
    path.mkdir()
    storage = MinariStorage.new(
        path / "data",
        observation_space=gymnasium.spaces.Dict(
            {
                "pos": gymnasium.spaces.Box(-9, 9, (2,), np.float32),
                "room": gymnasium.spaces.Discrete(5),
            }
        ),
        action_space=gymnasium.spaces.Box(-1, 1, (3,), np.float32),
    )
    buffers = []
    for n in lengths:
        fields: dict[str, Any] = {
            "observations": {
                "pos": rng.uniform(-1, 1, (n + 1, 2)).astype(np.float32),
                "room": rng.integers(0, 5, n + 1),
            },
            "actions": rng.uniform(-1, 1, (n, 3)).astype(np.float32),
            "rewards": rng.normal(size=n),
            "terminations": np.zeros(n, bool),
            "truncations": np.arange(n) == n - 1,
            "infos": {"seen": np.arange(n + 1)},
        }
        buffers.append(EpisodeBuffer(id=None, seed=7, options=None, **{**fields, **changes}))
    storage.update_episodes(buffers)
    storage.update_metadata({"dataset_id": path.name, "minari_version": minari.__version__})
    return path


def test_datasets_of_other_programs_are_imported(tmp_path: Path) -> None:
    path = foreign(tmp_path / "walk-v0", lengths=[3, 5, 3])
    data = DataFolder(tmp_path / "D")
    with pytest.raises(ConfigError, match="--game"):
        from_minari(data, path)
    result = from_minari(data, path, game="walk", consent="unknown")
    assert (result.stored_steps, result.sessions, result.to_json()["episodes"]) == (11, 3, 3)
    assert from_minari(data, path / "data", game="walk").there_steps == 11
    assert from_minari(data, path / "data" / "main_data.hdf5", game="walk").stored_steps == 0
    one = stored(data)[0]
    assert (one.meta.consent, one.meta.client, one.meta.episodes[0].seed) == (
        "unknown",
        "minari-import/1",
        7,
    )
    assert one.columns["obs.pos"].dtype == np.float32
    assert one.columns["obs.room"].dtype == np.int64


def collected(path: Path, **make: Any) -> Path:
    """A dataset of CartPole-v1 that names its env, as those of Minari's collector do."""
    env = gymnasium.make("CartPole-v1", **make)
    path.mkdir()
    storage = MinariStorage.new(path / "data", env_spec=env.spec)
    buffers = []
    for seed in range(3):
        observations = [env.reset(seed=seed)[0]]
        steps: list[tuple[Any, ...]] = []
        while not steps or not any(steps[-1][2:]):
            action = env.action_space.sample()
            obs, *outcome, _ = env.step(action)
            observations.append(obs)
            steps.append((action, *outcome))
        actions, rewards, terminations, truncations = map(np.array, zip(*steps, strict=True))
        buffers.append(
            EpisodeBuffer(
                id=None,
                seed=seed,
                options=None,
                infos=None,
                observations=np.array(observations),
                actions=actions,
                rewards=rewards,
                terminations=terminations,
                truncations=truncations,
            )
        )
    storage.update_episodes(buffers)
    storage.update_metadata({"dataset_id": path.name, "minari_version": minari.__version__})
    return path


def test_a_collected_dataset_keeps_the_name_and_step_limit_of_its_env(tmp_path: Path) -> None:
    path = collected(tmp_path / "cart-v0")
    data = DataFolder(tmp_path / "D")
    result = from_minari(data, path)
    spec = spec_from_gymnasium(gymnasium.make("CartPole-v1"))
    assert (result.game, result.schema) == ("CartPole-v1", spec.schema)
    limited = MinariDataset(
        collected(tmp_path / "short-v0", max_episode_steps=9), game=None, consent="granted"
    )
    assert limited.spec.max_episode_steps == 9
    renamed = MinariDataset(path, game=game_name("pole"), consent="granted")
    assert (renamed.spec.game, renamed.spec.max_episode_steps) == ("pole", 500)


def test_a_run_on_a_collected_dataset_is_evaluated_or_tells_why_not(tmp_path: Path) -> None:
    path = collected(tmp_path / "cart-v0")
    data = DataFolder(tmp_path / "D")
    from_minari(data, path)
    asked: dict[str, Any] = {
        "algorithm": "bc",
        "steps": 128,
        "settings": {"eval_episodes": 5},
        "options": understudy.TrainOptions(from_store=data.root),
    }
    run = understudy.train("CartPole-v1", out=tmp_path / "R", **asked)
    assert run.result["return_mean"] > 0
    assert evaluate_run(run.folder, episodes=2, seeds=1).played == 2
    from_minari(data, path, game="pole")
    unknown = understudy.train("pole", out=tmp_path / "S", **asked)
    assert unknown.result["return_mean"] is None
    why = "pole has no Gymnasium env here that the policy could play"
    assert unknown.result["why_no_return"] == why


def test_a_run_on_a_dataset_of_an_env_with_arguments_is_evaluated_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = {"sutton_barto_reward": True}
    path = collected(tmp_path / "cart-v0", render_mode="rgb_array", **kwargs)
    data = DataFolder(tmp_path / "D")
    command = ["data", "import", str(path), "--data", str(data.root), "--format", "minari"]
    assert run_command([*command, "--consent", "granted"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert """train with: --env-kwargs '{"sutton_barto_reward": true}'""" in shown
    assert from_minari(data, path).to_json()["env_kwargs"] == kwargs

    def run(name: str, **options: Any) -> Any:
        return understudy.train(
            "CartPole-v1",
            out=tmp_path / name,
            algorithm="bc",
            steps=128,
            settings={"eval_episodes": 5},
            options=understudy.TrainOptions(from_store=data.root, **options),
        )

    says = r"""pass --env-kwargs '{"sutton_barto_reward":true}'"""
    with pytest.raises(ConfigError, match=f"recorded in an env with arguments.*{says}"):
        run("R")
    assert not (tmp_path / "R").exists()
    same = run("S", env_kwargs=kwargs)
    assert -1 <= same.result["return_mean"] <= 0, "each failure costs 1, and nothing else pays"
    assert evaluate_run(same.folder, episodes=2, seeds=1).mean <= 0
    assert run("T", env_kwargs={"sutton_barto_reward": False}).result["return_mean"] > 1


def test_arguments_of_an_env_that_are_too_long_to_store_are_asked_for(tmp_path: Path) -> None:
    path = collected(tmp_path / "cart-v0")
    data = DataFolder(tmp_path / "D")
    kwargs = {"maze_map": [[1] * 9] * 9}
    say(
        path / "data" / "metadata.json",
        env_spec=json.dumps({"id": "CartPole-v1", "max_episode_steps": 500, "kwargs": kwargs}),
    )
    assert from_minari(data, path).to_json()["env_kwargs"] == kwargs
    with pytest.raises(ConfigError, match=r"too long to be stored.*--env-kwargs"):
        understudy.train(
            "CartPole-v1",
            out=tmp_path / "R",
            options=understudy.TrainOptions(from_store=data.root),
        )


@pytest.mark.parametrize("text", ["{}", "[1]", "x", '{"a":NaN}', ""])
def test_a_client_that_notes_no_arguments_is_asked_for_none(text: str) -> None:
    assert _arguments(f"minari-import/1 {text}") == ""
    assert _arguments('understudy-python/1 {"a":1}') == ""
    assert "--env-kwargs" in _arguments('minari-import/1 {"a":1}')


@pytest.mark.parametrize("kwargs", ["null", "[]", "7", "{}", '{"render_mode":"human"}'])
def test_an_env_without_arguments_leaves_no_mark(kwargs: str, tmp_path: Path) -> None:
    path = collected(tmp_path / "cart-v0")
    env_spec = f'{{"id": "CartPole-v1", "kwargs": {kwargs}}}'
    say(path / "data" / "metadata.json", env_spec=env_spec)
    dataset = MinariDataset(path, game=None, consent="granted")
    assert {chunk.meta.client for chunk, _ in dataset.chunks()} == {"minari-import/1"}
    assert "env_kwargs" not in dataset.report()


@pytest.mark.parametrize(
    "env_spec",
    [
        None,
        7,
        "",
        "{",
        "[]",
        "[" * 20_000,
        "{}",
        '{"id": null}',
        '{"id": ""}',
        '{"id": "../up"}',
        '{"max_episode_steps": 9}',
    ],
)
def test_a_dataset_whose_env_has_no_name_needs_one(env_spec: Any, tmp_path: Path) -> None:
    path = foreign(tmp_path / "walk-v0", lengths=[3])
    say(path / "data" / "metadata.json", env_spec=env_spec)
    with pytest.raises(ConfigError, match="does not name its game; pass --game NAME"):
        MinariDataset(path, game=None, consent="granted")
    assert MinariDataset(path, game=game_name("walk"), consent="granted").spec.game == "walk"


@pytest.mark.parametrize("limit", ["null", "0", "-1", "true", "1.5", '"9"'])
def test_a_step_limit_that_is_none_is_left_out(limit: str, tmp_path: Path) -> None:
    path = foreign(tmp_path / "walk-v0", lengths=[3])
    env_spec = f'{{"id": "maze/Walk-v0", "max_episode_steps": {limit}}}'
    say(path / "data" / "metadata.json", env_spec=env_spec)
    spec = MinariDataset(path, game=None, consent="granted").spec
    assert (spec.game, spec.max_episode_steps) == ("maze-Walk-v0", None)


def test_equal_episodes_are_all_stored(tmp_path: Path) -> None:
    observations = {"pos": np.zeros((3, 2), np.float32), "room": np.zeros(3, int)}
    actions = np.zeros((2, 3), np.float32)
    rewards = np.ones(2)
    path = foreign(
        tmp_path / "walk-v0",
        lengths=[2, 2, 2],
        observations=observations,
        actions=actions,
        rewards=rewards,
    )
    data = DataFolder(tmp_path / "D")
    assert from_minari(data, path, game="walk").stored_steps == 6
    assert from_minari(data, path, game="walk").stored_steps == 0


def test_images_are_kept_pixel_for_pixel(tmp_path: Path) -> None:
    spec = game_spec("screen", obs=Box((84, 84, 3), np.dtype(np.uint8)), actions=3)
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 256, (41, 84, 84, 3), np.uint8)
    n = 40
    episode = ImportedEpisode(
        session=content_session_id("screen"),
        obs={"obs": obs},
        action={"action": rng.integers(0, 3, n).astype(np.int32)},
        reward=np.ones(n, np.float32),
        terminated=True,
        truncated=False,
    )
    chunks = list(episode_chunks(episode, spec, consent="granted", client="test"))
    assert len(chunks) > 1  # noise does not shrink, so that it takes several frames
    assert [one.meta.chunk_no for one in chunks] == list(range(len(chunks)))
    data = recorded(tmp_path / "D", spec, chunks)
    to_minari(data, tmp_path / "a-v0")
    (one,) = minari.MinariDataset(tmp_path / "a-v0" / "data")
    assert (one.observations == obs).all()
    from_minari(DataFolder(tmp_path / "E"), tmp_path / "a-v0")
    to_parquet(DataFolder(tmp_path / "E"), tmp_path / "a.parquet")
    from_parquet(DataFolder(tmp_path / "F"), tmp_path / "a.parquet")
    rows = [one.columns["obs"][:-1] for one in stored(DataFolder(tmp_path / "F"))]
    assert (np.concatenate(rows) == obs[:-1]).all()


def test_an_episode_without_an_end_is_cut(tmp_path: Path) -> None:
    path = foreign(tmp_path / "walk-v0", lengths=[4], truncations=np.zeros(4, bool))
    data = DataFolder(tmp_path / "D")
    assert from_minari(data, path, game="walk").to_json()["episodes_without_end"] == 1
    assert stored(data)[0].meta.episodes[0].cut


def say(metadata: Path, **fields: Any) -> None:
    """Change a dataset's metadata."""
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), **fields}))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "no metadata.json"),
        ("an empty folder", "no metadata.json"),
        ("no HDF5", "not a readable Minari"),
        ("truncated", "not a readable Minari"),
        ("empty file", "not a readable"),
        ("bad metadata", "not a readable Minari"),
        ("arrow", "Minari #351"),
        ("NaN", "not_finite"),
        ("too few observations", "bad_shape"),
        ("steps after its end", "has steps after"),
        ("an action outside", "bad_action"),
        ("no episodes", "no steps"),
        ("no spaces", "not a readable Minari"),
        ("an episode too few", "lists 2 episodes, but it holds 1"),
        ("no count", "'total_episodes' is missing"),
        ("a count in words", "lists many episodes"),
        ("a name too long", "must be text of at most 128 characters"),
        ("a bad spec", "no readable game spec"),
    ],
)
def test_a_bad_dataset_is_rejected_in_one_line_and_nothing_is_stored(
    tmp_path: Path, what: str, said: str
) -> None:
    bad: dict[str, dict[str, Any]] = {
        "NaN": {"rewards": np.array([1.0, np.nan, 1.0])},
        "too few observations": {"rewards": np.ones(4)},
        "steps after its end": {"terminations": np.array([True, False, False])},
        "an action outside": {"actions": np.full((3, 3), 7, np.float32)},
    }
    path = foreign(
        tmp_path / "walk-v0", lengths=[] if what == "no episodes" else [3], **bad.get(what, {})
    )
    main = path / "data" / "main_data.hdf5"
    metadata = path / "data" / "metadata.json"
    match what:
        case "missing":
            path = tmp_path / "nothing"
        case "an empty folder":
            path = tmp_path / "empty"
            path.mkdir()
        case "no HDF5":
            main.write_text("no HDF5 at all")
        case "truncated":
            main.write_bytes(main.read_bytes()[:3000])
        case "empty file":
            main.write_bytes(b"")
        case "bad metadata":
            metadata.write_text("{")
        case "arrow":
            say(metadata, data_format="arrow")
        case "no spaces":
            say(metadata, observation_space=None)
        case "an episode too few":
            say(metadata, total_episodes=2)
        case "no count":
            fields = json.loads(metadata.read_text())
            del fields["total_episodes"]
            metadata.write_text(json.dumps(fields))
        case "a count in words":
            say(metadata, total_episodes="many")
        case "a bad spec":
            say(metadata, understudy_spec="{")
        case "a name too long":
            with h5py.File(main, "r+") as file:
                file["episode_0"].attrs["model"] = "x" * 5_000
    data = DataFolder(tmp_path / "D")
    with pytest.raises(ConfigError) as caught:
        from_minari(data, path, game="walk")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert is_untouched(data)


def test_unsupported_spaces_are_reported(tmp_path: Path) -> None:
    path = foreign(tmp_path / "walk-v0", lengths=[3])
    metadata = path / "data" / "metadata.json"
    text = {"type": "Text", "max_length": 5, "min_length": 0, "charset": "ab"}
    metadata.write_text(
        json.dumps({**json.loads(metadata.read_text()), "observation_space": json.dumps(text)})
    )
    with pytest.raises(SpecError, match="Text space"):
        from_minari(DataFolder(tmp_path / "D"), path, game="walk")


@pytest.mark.parametrize(
    ("name", "dataset_id"), [("a-v3", "a-v3"), ("out", "out-v0"), ("my.data", "my-data-v0")]
)
def test_any_folder_name_becomes_a_valid_dataset_id(name: str, dataset_id: str) -> None:
    assert dataset_name(Path("x") / name) == dataset_id


def test_our_own_dataset_names_its_game_and_the_exported_sessions(tmp_path: Path) -> None:
    deployment_key(tmp_path / "D")
    made = recording(DataFolder(tmp_path / "D"))
    steps = made.play(person(0.2), 3)
    to_minari(made.data, tmp_path / "a-v0")
    assert from_minari(made.data, tmp_path / "a-v0").there_steps == steps
    elsewhere = DataFolder(tmp_path / "E")
    assert from_minari(elsewhere, tmp_path / "a-v0").schema == GAME.schema
    assert from_minari(elsewhere, tmp_path / "a-v0", game="other").game == "other"
