"""understudy stream and understudy store: create streams and stores on remote servers."""

import click

from understudy.backends.addresses import create_stream, init_store, migrate_store
from understudy.cli.options import examples, finish, json_option, results
from understudy.platform.config import mask_secrets


@click.group(epilog=examples("understudy stream init kafka://HOST:9092/games --partitions 8"))
def stream() -> None:
    """Create a Kinesis stream or Kafka topic."""


@stream.command(
    name="init",
    epilog=examples(
        "understudy stream init 'kinesis://games?region=eu-west-1' --partitions 4",
        "understudy stream init kafka://HOST:9092/games --partitions 8 --json",
    ),
)
@click.argument("url")
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Kinesis shards or Kafka partitions; Kafka's cannot be changed later (default: 4, or as "
    "many as already exist).",
)
@json_option
def init_stream(url: str, partitions: int | None, as_json: bool) -> int:
    """Create the stream at URL if it does not exist; an existing stream is left unchanged."""
    ready = create_stream(url, partitions=partitions)
    results(as_json=as_json).print(
        f"{mask_secrets(url)} is ready with {ready} partition{'s' * (ready != 1)}; next: "
        "understudy up --stream URL",
        soft_wrap=True,
    )
    return finish({"stream": mask_secrets(url), "partitions": ready}, as_json=as_json)


@click.group(
    epilog=examples("understudy store init 'cassandra://HOST:9042/games?credentials=FILE'")
)
def store() -> None:
    """Create a Cassandra store, or change how long it keeps steps."""


@store.command(
    name="init",
    epilog=examples(
        "understudy store init 'cassandra://HOST:9042/games?credentials=FILE&replication=3'",
        "understudy store init 'cassandra://HOST/games?ttl_s=7776000' --json",
    ),
)
@click.argument("url")
@json_option
def init_tables(url: str, as_json: bool) -> int:
    """Create the keyspace and tables at URL if they do not exist; existing ones stay unchanged."""
    init_store(url)
    results(as_json=as_json).print(
        f"{mask_secrets(url)} is ready; next: understudy up --store URL", soft_wrap=True
    )
    return finish({"store": mask_secrets(url)}, as_json=as_json)


@store.command(
    epilog=examples(
        "understudy store migrate 'cassandra://HOST/games?credentials=FILE&ttl_s=7776000'"
    )
)
@click.argument("url")
@json_option
def migrate(url: str, as_json: bool) -> int:
    """Set how long the store at URL keeps new chunks: ttl_s of the URL, in seconds; 0 is forever.

    Chunks already stored keep their expiry, and running processes use the old value until they are
    restarted. Without ttl_s in the URL nothing changes.
    """
    ttl_s = migrate_store(url)
    retention = f"for {ttl_s} s" if ttl_s else "forever"
    results(as_json=as_json).print(
        f"{mask_secrets(url)} keeps new chunks {retention}", soft_wrap=True
    )
    return finish({"store": mask_secrets(url), "ttl_s": ttl_s}, as_json=as_json)
