"""The contract of the Objects port, as tests to subclass."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from understudy.core.errors import Refused
from understudy.ports import Objects


class ObjectsContract:
    """Tests of an Objects: subclass, define `make`, and run with pytest."""

    def make(self) -> Objects:
        """Create an Objects that holds nothing; called once per test."""
        raise NotImplementedError(
            "a subclass of ObjectsContract must define make(): an Objects that holds nothing"
        )

    def test_a_created_object_is_read_back(self) -> None:
        objects = self.make()
        assert objects.get("a/b.json") is None
        assert objects.create("a/b.json", b"\0\xff" * 1000)
        assert objects.get("a/b.json") == b"\0\xff" * 1000

    def test_a_name_is_created_once(self) -> None:
        objects = self.make()
        assert objects.create("a/1", b"first")
        assert not objects.create("a/1", b"second")
        assert objects.get("a/1") == b"first"

    def test_of_concurrent_creations_one_wins(self) -> None:
        objects = self.make()
        for round_no in range(20):
            raws = [f"{thread}".encode() * 100 for thread in range(8)]
            with ThreadPoolExecutor(8) as pool:
                won = list(
                    pool.map(lambda raw, at=round_no: objects.create(f"race/{at}", raw), raws)
                )
            assert sum(won) == 1
            assert objects.get(f"race/{round_no}") == raws[won.index(True)]

    def test_a_list_has_the_names_of_a_folder_in_order(self) -> None:
        objects = self.make()
        for name in ("g/b/2", "g/a", "g/b/1", "other/x", "gg/y"):
            objects.create(name, b"")
        assert list(objects.list("g")) == ["g/a", "g/b/1", "g/b/2"]
        assert list(objects.list("nothing")) == []

    def test_delete_is_final_and_may_be_repeated(self) -> None:
        objects = self.make()
        objects.create("a/1", b"x")
        objects.delete("a/1")
        objects.delete("a/1")
        assert objects.get("a/1") is None
        assert objects.create("a/1", b"y")

    def test_names_outside_of_the_allowed_form_are_refused(self) -> None:
        objects = self.make()
        for name in (
            "",
            "/a",
            "a/",
            "a//b",
            "../a",
            "a/../b",
            "a/./b",
            ".a",
            "a\\b",
            "a b",
            "a%2fb",
            "ä",
            "x" * 600,
        ):
            calls = (
                objects.get,
                objects.list,
                objects.delete,
                lambda name: objects.create(name, b""),
            )
            assert [_reason(call, name) for call in calls] == ["bad_name"] * len(calls)


def _reason(call: Callable[[str], object], name: str) -> str:
    try:
        call(name)
    except Refused as error:
        return error.reason
    return "accepted"
