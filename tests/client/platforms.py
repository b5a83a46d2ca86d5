"""Signed bots for the client tests: a registry in a folder, and a link that announces them."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.act.policies import random_policy
from tests.client.fakes import MemoryLink
from understudy.core.signed import Signer, public_key_text
from understudy.experience.game import GameSpec, game_spec
from understudy.models.catalogue import Control, live_models
from understudy.models.manifest import Lineage
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.models.trial import trial_of
from understudy.nn.heads import head_for
from understudy.nn.network import Dense, Input, NetworkSpec
from understudy.nn.policy import Policy

SPEC = game_spec("my-game", obs=2, actions=3)
SIGNER = Signer(bytes(range(32)))


def constant_policy(
    action: int, spec: GameSpec = SPEC, kind: str = "argmax", **facts: Any
) -> Policy:
    """Return a policy that always takes the same action."""
    head = head_for(spec, kind)
    inputs = {name: Input(space.shape, space.dtype) for name, space in spec.obs_columns.items()}
    network = NetworkSpec(inputs, (), {name: (Dense(head.size),) for name in head.outputs})
    weights = {name: np.zeros(shape, np.float32) for name, shape in network.shapes().items()}
    for name, array in weights.items():
        if array.shape == (head.size,):
            weights[name] = np.where(np.arange(head.size) == action, 50.0, 0.0).astype(np.float32)
    return Policy(spec, network, weights, head, **facts)


class Platform:
    """A registry, and a link whose live models are updated by `announce`."""

    def __init__(
        self, folder: Path, signer: Signer = SIGNER, link: MemoryLink | None = None
    ) -> None:
        self.link = MemoryLink() if link is None else link
        trusted = {signer.key_id: signer.public}
        self.registry = Registry(FolderObjects(folder / "registry"), trusted=trusted, signer=signer)
        self.trust = (public_key_text(signer.public),)

    def release(
        self,
        policy: Policy | None = None,
        alias: str = "champion",
        *,
        share: float = 0.2,
        control: Control | None = None,
        temperature: float | None = None,
    ) -> int:
        """Release a model, point an alias to it and announce it."""
        policy = random_policy(SPEC, "categorical") if policy is None else policy
        game = policy.game.game
        epoch = self.registry.takeover(game, owner="test")
        config = {} if temperature is None else {"temperature": temperature}
        lineage = Lineage(algorithm="bc", config=config)
        model_no = self.registry.release(policy, lineage, epoch=epoch).model_no
        self.link.policies[model_no] = policy.encode()
        self.registry.set_alias(game, alias, model_no, why="test", share=share, control=control)
        self.announce()
        return model_no

    def announce(self) -> None:
        now = self.registry.catalogue("my-game")
        self.link.live_models = live_models(now, *now.pointers(), trust=self.trust)
        self.link.trial = trial_of(now, *now.pointers())
