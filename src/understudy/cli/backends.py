"""understudy stream and understudy store: make ready what lies on other machines."""

import click

from understudy.backends.addresses import create_stream, init_store, migrate_store
from understudy.cli.options import examples, finish, json_option, results
from understudy.platform.config import hidden


@click.group(epilog=examples("understudy stream init kafka://HOST:9092/games --partitions 8"))
def stream() -> None:
    """Make a stream on other machines ready."""


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
    help="Shards of Kinesis, partitions of Kafka; those of Kafka cannot be changed later "
    "(default: 4, or as many as are there).",
)
@json_option
def init_stream(url: str, partitions: int | None, as_json: bool) -> int:
    """Make the stream at URL, where it is not there yet; one that is there stays as it is."""
    found = create_stream(url, partitions=partitions)
    said = f"is ready with {found} partition{'s' * (found != 1)}; next: understudy up --stream URL"
    results(as_json=as_json).print(f"{hidden(url)} {said}", soft_wrap=True)
    return finish({"stream": hidden(url), "partitions": found}, as_json=as_json)


@click.group(
    epilog=examples("understudy store init 'cassandra://HOST:9042/games?credentials=FILE'")
)
def store() -> None:
    """Make a store on other machines ready, or change how long it keeps steps."""


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
    """Make the keyspace and tables at URL, where they are not there yet; what is there stays as
    it is."""
    init_store(url)
    results(as_json=as_json).print(
        f"{hidden(url)} is ready; next: understudy up --store URL", soft_wrap=True
    )
    return finish({"store": hidden(url)}, as_json=as_json)


@store.command(
    epilog=examples(
        "understudy store migrate 'cassandra://HOST/games?credentials=FILE&ttl_s=7776000'"
    )
)
@click.argument("url")
@json_option
def migrate(url: str, as_json: bool) -> int:
    """Change how long the store at URL keeps new chunks: the ttl_s of the address in seconds, 0 for
    ever.

    Chunks that are stored keep the time they were given, and processes that run go on with the old
    one until they are started again. Without ttl_s in the address nothing changes.
    """
    before, after, ttl_s = migrate_store(url)
    kept = f"for {ttl_s} s" if ttl_s else "for ever"
    results(as_json=as_json).print(
        f"the tables of {hidden(url)} were at version {after} already; new chunks are kept {kept}",
        soft_wrap=True,
    )
    return finish(
        {"store": hidden(url), "before": before, "after": after, "ttl_s": ttl_s}, as_json=as_json
    )
