"""The backends on which a deployment ran last are kept, and every command on its folder goes by them."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from understudy.app.config import Config, IngestSection, ModelsSection, StoreSection, StreamSection, resolve
from understudy.app.used import FILE_NAME, keep_used, moved, read_used, used_by
from understudy.core.errors import ConfigError

STREAM, STORE, MODELS = "kinesis://games?region=eu-west-1", "cassandra://db/games?replication=3", "s3://bots/games"


def config(data: Path, stream: str = STREAM, store: str = STORE, models: str = MODELS) -> Config:
    return Config(
        data=str(data),
        stream=StreamSection(url=stream),
        store=StoreSection(url=store),
        models=ModelsSection(url=models),
    )


def urls(data: Path, **environ: str) -> tuple[str, str, str]:
    found = resolve({"data": str(data)}, environ=environ).config
    return found.stream.url, found.store.url, found.models.url


def test_what_a_platform_ran_on_holds_for_the_next_command(tmp_path):
    assert read_used(tmp_path) == {}
    assert urls(tmp_path) == ("", "", "")
    keep_used(config(tmp_path))
    assert urls(tmp_path) == (STREAM, STORE, MODELS)
    shown = resolve({"data": str(tmp_path)}, environ={}).shown()["stream.url"]
    assert shown == {"value": "kinesis://games?***", "origin": f"last start ({tmp_path / FILE_NAME})"}
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    keep_used(config(tmp_path, "", "", ""))
    assert urls(tmp_path) == ("", "", "")


def test_flags_variables_and_the_file_go_before_the_last_start(tmp_path):
    keep_used(config(tmp_path))
    (tmp_path / "understudy.toml").write_text('[stream]\nurl = "kafka://k/t"\n[models]\nurl = "folder"\n')
    assert urls(tmp_path) == ("kafka://k/t", STORE, "")
    assert urls(tmp_path, UNDERSTUDY_STREAM_URL="file", UNDERSTUDY_STORE_URL="local") == ("", "", "")
    flags = {"data": str(tmp_path), "store.url": "cassandra://other/games", "stream.url": "file"}
    found = resolve(flags, environ={"UNDERSTUDY_STORE_URL": "local"})
    assert (found.config.store.url, found.config.stream.url) == ("cassandra://other/games", "")
    assert found.origins["store.url"] == "flag --url"


def test_a_spark_job_goes_on_where_the_store_lies_elsewhere_still(tmp_path):
    def engine(**flags: str) -> tuple[str, str]:
        found = resolve({"data": str(tmp_path), **flags}, environ={})
        return found.config.ingest.engine, found.origins["ingest.engine"]

    keep_used(dataclasses.replace(config(tmp_path), ingest=IngestSection(engine="spark")))
    assert engine() == ("spark", f"last start ({tmp_path / FILE_NAME})")
    assert engine(**{"ingest.engine": "native"}) == ("native", "flag --engine")
    assert engine(**{"store.url": "local"}) == ("native", "default")
    keep_used(config(tmp_path))
    assert engine() == ("native", "default")


def test_a_note_of_before_there_were_engines_in_it_is_read(tmp_path):
    (tmp_path / FILE_NAME).write_text(json.dumps(used_by(config(tmp_path))))
    found = resolve({"data": str(tmp_path)}, environ={}).config
    assert (found.store.url, found.ingest.engine) == (STORE, "native")


def test_files_that_an_address_names_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keep_used(config(tmp_path, "kafka://k/t?credentials=my keys/c&tls=true&ca=ca.pem", "", "models elsewhere"))
    monkeypatch.chdir("/")
    here = os.path.realpath(tmp_path)
    stream, _, models = urls(tmp_path)
    assert stream == f"kafka://k/t?credentials={here}/my%20keys/c&tls=true&ca={here}/ca.pem"
    assert models == f"{here}/models elsewhere"


def test_a_part_that_is_elsewhere_now_is_named_without_its_options(tmp_path):
    keep_used(config(tmp_path))
    before = read_used(tmp_path)
    assert moved(before, config(tmp_path)) == []
    assert moved({}, config(tmp_path)) == []
    said = moved(before, config(tmp_path, stream="kafka://k/t?credentials=F", store=""))
    assert [one.split(":")[0] for one in said] == [
        "stream is kafka",
        "store is in the data folder (local) now; at the last start it was cassandra",
    ]
    assert "at the last start it was kinesis://games?***" in said[0]
    assert "understudy ingest --until-empty" in said[0]
    assert "credentials" not in said[0]


@pytest.mark.parametrize("inside", ["", "[]", "{", '{"stream.url": ""}', "\x00"])
def test_a_damaged_note_is_told_and_not_passed_over(tmp_path, inside):
    (tmp_path / FILE_NAME).write_text(inside)
    with pytest.raises(
        ConfigError, match=r"backends\.json, which says where .* cannot be read .*; restore it, or remove"
    ):
        resolve({"data": str(tmp_path)}, environ={})
    everything = {"stream.url": "file", "store.url": "local", "models.url": "folder"}
    assert used_by(resolve({"data": str(tmp_path), **everything}, environ={}).config) == dict.fromkeys(everything, "")


def test_a_relative_data_folder_is_asked_too(tmp_path, monkeypatch):
    keep_used(config(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    assert resolve({"data": tmp_path.name}, environ={}).config.store.url == STORE
    assert resolve({}, environ={"UNDERSTUDY_DATA": tmp_path.name}).config.store.url == STORE
