"""The original pipeline's records: sorted, deduplicated, the shift repaired or kept."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exchange.exports import is_untouched, stored, to_parquet
from understudy.backends.data import DataFolder
from understudy.core.errors import ConfigError
from understudy.core.names import game_name
from understudy.exchange.destination import Destination
from understudy.exchange.importing import Imported, import_files
from understudy.exchange.parquet import ParquetFile
from understudy.exchange.seed_a import SeedA, SeedOptions
from understudy.experience.chunk import Chunk, RowKind
from understudy.ingest.specs import SpecFolder
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.platform.config import Config, LearnerSection
from understudy.replay import ReplayConfig
from understudy.testing.clock import ManualClock
from understudy.training.follower import StoreFollower
from understudy.training.from_store import FromStore

GAME_ID = "CartPole-v0"


def trajectory(episode: int, n: int) -> list[np.ndarray[Any, Any]]:
    """float64[n + 1, 4]: the true states of an episode, cut at ten decimals as the pipeline did."""
    rng = np.random.default_rng(episode)
    return list(rng.uniform(-1, 1, (n + 1, 4)).astype(np.float32).astype(np.float64).round(10))


def records(
    episode: int, n: int, *, is_done: bool = True, game_id: str = GAME_ID
) -> list[dict[str, Any]]:
    """What the pipeline wrote for an episode: `state` is already the one after the action."""
    states = trajectory(episode, n)
    return [
        {
            "episode": episode,
            "step": at,
            "state": states[at + 1].tolist(),
            "action": at % 2,
            "reward": 1.0,
            "next_state": states[at + 1].tolist(),
            "done": is_done and at == n - 1,
            "game_id": game_id,
        }
        for at in range(n)
    ]


def written(path: Path, rows: list[dict[str, Any]], *, as_arrays: bool = True) -> Path:
    path.write_text("".join(json.dumps([row] if as_arrays else row) + "\n" for row in rows))
    return path


def imported(
    data: DataFolder, *paths: Path, mode: str = "repair-shift", **options: Any
) -> Imported:
    if "game" in options:
        options["game"] = game_name(options["game"])
    made = SeedOptions(mode=mode, **{"consent": "granted", **options})  # type: ignore[arg-type]
    return import_files(Destination(data), [SeedA(paths, made, registered=Destination(data).specs)])


def by_length(data: DataFolder) -> dict[int, Chunk]:
    return {chunk.meta.n_steps: chunk for chunk in stored(data)}


def test_the_shift_is_repaired_and_the_first_step_of_each_episode_is_lost(tmp_path: Path) -> None:
    rows = [*records(0, 8), *records(1, 5)]
    doubled = [*rows, *rows[3:9]]
    random.Random(0).shuffle(doubled)
    data = DataFolder(tmp_path / "D")
    result = imported(data, written(tmp_path / "a.jsonl", doubled))
    fields = result.to_json()
    assert (fields["records"], fields["duplicates"], fields["episodes"]) == (19, 6, 2)
    assert (fields["lost_first_steps"], fields["stored_steps"], fields["derived_truncations"]) == (
        2,
        11,
        0,
    )
    assert fields["game_id"] == fields["game"] == GAME_ID
    for episode, n in ((0, 8), (1, 5)):
        chunk = by_length(data)[n - 1]
        states = np.array(trajectory(episode, n), np.float32)
        # (state[t-1], action[t], reward[t], state[t]), for t from 1
        assert (chunk.columns["obs"] == states[1:]).all()
        assert chunk.columns["action"][:-1].tolist() == [at % 2 for at in range(1, n)]
        assert chunk.columns["terminated"].tolist() == [*[False] * (n - 2), True, False]
        assert (chunk.meta.consent, chunk.meta.client) == ("granted", "seed-a-import/1")
    engine = learner(data, by_length(data)[7])
    engine.follow()
    assert (engine.n_usable, engine.left_out_chunks) == (11, 0)
    engine.close()


def test_objects_arrays_of_one_and_single_files_are_the_same(tmp_path: Path) -> None:
    rows = records(0, 6)
    forms = [
        written(tmp_path / "arrays.jsonl", rows),
        written(tmp_path / "objects.jsonl", rows, as_arrays=False),
    ]
    forms.append(tmp_path / "one-line.json")
    forms[-1].write_text("".join(json.dumps([row]) for row in rows))
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.json").write_text(json.dumps([row], indent=2))
    data = DataFolder(tmp_path / "D")
    assert imported(data, *(tmp_path / f"{number}.json" for number in range(6))).stored_steps == 5
    for path in forms:
        assert imported(data, path).stored_steps == 0


def test_a_longer_dump_adds_only_new_records(tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "D")
    assert imported(data, written(tmp_path / "a.jsonl", records(0, 6))).stored_steps == 5
    grown = written(tmp_path / "b.jsonl", [*records(0, 6), *records(1, 4)])
    result = imported(data, grown)
    assert (result.stored_steps, result.there_steps) == (3, 5)


def test_an_end_at_the_limit_is_a_truncation_and_flagged_as_derived(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [*records(0, 200), *records(1, 199)])
    data = DataFolder(tmp_path / "D")
    fields = imported(data, path).to_json()  # CartPole-v0 stops at 200 by itself, says Gymnasium
    assert (fields["spec_is_from"], fields["limit"], fields["derived_truncations"]) == (
        "gymnasium",
        200,
        1,
    )
    at_limit = by_length(data)[199].columns
    before = by_length(data)[198].columns
    assert (at_limit["truncated"].sum(), at_limit["terminated"].sum()) == (1, 0)
    assert (before["truncated"].sum(), before["terminated"].sum()) == (0, 1)
    fields = imported(DataFolder(tmp_path / "E"), path, game="old-cart", limit=199).to_json()
    assert (fields["spec_is_from"], fields["limit"], fields["derived_truncations"]) == (
        "records",
        199,
        1,
    )
    fields = imported(DataFolder(tmp_path / "F"), path, game="old-cart").to_json()
    assert (fields["limit"], fields["derived_truncations"]) == (None, 0)


def learner(data: DataFolder, chunk: Chunk, **how: Any) -> FromStore:
    """A learner as it is by default, or with other settings of its engine."""
    spec = SpecFolder(data.games).spec(chunk.meta.game, chunk.meta.schema)
    assert spec is not None
    config = LearnerConfig(limiter=None, updates_per_call=4, replay=ReplayConfig(capacity=512))
    made = Learner(
        Dqn(spec, DqnConfig(widths=(8,), batch=8)), DqnKnobs(), root_seed=0, config=config
    )
    return FromStore(
        made,
        StoreFollower(data.store),
        steps=8,
        clock=ManualClock(),
        on_event=lambda _: None,
        **how,
    )


def test_records_stored_as_they_are_are_marked_and_no_learner_reads_them(tmp_path: Path) -> None:
    rows = [*records(0, 8), *records(1, 5)]
    data = DataFolder(tmp_path / "D")
    fields = imported(
        data, written(tmp_path / "a.jsonl", rows), mode="as-is", consent="granted"
    ).to_json()
    assert (fields["stored_steps"], fields["lost_first_steps"], fields["mode"]) == (13, 0, "as-is")
    chunk = by_length(data)[8]
    states = np.array(trajectory(0, 8), np.float32)
    assert (chunk.columns["obs"] == [*states[1:], states[-1]]).all()
    assert (chunk.meta.consent, chunk.meta.client) == ("denied", "seed-a-import/1 misaligned")
    # A learner leaves them out as it is by default; one that asks for them finds them.
    engine = learner(data, chunk)
    engine.follow()
    assert (engine.n_usable, engine.left_out_chunks) == (0, 2)
    engine.close()
    engine = learner(data, chunk, learn_from=("denied",))
    engine.follow()
    assert (engine.n_usable, engine.left_out_chunks) == (13, 0)
    engine.close()
    # No setting of a platform lets them in.
    with pytest.raises(ConfigError, match="learn_from"):
        Config(data=str(data.root), learner=LearnerSection(learn_from=("denied",))).check()
    # The mark travels, whatever consent is named on the way.
    to_parquet(data, tmp_path / "a.parquet")
    elsewhere = DataFolder(tmp_path / "E")
    import_files(Destination(elsewhere), [ParquetFile(tmp_path / "a.parquet", consent="granted")])
    assert {one.meta.consent for one in stored(elsewhere)} == {"denied"}
    assert {one.meta.client for one in stored(elsewhere)} == {"seed-a-import/1 misaligned"}


def test_records_may_be_stored_in_both_modes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", records(0, 8))
    data = DataFolder(tmp_path / "D")
    assert imported(data, path, mode="as-is").stored_steps == 8
    assert imported(data, path).stored_steps == 7
    engine = learner(data, by_length(data)[7])
    engine.follow()
    assert (engine.n_usable, engine.left_out_chunks) == (7, 1)
    engine.close()


def test_an_episode_with_conflicting_records_is_rejected_by_number(tmp_path: Path) -> None:
    rows = [*records(0, 6), *records(1, 6), *records(2, 6)]
    rows.append({**rows[2], "reward": 7.0})
    rows[8] = {**rows[8], "done": True}
    data = DataFolder(tmp_path / "D")
    fields = imported(data, written(tmp_path / "a.jsonl", rows)).to_json()
    assert fields["refused_episodes"] == {
        "episode 0": "step 2 has two different records",
        "episode 1": "step 5 follows step 2, which is done",
    }
    assert (fields["episodes"], fields["stored_steps"]) == (1, 5)


def test_missing_records_split_an_episode(tmp_path: Path) -> None:
    rows = records(0, 10)
    data = DataFolder(tmp_path / "D")
    fields = imported(
        data, written(tmp_path / "a.jsonl", [*rows[:4], *rows[5:8], rows[9]])
    ).to_json()
    # Steps 0-3 give three transitions, 5-7 two, and 9 alone none.
    assert (fields["gaps"], fields["lost_first_steps"], fields["stored_steps"]) == (2, 3, 5)
    assert all(
        chunk.meta.episodes[0].cut and chunk.columns["row"][-1] == RowKind.BOOTSTRAP
        for chunk in stored(data)
    )


@pytest.mark.parametrize("size", [1, 3, 17])
def test_states_of_any_length_are_accepted(tmp_path: Path, size: int) -> None:
    rows = [
        {**one, "state": [0.5] * size, "next_state": [0.5] * size}
        for one in records(0, 4, game_id="own")
    ]
    data = DataFolder(tmp_path / "D")
    assert imported(data, written(tmp_path / "a.jsonl", rows)).stored_steps == 3
    assert stored(data)[0].columns["obs"].shape == (4, size)


def test_any_game_id_is_mapped_or_rejected_and_never_changed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", records(0, 4, game_id="a:b,c"))
    with pytest.raises(
        ConfigError, match="'a:b,c' is not a valid game name; pass another name with --game"
    ):
        imported(DataFolder(tmp_path / "D"), path)
    fields = imported(DataFolder(tmp_path / "D"), path, game="abc").to_json()
    assert (fields["game"], fields["game_id"], fields["stored_steps"]) == ("abc", "a:b,c", 3)
    both = written(tmp_path / "b.jsonl", [*records(0, 4), *records(0, 5, game_id="a:b,c")])
    with pytest.raises(ConfigError, match=r"several games \('CartPole-v0', 'a:b,c'\)"):
        imported(DataFolder(tmp_path / "E"), both, game="abc")
    assert imported(DataFolder(tmp_path / "E"), both, game="abc", game_id="a:b,c").stored_steps == 4
    with pytest.raises(ConfigError, match="no record has the game id 'x'"):
        imported(DataFolder(tmp_path / "E"), both, game_id="x")


def test_a_registered_spec_is_used_if_it_fits(tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "D")
    path = written(tmp_path / "a.jsonl", records(0, 6, game_id="own"))
    first = imported(data, path, actions=5).to_json()
    assert first["spec_is_from"] == "records"
    other = written(tmp_path / "b.jsonl", records(1, 7, game_id="own"))
    again = imported(data, other).to_json()
    assert (again["spec_is_from"], again["schema"]) == ("registered", first["schema"])
    wide = written(
        tmp_path / "c.jsonl",
        [{**one, "state": [1.0], "next_state": [1.0]} for one in records(1, 7, game_id="own")],
    )
    with pytest.raises(ConfigError, match="registered with spaces that do not fit"):
        imported(data, wide)
    with pytest.raises(ConfigError, match="--actions is 1"):
        imported(DataFolder(tmp_path / "E"), path, actions=1)


def test_records_without_the_shift_are_reported(tmp_path: Path) -> None:
    states = trajectory(0, 6)
    aligned = [
        {**one, "state": states[at].tolist(), "next_state": states[at + 1].tolist()}
        for at, one in enumerate(records(0, 6))
    ]
    shifted = imported(
        DataFolder(tmp_path / "D"), written(tmp_path / "a.jsonl", records(0, 6))
    ).to_json()
    found = imported(DataFolder(tmp_path / "E"), written(tmp_path / "b.jsonl", aligned)).to_json()
    assert (shifted["looks_aligned"], found["looks_aligned"]) == (False, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no records"),
        ("{", "not valid JSON"),
        ("\x00\xff", "not valid JSON"),
        ("[]", "an array of 0"),
        ("7", "a record is"),
        ('{"episode": 1}', "missing or unknown keys"),
        ("{row}\n[{row}, {row}]", "record 2 of"),
        ("{row} x", "not valid JSON"),
        ("{NaN}", "NaN is not a JSON number"),
        ("{huge}", "expected finite numbers"),
        ("{text}", "expected finite numbers"),
        ("{done}", "done is 1"),
        ("{action}", "action is '0.5'"),
        ("{negative}", "step is '-1'"),
        ("{row}\n{short}", "expected 4 in all"),
        ("{pixels}", "state is"),
        ("{more}", "missing or unknown keys: extra"),
        ("{number}", "game_id is 3"),
        ("{twice}", "a duplicate key"),
        ("{row}\n{many}", "pass --actions"),
    ],
)
def test_a_bad_file_is_rejected_in_one_line_and_nothing_is_stored(
    tmp_path: Path, text: str, said: str
) -> None:
    row = records(0, 3)[0]
    variants = {
        "row": row,
        "NaN": {**row, "reward": float("nan")},
        "huge": {**row, "state": [1e39, 0, 0, 0]},
        "text": {**row, "state": ["1", 0, 0, 0]},
        "done": {**row, "done": 1},
        "action": {**row, "action": 0.5},
        "negative": {**row, "step": -1},
        "short": {**row, "step": 1, "state": [1.0]},
        "pixels": {**row, "state": {}},
        "more": {**row, "extra": 1},
        "number": {**row, "game_id": 3},
    }
    many = {**row, "step": 1, "action": 1 << 20, "game_id": "my-game"}
    texts = {name: json.dumps(value) for name, value in variants.items()}
    texts |= {"twice": json.dumps(row)[:-1] + ', "step": 7}', "many": json.dumps(many)}
    if "{many}" in text:
        texts["row"] = json.dumps({**row, "game_id": "my-game"})
    for name, value in texts.items():
        text = text.replace(f"{{{name}}}", value)
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="latin-1")
    data = DataFolder(tmp_path / "D")
    with pytest.raises(ConfigError) as caught:
        imported(data, path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert is_untouched(data)


def test_a_game_that_gymnasium_cannot_create_gets_its_spec_from_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ImportError("MuJoCo is not installed")

    monkeypatch.setattr("gymnasium.make", fails)
    result = imported(
        DataFolder(tmp_path / "D"), written(tmp_path / "a.jsonl", records(0, 6))
    ).to_json()
    assert (result["spec_is_from"], result["stored_steps"]) == ("records", 5)


def test_the_tables_own_key_is_ignored_and_a_folder_is_rejected(tmp_path: Path) -> None:
    rows = [{**one, "pk": "5f0c3b1e"} for one in records(0, 4)]
    assert (
        imported(DataFolder(tmp_path / "D"), written(tmp_path / "a.jsonl", rows)).stored_steps == 3
    )
    with pytest.raises(ConfigError, match="is not a file"):
        imported(DataFolder(tmp_path / "D"), tmp_path)
