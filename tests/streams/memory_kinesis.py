"""A Kinesis in memory with the published limits of AWS and a clock that tests control."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import md5
from typing import Any

from botocore.exceptions import ClientError

from understudy.core.clock import Clock

KEYS = 1 << 128
_READS_A_SECOND = 5
_ITERATOR_S = 300.0
_FIRST = 49_600_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000


def client_error(code: str, operation: str = "Call", *, status: int = 400) -> ClientError:
    said = {
        "Error": {"Code": code, "Message": f"{code} by the test"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(said, operation)


class MemoryKinesis:
    """boto3's client for one stream; a trimmed position becomes the oldest one, as with AWS."""

    def __init__(self, clock: Clock, *, shards: int = 1, page: int = 100) -> None:
        self._clock = clock
        self._page = page
        self.shards: dict[str, dict[str, Any]] = {}
        self.records: dict[str, list[tuple[int, float, bytes]]] = {}
        self.calls: Counter[str] = Counter()
        self.puts: list[int] = []
        """Number of records in each PutRecords call."""
        self.trouble: dict[str, list[Exception]] = {}
        """Errors that the next calls of an operation raise."""
        self.fail_records: list[set[int]] = []
        """Which records the next PutRecords calls reject."""
        self.most = 10_000
        """Limit of records per response."""
        self.early: list[str] = []
        """Shards that were read more often than allowed."""
        self._reads: dict[str, list[float]] = {}
        self._next = _FIRST
        for number in range(shards):
            self._add(KEYS * number // shards, KEYS * (number + 1) // shards - 1)

    def _add(self, low: int, high: int, **parents: str) -> str:
        name = f"shardId-{len(self.shards):012d}"
        self.shards[name] = {
            "ShardId": name,
            "SequenceNumberRange": {"StartingSequenceNumber": str(self._next)},
            "HashKeyRange": {"StartingHashKey": str(low), "EndingHashKey": str(high)},
            **parents,
        }
        self.records[name] = []
        return name

    def _end(self, shard: str) -> tuple[int, int]:
        self.shards[shard]["SequenceNumberRange"]["EndingSequenceNumber"] = str(self._next)
        keys = self.shards[shard]["HashKeyRange"]
        return int(keys["StartingHashKey"]), int(keys["EndingHashKey"])

    def split(self, shard: str) -> None:
        low, high = self._end(shard)
        self._add(low, (low + high) // 2, ParentShardId=shard)
        self._add((low + high) // 2 + 1, high, ParentShardId=shard)

    def merge(self, shard: str, other: str) -> None:
        keys = [*self._end(shard), *self._end(other)]
        self._add(min(keys), max(keys), ParentShardId=shard, AdjacentParentShardId=other)

    def forget(self, shard: str) -> None:
        """An ended shard whose records are all past retention."""
        del self.shards[shard], self.records[shard]

    # --- the API ----------------------------------------------------------------------------------

    def _count(self, operation: str) -> None:
        self.calls[operation] += 1
        if self.trouble.get(operation):
            raise self.trouble[operation].pop(0)

    def describe_stream_summary(self, **_: Any) -> Mapping[str, Any]:
        self._count("describe_stream_summary")
        created = datetime.fromtimestamp(1_700_000_000, UTC)
        return {
            "StreamDescriptionSummary": {
                "StreamStatus": "ACTIVE",
                "StreamCreationTimestamp": created,
            }
        }

    def list_shards(self, **asked: Any) -> Mapping[str, Any]:
        self._count("list_shards")
        assert set(asked) in ({"StreamName"}, {"NextToken"}), (
            "a page is requested by its token only"
        )
        start = int(asked.get("NextToken", 0))
        # Newest first: an undocumented order must not matter.
        found = list(reversed(self.shards.values()))
        more = {"NextToken": str(start + self._page)} if start + self._page < len(found) else {}
        return {"Shards": found[start : start + self._page], **more}

    def put_records(
        self,
        *,
        StreamName: str,  # noqa: N803
        Records: Sequence[Mapping[str, Any]],  # noqa: N803
    ) -> Mapping[str, Any]:
        self._count("put_records")
        assert len(Records) <= 500
        assert sum(len(one["Data"]) + len(one["PartitionKey"]) for one in Records) <= 5 << 20
        self.puts.append(len(Records))
        failing = self.fail_records.pop(0) if self.fail_records else set()
        answers = [
            {"ErrorCode": "InternalFailure", "ErrorMessage": "by the test"}
            if number in failing
            else self._accept(one)
            for number, one in enumerate(Records)
        ]
        return {"FailedRecordCount": len(failing), "Records": answers}

    def _accept(self, record: Mapping[str, Any]) -> dict[str, str]:
        key = int.from_bytes(md5(record["PartitionKey"].encode()).digest(), "big")
        for name, shard in self.shards.items():
            keys = shard["HashKeyRange"]
            is_open = "EndingSequenceNumber" not in shard["SequenceNumberRange"]
            if is_open and int(keys["StartingHashKey"]) <= key <= int(keys["EndingHashKey"]):
                self._next += 7
                self.records[name].append((self._next, self._clock.now(), record["Data"]))
                return {"ShardId": name, "SequenceNumber": str(self._next)}
        raise AssertionError("no shard accepts this key")

    def get_shard_iterator(self, **asked: Any) -> Mapping[str, Any]:
        self._count("get_shard_iterator")
        shard = asked["ShardId"]
        if shard not in self.shards:
            raise client_error("ResourceNotFoundException")
        kind = asked["ShardIteratorType"]
        number = int(asked.get("StartingSequenceNumber", 0))
        start = {
            "TRIM_HORIZON": 0,
            "AT_SEQUENCE_NUMBER": number,
            "AFTER_SEQUENCE_NUMBER": number + 1,
        }[kind]
        return {"ShardIterator": f"{shard}|{start}|{self._clock.now()}"}

    def get_records(self, *, ShardIterator: str) -> Mapping[str, Any]:  # noqa: N803
        self._count("get_records")
        shard, start, created_s = ShardIterator.split("|")
        now_s = self._clock.now()
        recent = [at_s for at_s in self._reads.get(shard, []) if at_s > now_s - 1.0]
        self._reads[shard] = [*recent, now_s]
        if len(recent) >= _READS_A_SECOND:
            self.early.append(shard)
        if now_s - float(created_s) > _ITERATOR_S:
            raise client_error("ExpiredIteratorException")
        found = [one for one in self.records[shard] if one[0] >= int(start)]
        is_open = "EndingSequenceNumber" not in self.shards[shard]["SequenceNumberRange"]
        found, left = found[: self.most], found[self.most :]
        following = left[0][0] if left else self._next + 1
        next_iterator = (
            {"NextShardIterator": f"{shard}|{following}|{now_s}"} if is_open or left else {}
        )
        behind_ms = (
            max(1, round((now_s - found[-1][1]) * 1000)) if left and found else 1 if left else 0
        )
        records = [
            {
                "SequenceNumber": str(number),
                "Data": data,
                "ApproximateArrivalTimestamp": datetime.fromtimestamp(at_s, UTC),
            }
            for number, at_s, data in found
        ]
        return {"Records": records, "MillisBehindLatest": behind_ms, **next_iterator}

    def close(self) -> None:
        self.calls["close"] += 1
