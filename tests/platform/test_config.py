"""The config: which value wins, where it comes from, and which values are rejected."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from understudy.core.errors import ConfigError
from understudy.core.settings import from_tree, leaves
from understudy.platform.config import (
    FILE_NAME,
    LAST_START_FILE,
    Config,
    IngestSection,
    LearnerSection,
    ModelsSection,
    Resolved,
    StoreSection,
    StreamSection,
    backend_urls,
    example,
    location_changes,
    mask_secrets,
    read_last_start,
    resolve,
    save_last_start,
)

VARIABLE = "UNDERSTUDY_GATEWAY_PORT"


def write(folder: Path, text: str) -> Path:
    (folder / FILE_NAME).write_text(text)
    return folder / FILE_NAME


def port(found: Resolved[Config]) -> tuple[int, str]:
    return found.config.gateway.port, found.origins["gateway.port"]


def test_a_flag_wins_over_a_variable_over_its_file_over_the_toml_over_the_default(tmp_path: Path):
    secret = tmp_path / "port"
    secret.write_text("3\n")
    file = write(tmp_path, "[gateway]\nport = 4\n")
    environ = {VARIABLE: "2", f"{VARIABLE}_FILE": str(secret)}
    flags = {"gateway.port": 1, "data": str(tmp_path)}
    assert port(resolve(flags, environ=environ)) == (1, "flag --port")
    assert port(resolve({**flags, "gateway.port": None}, environ=environ)) == (2, VARIABLE)
    del environ[VARIABLE]
    assert port(resolve({"data": str(tmp_path)}, environ=environ)) == (
        3,
        f"{VARIABLE}_FILE ({secret})",
    )
    assert port(resolve({"data": str(tmp_path)}, environ={})) == (4, str(file))
    assert port(resolve({}, environ={})) == (8600, "default")


def test_the_file_is_named_by_flag_or_variable_or_is_in_the_data_folder(tmp_path: Path):
    other = tmp_path / "other.toml"
    other.write_text('data = "E"\nroles = ["ingest"]\n')
    write(tmp_path, 'roles = ["gateway"]')
    named = resolve({"data": str(tmp_path)}, file=other, environ={})
    assert (named.config.data, named.config.roles) == (str(tmp_path), ("ingest",))
    assert resolve({}, environ={"UNDERSTUDY_CONFIG": str(other)}).config.data == "E"
    assert resolve({}, environ={"UNDERSTUDY_DATA": str(tmp_path)}).config.roles == ("gateway",)


def test_text_from_the_environment_becomes_the_right_type(tmp_path: Path):
    environ = {
        "UNDERSTUDY_GATEWAY_HOSTS": "a.example, b.example",
        "UNDERSTUDY_GATEWAY_INSECURE": "true",
        "UNDERSTUDY_GATEWAY_TARGET_STEPS_S": "2.5",
        "UNDERSTUDY_ROLES": "gateway",
        "UNDERSTUDY_MODELS_URL": "s3://b/p",
    }
    config = resolve({}, environ=environ).config
    assert config.gateway.hosts == ("a.example", "b.example")
    assert (config.gateway.insecure, config.gateway.target_steps_s, config.roles) == (
        True,
        2.5,
        ("gateway",),
    )
    assert config.gateway_config.target_steps_s == 2.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gateway]\nprot = 1", "did you mean gateway.port?"),
        ("[gatewey]\nport = 1", "did you mean gateway.port?"),
        ("port = 1", "did you mean gateway.port?"),
        ("zzzzzz = 1", "known are data"),
        ("gateway = 1", "sets gateway"),
        ("[gateway]\nport = 'x'", "gateway.port is 'x'"),
        ("[gateway]\nport = 70000", "65535"),
        ("[gateway]\nport = true", "gateway.port is true"),
        ("[gate]\nmax_share = 0.9", "0.5"),
        ("[gateway]\nmax_keyless_connections = 0", "1"),
        ('[gateway]\ntrusted_proxies = ["proxy"]', "10.0.0.0/8"),
        ("[gateway", "is not TOML"),
        ("roles = 'gateway, nothing'", "gateway,ingest,learner"),
        ("roles = []", "gateway,ingest,learner"),
        (
            "[learner]\nlearn_from = ['all', 'none']",
            "learner.learn_from is all and none; pass one or more of granted and unknown",
        ),
        (
            "[learner]\nsettings = ['iql.widths = []', 'iql.widths = [\"a\", -1]']",
            '["a", -1]; give',
        ),
        ("[gateway]\nhost = '0.0.0.0'", "plain HTTP"),
        ("[gateway]\ncertificate = 'nowhere.pem'", "which is not a file"),
        ("[gateway]\nhost = 'my host'", "gateway.host is 'my host'"),
        ("[gateway]\nhost = ''", "gateway.host is ''"),
        ("[gateway]\nhosts = ['my host']", "gateway.hosts has 'my host'"),
        ("[gateway]\nhosts = ['https://x']", "gateway.hosts has"),
        ("[models]\nurl = 'ftp://x'", "models.url"),
        ("[models]\nurl = 'ftp://me:secret@x'", "***@x"),
        ("[learner]\npeople_share = 1.5", "people_share"),
        ("[learner]\npeople_share = 'all'", "people_share"),
        ("[learner]\nsettings = ['ppo.widths = [64]']", "each for one of iql, dqn, bc"),
        ("[learner]\nsettings = ['widths = [64]']", "pass lines such as"),
        ("[learner]\nsettings = ['iql.widths = [64']", "pass lines such as"),
        ("[learner]\nsettings = ['']", "pass lines such as"),
        ("[learner]\nsettings = ['iql = 5']", "pass lines such as"),
        ("[learner]\nsettings = ['iql.widhts = [64]']", "did you mean 'widths'?"),
        ("[learner]\nsettings = ['iql.batch = -1']", "batch is -1"),
        ("[learner]\nsimulator = 'Nope-v9'", "learner.simulator is 'Nope-v9'"),
        ("[learner]\nsimulator = 'no_such_module:Nope-v9'", "learner.simulator is"),
        (
            "[gate]\nmin_episodes = 50\nmax_episodes = 10",
            "gate.min_episodes is 50, more than gate.max_episodes, 10",
        ),
        ("[gate]\nerror = nan", "gate"),
        ("[gateway]\ntarget_steps_s = inf", "gateway.target_steps_s is inf"),
        ("[gateway]\ntarget_steps_s = nan", "gateway.target_steps_s is nan"),
        ("[store]\nwindow_hours = inf", "store.window_hours is inf"),
        ("[gate]\nerror = 0.7", "gate.error is 0.7"),
    ],
)
def test_invalid_files_are_rejected_with_a_suggestion(tmp_path: Path, text: str, said: str):
    write(tmp_path, text)
    with pytest.raises(ConfigError) as told:
        resolve({"data": str(tmp_path)}, environ={}).config.check()
    assert said in str(told.value)


def test_an_empty_variable_is_named_with_the_default(tmp_path: Path):
    for text in ("", " "):
        with pytest.raises(ConfigError) as told:
            resolve({}, environ={VARIABLE: text})
        assert "gateway.port is empty (UNDERSTUDY_GATEWAY_PORT)" in str(told.value)
        assert "remove it for the default, 8600" in str(told.value)


def test_invalid_variables_are_rejected_and_those_of_games_ignored(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean UNDERSTUDY_GATEWAY_PORT"):
        resolve({}, environ={"UNDERSTUDY_GATEWAY_PROT": "1"})
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve({}, environ={f"{VARIABLE}_FILE": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve({}, file=tmp_path / "nowhere.toml", environ={})
    resolve({}, environ={"UNDERSTUDY_URL": "http://x", "UNDERSTUDY_KEY": "uk_x"})


@pytest.mark.parametrize(
    "text",
    [
        "[gateway]\nhosts = ['play.example', 'my_box', '[::1]', '10.0.0.7']",
        "[gateway]\nhost = '::1'",
        "[gateway]\nhost = 'localhost'",
        "[models]\nurl = 's3://bucket/path'",
        "[learner]\nsimulator = 'CartPole-v1'",
        "roles = ['gateway']\n[learner]\nsimulator = 'Only-where-the-learner-runs-v1'",
    ],
)
def test_valid_configs_are_accepted(tmp_path: Path, text: str):
    write(tmp_path, text)
    resolve({"data": str(tmp_path)}, environ={}).config.check()


def test_a_simulator_may_be_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_simulators.py").write_text(
        "import gymnasium\ngymnasium.register('Mine-v0', "
        "'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    write(tmp_path, "[learner]\nsimulator = 'my_simulators:Mine-v0'")
    resolve({"data": str(tmp_path)}, environ={}).config.check()
    assert sys.path == before


def test_passwords_in_a_url_are_stars():
    url = "https://name:secret@host/path?token=secret"
    shown = resolve({}, environ={"UNDERSTUDY_MODELS_URL": url}).masked()
    assert "secret" not in str(shown)
    assert shown["models.url"] == {
        "value": "https://***@host/path?***",
        "origin": "UNDERSTUDY_MODELS_URL",
    }
    assert mask_secrets(5) == 5
    assert mask_secrets("https://name:s@cre/t@host/path") == "https://***@host/path"


def test_the_example_lists_every_setting_and_changes_none(tmp_path: Path):
    write(tmp_path, example())
    found = resolve({"data": str(tmp_path)}, environ={})
    assert set(found.origins.values()) == {"flag --data", "default"}
    # Uncommented it says the same.
    write(
        tmp_path,
        "\n".join(
            line.removeprefix("# ")
            for line in example().splitlines()
            if " = " in line or "[" in line
        ),
    )
    again = resolve({"data": str(tmp_path)}, environ={})
    assert again.config == found.config
    assert "default" not in again.origins.values()
    assert all(leaf.name.rpartition(".")[2] in example() for leaf in leaves(Config))


def test_lines_of_toml_set_the_algorithms(tmp_path: Path):
    write(
        tmp_path,
        """[learner]
settings = [
  "iql.centre = 'obs.grid 5'", "bc.widths = [64, 64]", "iql.batch = 128", "bc.best_share = 0.2",
]""",
    )
    config = resolve({"data": str(tmp_path)}, environ={}).config.check()
    assert config.algorithm_settings == {
        "iql": {"centre": "obs.grid 5", "batch": 128},
        "bc": {"widths": [64, 64], "best_share": 0.2},
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("iql.centre = 'middle'", "centre is 'middle'; give a grid and one of its channels"),
        ("iql.centre = 'middle'", "add ' of 0..6'); pass lines such as"),
        (f"iql.batch = '{'9' * 500}'", "9'; give a whole number"),
        ("bc.best_share = 0.0", "best_share is 0.0; give 0.001 to 1"),
        ("bc.best_share = 'most'", "best_share is 'most'; give a number"),
        ("ppp.batch = 1", "(which sets ppp)"),
        ("ppo.batch = 1", "(which sets ppo)"),
        ("iql.batch = 1\nbc.batch = 1", "(which sets iql, bc)"),
        ("", "(which sets nothing)"),
        ("iql = 3", "(which sets iql)"),
        ("iql", "Expected '='"),
    ],
)
def test_a_wrong_line_for_an_algorithm_is_named_with_the_reason(line: str, reason: str):
    config = Config(learner=LearnerSection(settings=(line,)))
    with pytest.raises(ConfigError, match=r"learner.settings has .*; pass lines such as") as caught:
        config.check()
    assert reason in str(caught.value)


def test_default_consents_depend_on_whether_only_this_machine_reaches_the_gateway():
    def learns_from(**gateway: object) -> tuple[str, ...]:
        return from_tree(Config, {"gateway": gateway}, where="here").learn_from

    assert learns_from() == learns_from(host="localhost") == ("granted", "unknown")
    assert learns_from(host="0.0.0.0") == learns_from(host="game.example") == ("granted",)
    assert learns_from(trusted_proxies=["127.0.0.1"]) == ("granted",)
    assert from_tree(Config, {"roles": ["learner"]}, where="here").learn_from == ("granted",)
    assert from_tree(Config, {"learner": {"learn_from": ["granted"]}}, where="here").learn_from == (
        "granted",
    )


# --- Where it ran last ----------------------------------------------------------------------------

STREAM = "kinesis://games?region=eu-west-1"
STORE = "cassandra://db/games?replication=3"
MODELS = "s3://bots/games"


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


def test_the_backends_of_the_last_start_apply_to_the_next_command(tmp_path):
    assert read_last_start(tmp_path) == {}
    assert urls(tmp_path) == ("", "", "")
    save_last_start(config(tmp_path))
    assert urls(tmp_path) == (STREAM, STORE, MODELS)
    shown = resolve({"data": str(tmp_path)}, environ={}).masked()["stream.url"]
    assert shown == {
        "value": "kinesis://games?***",
        "origin": f"last start ({tmp_path / LAST_START_FILE})",
    }
    assert (tmp_path / LAST_START_FILE).stat().st_mode & 0o777 == 0o600
    save_last_start(config(tmp_path, "", "", ""))
    assert urls(tmp_path) == ("", "", "")


def test_flags_variables_and_the_file_override_the_last_start(tmp_path):
    save_last_start(config(tmp_path))
    (tmp_path / "understudy.toml").write_text(
        '[stream]\nurl = "kafka://k/t"\n[models]\nurl = "folder"\n'
    )
    assert urls(tmp_path) == ("kafka://k/t", STORE, "")
    assert urls(tmp_path, UNDERSTUDY_STREAM_URL="file", UNDERSTUDY_STORE_URL="local") == (
        "",
        "",
        "",
    )
    flags = {"data": str(tmp_path), "store.url": "cassandra://other/games", "stream.url": "file"}
    found = resolve(flags, environ={"UNDERSTUDY_STORE_URL": "local"})
    assert (found.config.store.url, found.config.stream.url) == ("cassandra://other/games", "")
    assert found.origins["store.url"] == "flag --url"


def test_a_spark_job_resumes_if_the_store_is_still_remote(tmp_path):
    def engine(**flags: str) -> tuple[str, str]:
        found = resolve({"data": str(tmp_path), **flags}, environ={})
        return found.config.ingest.engine, found.origins["ingest.engine"]

    save_last_start(dataclasses.replace(config(tmp_path), ingest=IngestSection(engine="spark")))
    assert engine() == ("spark", f"last start ({tmp_path / LAST_START_FILE})")
    assert engine(**{"ingest.engine": "native"}) == ("native", "flag --engine")
    assert engine(**{"store.url": "local"}) == ("native", "default")
    save_last_start(config(tmp_path))
    assert engine() == ("native", "default")


def test_a_saved_file_without_an_engine_is_readable(tmp_path):
    (tmp_path / LAST_START_FILE).write_text(json.dumps(backend_urls(config(tmp_path))))
    found = resolve({"data": str(tmp_path)}, environ={}).config
    assert (found.store.url, found.ingest.engine) == (STORE, "native")


def test_files_named_in_a_url_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_last_start(
        config(
            tmp_path, "kafka://k/t?credentials=my keys/c&tls=true&ca=ca.pem", "", "models elsewhere"
        )
    )
    monkeypatch.chdir("/")
    here = os.path.realpath(tmp_path)
    stream, _, models = urls(tmp_path)
    assert stream == f"kafka://k/t?credentials={here}/my%20keys/c&tls=true&ca={here}/ca.pem"
    assert models == f"{here}/models elsewhere"


def test_a_moved_part_is_reported_without_the_options_of_its_url(tmp_path):
    save_last_start(config(tmp_path))
    before = read_last_start(tmp_path)
    assert location_changes(before, config(tmp_path)) == []
    assert location_changes({}, config(tmp_path)) == []
    said = location_changes(before, config(tmp_path, stream="kafka://k/t?credentials=F", store=""))
    assert [one.split(":")[0] for one in said] == [
        "stream is kafka",
        "store is in the data folder (local) now; at the last start it was cassandra",
    ]
    assert "at the last start it was kinesis://games?***" in said[0]
    assert "understudy ingest --until-empty" in said[0]
    assert "credentials" not in said[0]


@pytest.mark.parametrize("inside", ["", "[]", "{", '{"stream.url": ""}', "\x00"])
def test_a_damaged_saved_file_is_an_error(tmp_path, inside):
    (tmp_path / LAST_START_FILE).write_text(inside)
    with pytest.raises(
        ConfigError,
        match=r"backends\.json, which locates .* cannot be read .*; restore it, or remove",
    ):
        resolve({"data": str(tmp_path)}, environ={})
    everything = {"stream.url": "file", "store.url": "local", "models.url": "folder"}
    assert backend_urls(
        resolve({"data": str(tmp_path), **everything}, environ={}).config
    ) == dict.fromkeys(everything, "")


def test_the_last_start_of_a_relative_data_folder_applies_too(tmp_path, monkeypatch):
    save_last_start(config(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    assert resolve({"data": tmp_path.name}, environ={}).config.store.url == STORE
    assert resolve({}, environ={"UNDERSTUDY_DATA": tmp_path.name}).config.store.url == STORE


@pytest.mark.parametrize(
    ("old", "instead"),
    [
        ("gateway.canary_share", "gate.first_share and gate.max_share"),
        ("gate.worse_by", "leave it out"),
        ("learner.bc_growth", "learner.growth"),
    ],
)
def test_a_removed_setting_names_its_successor(tmp_path: Path, old: str, instead: str):
    section, name = old.split(".")
    write(tmp_path, f"[{section}]\n{name} = 0.2\n")
    with pytest.raises(ConfigError, match=f"sets {old}, which was removed; .*{instead}"):
        resolve({}, file=tmp_path / FILE_NAME, environ={})
    variable = f"UNDERSTUDY_{section.upper()}_{name.upper()}"
    with pytest.raises(ConfigError, match=f"{variable} .* was removed; .*{instead}"):
        resolve({}, environ={variable: "0.2"})
