"""Two servers of the Kinesis API: `kinesis-local` reshards as the real one does, `kinesalite` is much quicker.

Neither checks who asks: any credentials are taken. Both would listen on every address of the machine; a few lines
that Node loads first keep them on loopback.
"""

from understudy.dev import aws
from understudy.dev.ports import HOST
from understudy.dev.recipe import Launch, Place
from understudy.dev.tools import client_trouble, find, missing, must_find

_LOOPBACK = """\
const net = require('net'), listen = net.Server.prototype.listen
net.Server.prototype.listen = function (port, ...rest) {
  if (typeof port !== 'number' && typeof port !== 'string') return listen.call(this, { ...port, host: 'HOST' }, ...rest)
  if (typeof rest[0] === 'string') rest.shift()
  return listen.call(this, Number(port), 'HOST', ...rest)
}
""".replace("HOST", HOST)


class KinesisLocal:
    """The recipe of `kinesis-local`: shards split and merge, children follow their parents."""

    ports = ("client", "tls")
    keeps_data = False

    def trouble(self) -> str | None:
        return _trouble()

    def prepare(self, place: Place) -> None:
        (place.folder / "loopback.cjs").write_text(_LOOPBACK)

    def launch(self, place: Place) -> Launch:
        package = place.package / "node_modules" / "kinesis-local"
        env = {
            "KINESIS_MOCK_CERT_PATH": str(package / "server.json"),
            "KINESIS_MOCK_PLAIN_PORT": str(place.ports["client"]),
            "KINESIS_MOCK_TLS_PORT": str(place.ports["tls"]),
            "AWS_REGION": place.credentials["region"],
            "LOG_LEVEL": "WARN",
            "SHARD_LIMIT": "100",
            **{f"{action}_DURATION": "50ms" for action in _ACTIONS},
        }
        return Launch([must_find("node"), "--require", place.folder / "loopback.cjs", package / "main.js"], env)

    def ask(self, place: Place) -> None:
        aws.client("kinesis", place).list_streams(Limit=1)

    def welcome(self, place: Place) -> None:
        """Nothing to do."""


class Kinesalite:
    """The recipe of `kinesalite`: volume, and data that outlive its process."""

    ports = ("client",)
    keeps_data = True

    def trouble(self) -> str | None:
        return _trouble()

    def prepare(self, place: Place) -> None:
        (place.folder / "loopback.cjs").write_text(_LOOPBACK)

    def launch(self, place: Place) -> Launch:
        package = place.package / "node_modules" / "kinesalite"
        return Launch([
            must_find("node"), "--require", place.folder / "loopback.cjs", package / "cli.js",
            "--port", str(place.ports["client"]), "--path", place.folder / "data", "--shardLimit", "100",
            "--createStreamMs", "50", "--deleteStreamMs", "50", "--updateStreamMs", "50",
        ])  # fmt: skip

    def ask(self, place: Place) -> None:
        aws.client("kinesis", place).list_streams(Limit=1)

    def welcome(self, place: Place) -> None:
        """Nothing to do."""


_ACTIONS = (
    "CREATE_STREAM", "DELETE_STREAM", "MERGE_SHARDS", "SPLIT_SHARD", "UPDATE_SHARD_COUNT", "REGISTER_STREAM_CONSUMER",
    "DEREGISTER_STREAM_CONSUMER", "START_STREAM_ENCRYPTION", "STOP_STREAM_ENCRYPTION", "UPDATE_STREAM_MODE",
)  # fmt: skip


def _trouble() -> str | None:
    return (None if find("node") else missing("node")) or client_trouble("boto3")
