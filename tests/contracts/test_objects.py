"""Every built-in object storage passes the Objects contract."""

from pathlib import Path

import pytest

from understudy.models.cloud import CloudObjects
from understudy.models.objects import FolderObjects
from understudy.testing.objects import ObjectsContract


class TestFolderObjects(ObjectsContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._path = tmp_path / "models"

    def make(self) -> FolderObjects:
        return FolderObjects(self._path)


class TestCloudObjects(ObjectsContract):
    def make(self) -> CloudObjects:
        return CloudObjects("memory:///")
