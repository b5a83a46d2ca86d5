"""Certificates that a config names: expired ones, and those that expire soon, are reported."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.platforms import Up
from tests.serve.test_server import certificate
from understudy.cli.certificates import certificates, check_certificate
from understudy.cli.root import run as run_command
from understudy.platform.config import Config, GatewaySection, StoreSection, StreamSection

DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("later_days", "is_valid", "advice"),
    [
        (0, True, ""),
        (5, True, "expires on "),
        (21, False, "expired on "),
        (-2, False, "is valid only from "),
    ],
)
def test_a_certificate_is_reported_14_days_before_it_expires(
    tmp_path: Path, later_days: float, is_valid: bool, advice: str
):
    path, _ = certificate(tmp_path, days=18)
    result, text = check_certificate(path, now_s=time.time() + later_days * DAY_S)
    assert result == is_valid
    assert advice in text
    assert bool(text) == bool(advice)


def test_other_certificates_of_a_chain_may_have_expired(tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, _ = certificate(tmp_path / "first", days=60)
    second, _ = certificate(tmp_path / "second", days=2)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(first.read_bytes() + second.read_bytes())
    assert check_certificate(chain, now_s=time.time() + 9 * DAY_S) == (True, "")


def test_a_certificate_of_an_unknown_user_is_not_readable():
    (path,) = certificates(Config(gateway=GatewaySection(certificate="~nosuch/x.pem")))
    assert not check_certificate(path, now_s=0.0)[0]


def test_a_file_without_a_certificate_is_reported(tmp_path: Path):
    for path in (tmp_path / "none.pem", tmp_path):
        assert not check_certificate(path, now_s=0.0)[0]
    (tmp_path / "empty.pem").write_bytes(b"")
    is_valid, advice = check_certificate(tmp_path / "empty.pem", now_s=0.0)
    assert not is_valid
    assert "empty.pem is not a readable certificate" in advice


def test_certificates_of_the_gateway_and_of_clients_are_found():
    config = Config(
        gateway=GatewaySection(certificate="a.pem"),
        stream=StreamSection(url="kafka://localhost:9093/t?certificate=b.pem&key=c.pem"),
        store=StoreSection(url="cassandra://localhost/k?ca=d.pem"),
    )
    assert certificates(config) == [Path("a.pem"), Path("b.pem")]
    assert certificates(Config(store=StoreSection(url="cassandra://a:b@c:d"))) == []


@pytest.mark.parametrize(("days", "colour"), [(-0.5, "red"), (3, "yellow"), (90, "green")])
def test_doctor_and_status_name_a_certificate_that_expires(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], days: float, colour: str
):
    path, key = certificate(tmp_path, days=days)
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "understudy.toml").write_text(
        f'[gateway]\ncertificate = "{path}"\ncertificate_key = "{key}"\n'
    )
    data = ["--data", str(tmp_path / "D"), "--json"]
    assert run_command(["doctor", *data]) == (colour == "red")
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["certificate"]["colour"] == colour
    assert run_command(["status", *data]) == 1
    first = json.loads(capsys.readouterr().out)["next"][0]
    assert (str(path) in first) == (colour != "green")
    assert run_command(["config", "check", *data]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == (colour != "green")


def test_up_warns_at_its_start(tmp_path: Path):
    path, key = certificate(tmp_path, days=3)
    data = tmp_path / "D"
    data.mkdir()
    (data / "understudy.toml").write_text(
        f'[gateway]\ncertificate = "{path}"\ncertificate_key = "{key}"\n'
    )
    with Up(data, "--role", "gateway") as platform:
        assert f"! {path} expires on " in platform.errors


def test_a_key_of_another_certificate_is_found_before_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    path, _ = certificate(tmp_path / "first", days=60)
    _, key = certificate(tmp_path / "second", days=60)
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "understudy.toml").write_text(
        f'[gateway]\ncertificate = "{path}"\ncertificate_key = "{key}"\n'
    )
    wrong = f"{path} and {key} are not a certificate and its key: "
    data = ["--data", str(tmp_path / "D")]
    assert run_command(["config", "check", *data]) == 2
    assert wrong in capsys.readouterr().err
    assert run_command(["doctor", *data, "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    (bad,) = (check for check in checks if check["colour"] == "red")
    assert bad["result"].startswith(wrong)
    assert run_command(["up", *data]) == 2
    assert wrong in capsys.readouterr().err
