"""A broker with TLS, SCRAM and ACLs: clients with all three are served, others get the reason."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import confluent_kafka.admin
import pytest

from tests.integration.certificates import write_certificates
from tests.integration.kafka import WAIT_TIMEOUT_S
from understudy.core.errors import ConfigError, Unreachable
from understudy.core.location import Location, parse_location
from understudy.dev import servers
from understudy.dev.recipes import RECIPES, ServerFolder, prepare_kafka
from understudy.streams.kafka import create_kafka, open_kafka
from understudy.streams.kafka_client import kafka_config
from understudy.testing.streams import read_all, sample_frames

kafka_admin: Any = confluent_kafka.admin
TOPIC = "plays"
_SETTINGS = """
listener.name.client.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
ssl.keystore.type=PEM
ssl.keystore.location={folder}/broker.pem
ssl.truststore.type=PEM
listener.name.client.ssl.client.auth=required
ssl.truststore.location={folder}/ca.pem
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:{user};User:ANONYMOUS
"""


def prepare(place: ServerFolder) -> None:
    """The same node behind TLS, with SCRAM beside PLAIN, and rights."""
    prepare_kafka(place)
    if not (place.folder / "ca.pem").exists():
        write_certificates(place.folder, {"broker": ["127.0.0.1"], "client": ["127.0.0.1"]})
    settings = place.folder / "server.properties"
    text = settings.read_text().replace("CLIENT:SASL_PLAINTEXT", "CLIENT:SASL_SSL")
    text = text.replace(
        "sasl.enabled.mechanisms=PLAIN", "sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512"
    )
    settings.write_text(
        text + _SETTINGS.format(folder=place.folder, user=place.credentials["username"])
    )


def ask(place: ServerFolder) -> None:
    tls = f"tls=true&ca={place.folder}/ca.pem&certificate={place.folder}/client.pem"
    location = parse_location(
        f"kafka://{place.address}/{TOPIC}?{tls}&credentials={place.credentials_file}"
    )
    kafka_admin.AdminClient(kafka_config(location).client()).list_topics(timeout=3.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if reason := servers.unavailable_reason("kafka"):
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "kafka", replace(RECIPES["kafka"], prepare=prepare, probe=ask))
        with servers.start("kafka", tmp_path_factory.mktemp("secure-kafka")) as server:
            create_kafka(as_owner(server), partitions=2)
            yield server


def as_owner(server: Any, *, ca: str = "ca.pem", certificate: str = "client.pem") -> Location:
    own = f"&certificate={server.place.folder}/{certificate}" if certificate else ""
    return parse_location(
        f"kafka://{server.address}/{TOPIC}?tls=true&ca={server.place.folder}/{ca}{own}&open_timeout_s=4"
        f"&credentials={server.credentials_file}"
    )


def as_user(server: Any, name: str, rights: list[tuple[str, str, str]]) -> Location:
    """A user known by SCRAM with these rights: (kind, name, operation)."""
    admin = kafka_admin.AdminClient(kafka_config(as_owner(server)).client())
    secret = kafka_admin.ScramCredentialInfo(kafka_admin.ScramMechanism.SCRAM_SHA_512, 4096)
    known = kafka_admin.UserScramCredentialUpsertion(name, secret, b"their password")
    admin.alter_user_scram_credentials([known])[name].result(WAIT_TIMEOUT_S)
    bindings = [
        kafka_admin.AclBinding(
            getattr(kafka_admin.ResourceType, kind),
            what,
            kafka_admin.ResourcePatternType.LITERAL,
            f"User:{name}",
            "*",
            getattr(kafka_admin.AclOperation, operation),
            kafka_admin.AclPermissionType.ALLOW,
        )
        for kind, what, operation in rights
    ]
    for future in admin.create_acls(bindings).values() if bindings else ():
        future.result(WAIT_TIMEOUT_S)
    file = server.place.folder / f"{name}.toml"
    file.write_text(f'username = "{name}"\npassword = "their password"\n')
    return parse_location(
        f"kafka://{server.address}/{TOPIC}?tls=true&ca={server.place.folder}/ca.pem&credentials={file}"
        f"&certificate={server.place.folder}/client.pem&mechanism=SCRAM-SHA-512&open_timeout_s=6"
    )


RIGHTS = [
    ("TOPIC", TOPIC, "READ"),
    ("TOPIC", TOPIC, "WRITE"),
    ("GROUP", f"understudy-{TOPIC}", "DESCRIBE"),
]
"""Read implies Describe."""


def test_tls_scram_and_the_rights_of_the_docs_are_enough(server: Any):
    with open_kafka(as_user(server, "ada", RIGHTS)) as stream:
        frames = sample_frames(4)
        assert all(outcome.accepted for outcome in stream.append(frames))
        found = read_all(stream)
    assert {record.raw for records in found.values() for record in records} == {
        frame.encode() for frame in frames
    }


def test_an_untrusted_certificate_is_reported(server: Any):
    with pytest.raises(ConfigError) as raised:
        open_kafka(as_owner(server, ca="stranger.pem"))
    assert "check that this listener uses TLS" in str(raised.value)
    assert "ca= is the CA of its certificate" in str(raised.value)


def test_a_missing_client_certificate_is_reported(server: Any):
    with pytest.raises(ConfigError, match="check that this listener uses TLS"):
        open_kafka(as_owner(server, certificate=""))


def test_missing_tls_is_reported_as_a_possible_cause(server: Any):
    location = parse_location(
        f"kafka://{server.address}/{TOPIC}?credentials={server.credentials_file}&open_timeout_s=2"
    )
    with pytest.raises(Unreachable, match="whether it requires TLS"):
        open_kafka(location)


def test_the_error_of_a_user_without_rights_names_the_needed_rights(server: Any):
    with pytest.raises(
        ConfigError, match=r"topic 'plays' .*needs Describe, Read and Write on the topic"
    ):
        open_kafka(as_user(server, "bob", []))


def test_append_reports_a_user_who_may_only_read(server: Any):
    rights = [RIGHTS[0], RIGHTS[2]]
    with open_kafka(as_user(server, "eve", rights)) as stream:
        (outcome,) = stream.append(sample_frames(1))
        assert (outcome.accepted, outcome.retry_after_s > 0) == (False, True)
        assert "needs Describe, Read and Write" in str(outcome.error)
