"""The memory stream, beyond its contract: splitting and trimming on demand."""

import pytest

from tests.streams.memory import MemoryStream
from understudy.core.errors import ConfigError
from understudy.testing.streams import read_all, sample_frames


def test_a_session_stays_in_its_partition():
    stream = MemoryStream(4)
    for seed in range(12):
        stream.append(sample_frames(3, seed=seed))
    for records in read_all(stream).values():
        sessions = [record.raw[16:32] for record in records]
        assert all(sessions.count(session) == 3 for session in sessions)


def test_a_split_partition_ends_and_its_children_take_over():
    stream = MemoryStream(1)
    stream.append(sample_frames(2))
    stream.split("p0")
    stream.append(sample_frames(2, seed=1))
    assert [(one.id, one.parents) for one in stream.partitions()] == [
        ("p0", ()),
        ("p0a", ("p0",)),
        ("p0b", ("p0",)),
    ]
    assert stream.read("p0", None, max_bytes=1 << 20, wait_s=0.0).ended
    assert not stream.read("p0a", None, max_bytes=1 << 20, wait_s=0.0).ended


def test_everything_may_be_trimmed_away():
    stream = MemoryStream(1)
    stream.append(sample_frames(3))
    last = read_all(stream)["p0"][-1].position
    stream.trim("p0", keep_last=0)
    assert list(stream.read("p0", last, max_bytes=1, wait_s=0.0).records) == []
    stream.append(sample_frames(1, seed=1))
    assert len(stream.read("p0", last, max_bytes=1, wait_s=0.0).records) == 1


def test_there_is_at_least_one_partition():
    with pytest.raises(ConfigError):
        MemoryStream(0)
