"""understudy stream and understudy store: make ready what lies on other machines."""

import click

from understudy.app.backends import create_stream, init_store, migrate_store
from understudy.app.config import hidden
from understudy.cli.options import console, examples, finish, json_option


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
@click.option("--partitions", type=click.IntRange(1, 10_000), metavar="N",
              help="Shards of Kinesis, partitions of Kafka; those of Kafka cannot be changed later "
                   "(default: 4, or as many as are there).")  # fmt: skip
@json_option
def init_stream(url: str, partitions: int | None, as_json: bool) -> int:
    """Make the stream at URL, where it is not there yet; one that is there stays as it is."""
    found = create_stream(url, partitions=partitions)
    if not as_json:
        said = f"is ready with {found} partition{'s' * (found != 1)}; next: understudy up --stream URL"
        console().print(f"{hidden(url)} {said}", soft_wrap=True)
    return finish({"stream": hidden(url), "partitions": found}, as_json=as_json)


@click.group(epilog=examples("understudy store init 'cassandra://HOST:9042/games?credentials=FILE'"))
def store() -> None:
    """Make a store on other machines ready, or bring an older one forward."""


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
    """Make the keyspace and tables at URL, where they are not there yet; what is there stays as it is."""
    init_store(url)
    if not as_json:
        console().print(f"{hidden(url)} is ready; next: understudy up --store URL", soft_wrap=True)
    return finish({"store": hidden(url)}, as_json=as_json)


@store.command(epilog=examples("understudy store migrate 'cassandra://HOST:9042/games?credentials=FILE'"))
@click.argument("url")
@json_option
def migrate(url: str, as_json: bool) -> int:
    """Bring the tables at URL to this release, with the ttl_s of the address; run it before `understudy up`."""
    before, after, ttl_s = migrate_store(url)
    if not as_json:
        said = f"were at version {after} already" if before == after else f"went from version {before} to {after}"
        kept = f"for {ttl_s} s" if ttl_s else "for ever"
        console().print(f"the tables of {hidden(url)} {said}; new chunks are kept {kept}", soft_wrap=True)
    return finish({"store": hidden(url), "before": before, "after": after, "ttl_s": ttl_s}, as_json=as_json)
