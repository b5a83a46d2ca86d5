"""Every built-in link passes the Link contract."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.act.policies import random_policy
from tests.serve.gateways import SIGNER, TRUSTED, running
from understudy.client.connect import Address, local_link
from understudy.client.http import HttpLink
from understudy.core.clock import SystemClock
from understudy.core.log import create_once
from understudy.experience.intake import key_file
from understudy.models.manifest import Lineage
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.nn.policy import Policy
from understudy.ports import Link
from understudy.testing import LinkContract


class _WithRegistry(LinkContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> Iterator[None]:
        self.data = tmp_path
        self.seed = 0
        with ExitStack() as self.stack:
            yield

    def release(self, policy: Policy, alias: str = "champion") -> int:
        registry = Registry(FolderObjects(self.data / "models"), trusted=TRUSTED, signer=SIGNER)
        epoch = registry.takeover(self.spec.game, owner="test")
        model_no = registry.release(policy, Lineage(algorithm="bc"), epoch=epoch).model_no
        registry.set_alias(self.spec.game, alias, model_no, why="test")
        return model_no

    def random_policy(self) -> Policy:
        self.seed += 1
        return random_policy(self.spec, "categorical", seed=self.seed)


class TestLocalLink(_WithRegistry):
    def make(self) -> Link:
        create_once(self.data / "signing.key", key_file(SIGNER._private))
        return local_link(self.data, self.spec, SystemClock())


class TestHttpLink(_WithRegistry):
    def make(self) -> Link:
        gateway = self.stack.enter_context(running(self.data))
        return HttpLink(Address(gateway.url, gateway.key("play", registers=True)), self.spec.game)
