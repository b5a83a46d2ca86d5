"""What Spark's workers call: a stream by one text, since they are processes of their own."""

import json
from pathlib import Path

from understudy.app.backends import open_stream
from understudy.app.data import DataFolder
from understudy.app.roles.logs import log_to_stderr
from understudy.core.location import parse_location
from understudy.core.ports import Stream

OPENER = "understudy.app.roles.spark_stream:open_from_text"


def text_of(url: str, data: DataFolder) -> str:
    """What `open_from_text` takes; no secrets are in it, since an address has none."""
    return json.dumps({"stream": url, "data": str(data.root)})


def open_from_text(text: str) -> Stream:
    """The stream of an address or of a data folder, in whatever process."""
    log_to_stderr()
    fields = json.loads(text)
    return open_stream(fields["stream"], DataFolder(Path(fields["data"])))


def name_of(url: str, data: DataFolder) -> str:
    """A backend's name, however it is reached; by it a checkpoint is known to belong to it."""
    if not url:
        return f"file:{data.stream}"
    location = parse_location(url)
    hosts = ",".join(sorted(host if port is None else f"{host}:{port}" for host, port in location.hosts))
    return f"{location.scheme}://{hosts}/{location.path}"
