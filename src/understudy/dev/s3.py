"""A server of the S3 API with right conditional writes: versitygw over a folder; moto, in memory, where no Go is."""

import contextlib
import os
import sys
from pathlib import Path

from understudy.dev import aws
from understudy.dev.ports import HOST
from understudy.dev.recipe import Launch, Place
from understudy.dev.tools import client_trouble

BUCKET = "understudy"
"""A bucket that is there from the start."""


class Versity:
    """The recipe of versitygw: objects are files, so they outlive its process."""

    ports = ("client",)
    keeps_data = True

    def trouble(self) -> str | None:
        return client_trouble("boto3")

    def prepare(self, place: Place) -> None:
        for name in ("data", "facts"):
            (place.folder / name).mkdir(exist_ok=True)

    def launch(self, place: Place) -> Launch:
        data = place.folder / "data"
        # What S3 knows of an object beyond its bytes stands in attributes of the file, where the disk has them.
        facts: list[str | Path] = [] if _has_attributes(data) else ["--sidecar", place.folder / "facts"]
        who = place.credentials
        return Launch(
            [place.package / "versitygw", "--quiet", "--region", who["region"], "--port", place.address,
             "posix", *facts, data],
            {"ROOT_ACCESS_KEY": who["access_key_id"], "ROOT_SECRET_KEY": who["secret_access_key"]},
        )  # fmt: skip

    def ask(self, place: Place) -> None:
        aws.client("s3", place).list_buckets()

    def welcome(self, place: Place) -> None:
        _make_bucket(place)


class Moto:
    """The recipe of moto: everything in memory, any credentials are taken."""

    ports = ("client",)
    keeps_data = False

    def trouble(self) -> str | None:
        return client_trouble("boto3") or client_trouble("moto")

    def prepare(self, place: Place) -> None:
        """Nothing to do."""

    def launch(self, place: Place) -> Launch:
        return Launch([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(place.ports["client"])])

    def ask(self, place: Place) -> None:
        aws.client("s3", place).list_buckets()

    def welcome(self, place: Place) -> None:
        _make_bucket(place)


def _make_bucket(place: Place) -> None:
    """The first bucket; one that is there already is fine."""
    client = aws.client("s3", place)
    if BUCKET not in [found["Name"] for found in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)


def _has_attributes(folder: Path) -> bool:
    probe = folder.parent / ".attributes"
    probe.touch()
    try:
        with contextlib.suppress(OSError, AttributeError):
            os.setxattr(probe, "user.understudy", b"1")
            return True
        return False
    finally:
        probe.unlink(missing_ok=True)
