"""Parquet: exported and imported bit for bit; files of other programs are rejected."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.exchange.exports import (
    from_parquet,
    is_untouched,
    random_chunks,
    recorded,
    steps_in,
    stored,
    to_parquet,
)
from tests.simulation.recordings import GAME, person, recording
from understudy.backends.data import DataFolder
from understudy.core.errors import ConfigError
from understudy.core.names import game_name
from understudy.exchange import parquet
from understudy.exchange.destination import Destination
from understudy.exchange.exporting import ExportFilter, local_copy, open_history
from understudy.exchange.importing import import_files
from understudy.exchange.incoming import random_part_of
from understudy.exchange.parquet import SPEC_KEY, ParquetFile, write_parquet
from understudy.experience.chunk import RowKind
from understudy.experience.game import spec_from_json
from understudy.ingest.specs import SpecFolder
from understudy.testing.samples import cart_spec, random_session


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32 - 1))
def test_steps_of_any_game_are_exported_and_imported_bit_for_bit(
    quick_path: Path, seed: int
) -> None:
    root = quick_path / f"{seed}-{len(list(quick_path.iterdir()))}"
    root.mkdir()
    spec, chunks = random_chunks(seed)
    before = recorded(root / "before", spec, chunks)
    n_steps = sum(chunk.meta.n_steps for chunk in chunks)
    assert to_parquet(before, root / "a.parquet").steps == n_steps
    after = DataFolder(root / "after")
    result = from_parquet(after, root / "a.parquet")
    assert (result.stored_steps, result.refused_steps, result.schema) == (n_steps, 0, spec.schema)
    to_parquet(after, root / "b.parquet")
    assert steps_in(root / "a.parquet") == steps_in(root / "b.parquet")
    same = {
        (random_part_of(chunk.meta.session), chunk.meta.chunk_no): chunk for chunk in stored(after)
    }
    for chunk in chunks:
        again = same[random_part_of(chunk.meta.session), chunk.meta.chunk_no]
        is_step = chunk.columns["row"] == RowKind.STEP
        assert again.meta.episodes == chunk.meta.episodes
        assert again.columns.keys() == chunk.columns.keys()
        for name, column in chunk.columns.items():
            rows = slice(None) if name.startswith(("obs", "action_mask", "row")) else is_step
            assert again.columns[name][rows].tobytes() == column[rows].tobytes(), name


def test_pandas_and_others_see_plain_columns(tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "D")
    made = recording(data)
    steps = made.play(person(0.0), 3, model="cart/7")
    to_parquet(data, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.num_rows == steps
    assert table.schema.field("obs").type == pa.list_(pa.float32(), 4)
    assert "player" not in table.column_names
    assert set(table.column("model").to_pylist()) == {"cart/7"}
    assert set(table.column("by").to_pylist()) == {2}
    assert table.column("terminated").to_pylist().count(True) == 3
    assert table.column("episode").unique().to_pylist() == [0, 1, 2]
    assert table.column("step").to_pylist() == list(range(steps))
    obs, after = (
        np.array(table.column(name).to_pylist(), np.float32) for name in ("obs", "next_obs")
    )
    ends = np.flatnonzero(table.column("terminated").to_numpy())
    inside = np.setdiff1d(np.arange(steps), ends)
    assert (after[inside] == obs[inside + 1]).all()
    final = [chunk.columns["obs"][-1] for chunk in stored(data)]
    assert (after[ends] == np.array(final)).all()
    assert spec_from_json(table.schema.metadata[SPEC_KEY]) == GAME


def test_a_remote_store_is_exported_like_a_local_one(tmp_path: Path) -> None:
    made = recording(DataFolder(tmp_path / "D"))
    steps = made.play(person(0.2), 3)
    made.play(person(0.2), 2, player=b"b" * 16)
    to_parquet(made.data, tmp_path / "here.parquet")
    out = tmp_path / "there.parquet"
    specs = SpecFolder(made.data.games)
    nowhere = DataFolder(tmp_path / "nowhere")
    with (
        closing(made.open()) as store,
        local_copy(store, specs, ExportFilter(game="cart"), beside=out) as view,
    ):
        write_parquet(open_history(nowhere, view, ExportFilter(game="cart"), specs=specs), out)
    assert steps_in(out) == steps_in(tmp_path / "here.parquet")
    with closing(made.open()) as store:
        assert store.forget(b"b" * 16) == 2
        with local_copy(store, specs, ExportFilter(), beside=out) as view:
            assert open_history(nowhere, view, ExportFilter(), specs=specs).n_steps == steps
        with (
            local_copy(store, specs, ExportFilter(game="other"), beside=out) as view,
            pytest.raises(ConfigError, match="holds no steps that match"),
        ):
            open_history(nowhere, view, ExportFilter(), specs=specs)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "D",
        "here.parquet",
        "there.parquet",
    ]


def test_filters_leave_out_players_consents_and_the_past(tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "D")
    made = recording(data)
    granted = made.play(person(0.2), 2, player=b"a" * 16)
    made.clock.advance(3600)
    made.play(person(0.2), 2, consent="denied", player=b"b" * 16)
    later_s = made.clock.now()
    assert to_parquet(data, tmp_path / "granted.parquet", consent=("granted",)).steps == granted
    late = to_parquet(data, tmp_path / "late.parquet", since_s=later_s, with_player=True)
    assert set(pq.read_table(late.path).column("player").to_pylist()) == {(b"b" * 16).hex()}
    with pytest.raises(ConfigError, match="--consent"):
        to_parquet(data, tmp_path / "none.parquet", since_s=later_s, consent=("granted",))
    with pytest.raises(ConfigError, match="data stats"):
        to_parquet(data, tmp_path / "none.parquet", game="other")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "D",
        "granted.parquet",
        "late.parquet",
    ]


def test_an_export_holds_one_row_group_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 20)
    spec = cart_spec()
    rng = np.random.default_rng(1)
    data = recorded(tmp_path / "D", spec, random_session(spec, rng, n_chunks=40))
    to_parquet(data, tmp_path / "a.parquet")
    groups = pq.ParquetFile(tmp_path / "a.parquet").metadata
    sizes = [groups.row_group(one).num_rows for one in range(groups.num_row_groups)]
    assert len(sizes) > 4
    assert max(sizes) < 20 + 8
    assert from_parquet(DataFolder(tmp_path / "E"), tmp_path / "a.parquet").stored_steps == sum(
        sizes
    )


def test_an_export_overwrites_nothing_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, chunks = random_chunks(3)
    data = recorded(tmp_path / "D", spec, chunks)
    (tmp_path / "a.parquet").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        to_parquet(data, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").read_text() == "mine"
    monkeypatch.setattr(parquet, "_table", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        to_parquet(data, tmp_path / "b.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["D", "a.parquet"]


def changed(path: Path, **columns: Any) -> None:
    """Write a file again with other columns."""
    table = pq.read_table(path)
    for name, values in columns.items():
        at = table.column_names.index(name)
        table = table.set_column(
            at, table.schema.field(name), pa.array(values, table.schema.field(name).type)
        )
    pq.write_table(table, path)


def exported(tmp_path: Path) -> tuple[Path, Any]:
    made = recording(DataFolder(tmp_path / "D"))
    made.play(person(0.2), 3)
    path = tmp_path / "a.parquet"
    to_parquet(made.data, path)
    return path, pq.read_table(path)


def notes_of(table: Any) -> list[str]:
    found: list[str] = table.column("note").to_pylist()
    return found


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("truncated", "not a readable Parquet"),
        ("empty", "not a readable Parquet"),
        ("a folder", "is not a file"),
        ("missing", "is not a file"),
        ("of another program", "of another program"),
        ("without a column", "do not match its game"),
        ("of another type", "do not match its game"),
        ("no rows", "no steps"),
        ("NaN", "not_finite"),
        ("an impossible action", "bad_action"),
        ("a missing step", "are not consecutive"),
        ("another next_obs", "'next_obs' is not the 'obs'"),
        ("no spec", "no readable game spec"),
        ("a bad session", "badly formed"),
        ("flipped bits", "damaged"),
        ("a column twice", "do not match its game"),
        ("a session of another kind", "not a UUIDv7"),
        ("a note without end", "recursion"),
        ("far numbers", "is too high for a session with gaps"),
        ("nulls allowed", "columns that do not match its game spec: action"),
        ("a chunk too long", "more than 512 steps"),
        ("a name too long", "must be text of at most 128 characters"),
    ],
)
def test_a_bad_file_is_rejected_in_one_line_and_nothing_is_stored(
    tmp_path: Path, what: str, said: str
) -> None:
    path, table = exported(tmp_path)
    n = table.num_rows
    match what:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-100])
        case "empty":
            path.write_bytes(b"")
        case "a folder":
            path.unlink()
            path.mkdir()
        case "missing":
            path.unlink()
        case "of another program":
            pq.write_table(pa.table({"obs": [1.0], "action": [0]}), path)
        case "without a column":
            pq.write_table(table.drop_columns(["next_obs"]), path)
        case "of another type":
            at = table.column_names.index("reward")
            pq.write_table(
                table.set_column(at, "reward", table.column("reward").cast(pa.float64())), path
            )
        case "no rows":
            pq.write_table(table.slice(0, 0), path)
        case "NaN":
            changed(path, reward=[*[1.0] * (n - 1), float("nan")])
        case "an impossible action":
            changed(path, action=[*[0] * (n - 1), 7])
        case "a missing step":
            pq.write_table(pa.concat_tables([table.slice(0, 2), table.slice(3)]), path)
        case "another next_obs":
            changed(path, next_obs=[[0.0] * 4] * n)
        case "no spec":
            pq.write_table(
                table.replace_schema_metadata({**table.schema.metadata, SPEC_KEY: b"{}"}), path
            )
        case "a bad session":
            changed(path, session=["x"] * n)
        case "a column twice":
            pq.write_table(
                table.append_column(table.schema.field("reward"), table.column("reward")), path
            )
        case "a session of another kind":
            first = table.column("session").to_pylist()[0]
            mine = table.filter(pc.equal(table.column("session"), first))
            pq.write_table(mine, path)
            changed(path, session=["6b0f4f1e-9b0a-4c57-8a1e-2f6f0f7f9a11"] * mine.num_rows)
        case "a note without end":
            changed(path, note=["[" * 100_000] * n)
        case "far numbers":
            changed(
                path,
                chunk_no=[(number + 1) * 10**9 for number in table.column("chunk_no").to_pylist()],
            )
        case "nulls allowed":
            fields = [field.with_nullable(True) for field in table.schema]
            pq.write_table(table.cast(pa.schema(fields, metadata=table.schema.metadata)), path)
        case "a chunk too long":
            many = -(-513 // n)
            pq.write_table(pa.concat_tables([table] * many), path)
            session = table.column("session").to_pylist()[0]
            changed(path, session=[session] * (n * many), chunk_no=[0] * (n * many))
        case "a name too long":
            changed(
                path,
                note=[
                    json.dumps({**json.loads(one), "model": "x" * 5_000}) for one in notes_of(table)
                ],
            )
        case "flipped bits":
            raw = bytearray(path.read_bytes())
            raw[200:1200] = bytes(b ^ 0xFF for b in raw[200:1200])
            path.write_bytes(raw)
    target = DataFolder(tmp_path / "E")
    with pytest.raises(ConfigError) as caught:
        from_parquet(target, path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert is_untouched(target)


def test_one_bad_file_among_good_ones_stores_nothing(tmp_path: Path) -> None:
    path, table = exported(tmp_path)
    pq.write_table(table.slice(1), tmp_path / "bad.parquet")
    with pytest.raises(ConfigError):
        from_parquet(DataFolder(tmp_path / "E"), path, tmp_path / "bad.parquet")
    assert is_untouched(DataFolder(tmp_path / "E"))


def test_files_that_hold_different_steps_of_a_session_are_not_mixed(tmp_path: Path) -> None:
    spec = cart_spec()
    rng = np.random.default_rng(1)
    path = tmp_path / "a.parquet"
    narrow = tmp_path / "narrow.parquet"
    to_parquet(recorded(tmp_path / "D", spec, random_session(spec, rng, n_chunks=4)), path)
    table = pq.read_table(path)
    pq.write_table(table.filter(pc.less(table.column("chunk_no"), 3)), narrow)
    for files in ((path, narrow), (narrow, path)):
        with pytest.raises(ConfigError, match="hold different steps of session"):
            from_parquet(DataFolder(tmp_path / "E"), *files)
    assert is_untouched(DataFolder(tmp_path / "E"))
    assert from_parquet(DataFolder(tmp_path / "E"), path, path).stored_steps == table.num_rows


def test_consent_may_be_replaced_except_denied(tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "D")
    made = recording(data)
    made.play(person(0.2), 1, consent="unknown")
    made.play(person(0.2), 1, consent="denied")
    to_parquet(data, tmp_path / "a.parquet")
    file = ParquetFile(tmp_path / "a.parquet", consent="granted")
    assert {chunk.meta.consent for chunk, _ in file.chunks()} == {"granted", "denied"}


def test_a_game_may_be_renamed(tmp_path: Path) -> None:
    path, table = exported(tmp_path)
    data = DataFolder(tmp_path / "E")
    result = import_files(Destination(data), [ParquetFile(path, game=game_name("cart-two"))])
    assert (result.game, result.stored_steps) == ("cart-two", table.num_rows)
    assert json.loads(next((data.games / "cart-two").iterdir()).read_text())["game"] == "cart-two"
