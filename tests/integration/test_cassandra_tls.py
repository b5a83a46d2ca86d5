"""A Cassandra with TLS: clients with its authority and name are served, others get the reason."""

import ssl
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.integration.certificates import write_certificates
from tests.integration.keyspaces import Keyspace
from understudy.core.errors import ConfigError, UnderstudyError, Unreachable
from understudy.dev import servers
from understudy.dev.recipes import (
    RECIPES,
    ServerFolder,
    init_cassandra,
    prepare_cassandra,
    probe_cassandra,
)
from understudy.ports import Candidate, Position, SessionFilter, WriteBatch
from understudy.testing.samples import PLAYER, random_session
from understudy.testing.store_harness import SPEC

_SETTINGS = """
client_encryption_options:
  enabled: true
  optional: false
  require_client_auth: true
  keystore: {folder}/node.pem
  truststore: {folder}/ca.pem
  ssl_context_factory:
    class_name: org.apache.cassandra.security.PEMBasedSslContextFactory
"""


def prepare(place: ServerFolder) -> None:
    """The same node behind TLS, for clients that have a certificate of the same authority."""
    prepare_cassandra(place)
    if not (place.folder / "ca.pem").exists():
        write_certificates(place.folder, {"node": ["127.0.0.1"], "us": ["127.0.0.1"]})
    settings = place.folder / "cassandra.yaml"
    settings.write_text(settings.read_text() + _SETTINGS.format(folder=place.folder))


def tls(place: ServerFolder) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=place.folder / "ca.pem")
    context.load_cert_chain(place.folder / "us.pem")
    return context


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if reason := servers.unavailable_reason("cassandra"):
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        secure = replace(
            RECIPES["cassandra"],
            prepare=prepare,
            probe=lambda place: probe_cassandra(place, tls=tls(place)),
            initialise=lambda place: init_cassandra(place, tls=tls(place)),
        )
        patch.setitem(RECIPES, "cassandra", secure)
        with servers.start("cassandra", tmp_path_factory.mktemp("secure-cassandra")) as server:
            yield server


def refusal(
    server: Any, kind: type[UnderstudyError], options: str, *, host: str = "127.0.0.1"
) -> str:
    port = server.address.rpartition(":")[2]
    with pytest.raises(kind) as caught:
        Keyspace.open_at(
            f"cassandra://{host}:{port}/none?credentials={server.credentials_file}&retry_s=1{options}"
        )
    assert "\n" not in str(caught.value)
    print(caught.value)
    return str(caught.value)


def files(server: Any, *, ca: str = "ca.pem") -> str:
    return f"&ca={server.place.folder}/{ca}&certificate={server.place.folder}/us.pem"


def test_a_client_with_the_right_authority_and_name_is_served(server: Any) -> None:
    keyspace = Keyspace(server, server.credentials_file, "secure", options=files(server))
    with keyspace.open() as store:
        chunks = random_session(SPEC, np.random.default_rng(1))
        claim = store.claim("one", owner="test", ttl_s=60.0)
        candidates = [Candidate(chunk.frame().stamped(PLAYER, int(1e9)), chunk) for chunk in chunks]
        store.write(WriteBatch("one", claim.epoch, Position("1"), candidates))
        assert [one.n_chunks for one in store.sessions(SessionFilter())] == [len(chunks)]
    keyspace.close()


def test_an_untrusted_certificate_is_reported(server: Any) -> None:
    for options in (files(server, ca="stranger.pem"), "&tls=true"):
        told = refusal(server, ConfigError, options)
        assert "certificate verify failed" in told
        assert "check ca=FILE" in told


def test_a_certificate_for_another_name_is_rejected_unless_allowed(server: Any) -> None:
    told = refusal(server, ConfigError, files(server), host="localhost")
    assert "certificate is not valid for 'localhost'" in told
    assert "check_hostname" in told
    told = refusal(server, ConfigError, f"{files(server)}&check_hostname=false", host="localhost")
    assert "keyspace none does not exist" in told, "it was let in"


def test_tls_or_a_client_certificate_on_one_side_only_names_the_options(
    server: Any, cassandra_server: Any
) -> None:
    wanted = (
        "check host and port, that the server is running, and the options tls, ca, certificate "
        "and key"
    )
    assert wanted in refusal(server, Unreachable, f"&ca={server.place.folder}/ca.pem")
    assert wanted in refusal(server, Unreachable, "")
    told = refusal(cassandra_server, Unreachable, files(server))
    assert "WRONG_VERSION_NUMBER" in told
    assert wanted in told
