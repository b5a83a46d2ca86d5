# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""d3rlpy: trains on recorded rows for some seconds, then decides.

It has no action masks: in games with masks, the decision is the valid action with the highest
probability (BC) or Q value (CQL, BCQ; BCQ among those that its imitator finds likely enough).
"""

import contextlib
import dataclasses
import math
import time
from typing import Any

import d3rlpy
import numpy as np
import torch
from d3rlpy.constants import ActionSpace
from d3rlpy.dataset import Episode, InfiniteBuffer, ReplayBuffer
from d3rlpy.logging import NoopAdapterFactory
from d3rlpy.models.encoders import PixelEncoderFactory, VectorEncoderFactory
from d3rlpy.preprocessing import MinMaxActionScaler

from bench.against.link import Link, Round, pack, serve, unpack

_ENDLESS = 10**9
_WARM_UP_S = 0.5


class OverTime(Exception):
    """The seconds of a training are over."""


class Training:
    """An algorithm with d3rlpy's defaults but for the request's widths and batch."""

    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        d3rlpy.seed(request["seed"])
        with np.load(request["rows"]) as rows:
            self._dataset = _dataset(rows, n_actions=request["n_actions"])
            shape = rows["observations"].shape[1:]
        self._algorithm = _algorithm(request, shape)
        self._n_actions = request["n_actions"]

    def run(self, seconds: float) -> dict[str, Any]:
        """Train for some seconds, as a user does, without progress bars and log files."""
        updates = 0
        began_s = time.perf_counter()
        began_cpu_s = time.process_time()

        def count(_: Any, __: int, total: int) -> None:
            nonlocal updates
            updates = total
            if time.perf_counter() - began_s >= seconds:
                raise OverTime

        with contextlib.suppress(OverTime):
            self._algorithm.fit(
                self._dataset,
                n_steps=_ENDLESS,
                logger_adapter=NoopAdapterFactory(),
                show_progress=False,
                callback=count,
            )
        return {
            "updates": updates,
            "seconds": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - began_cpu_s,
        }

    def decide(self, obs: Any, mask: Any) -> Any:
        """d3rlpy's own actions; those of the best valid actions if there are masks."""
        return self._algorithm.predict(obs) if mask is None else self._best_valid(obs, mask)

    def check(self, obs: Any) -> None:
        """Our choice of valid actions must be d3rlpy's own where every action is valid."""
        ours = self._best_valid(obs, np.ones((len(obs), self._n_actions), np.bool_))
        assert (ours == self._algorithm.predict(obs)).mean() > 0.98, "not d3rlpy's decisions"

    def _best_valid(self, obs: Any, mask: Any) -> Any:
        algorithm = self._algorithm
        imitator = getattr(algorithm.impl.modules, "imitator", None)
        is_allowed = mask
        scores = None
        if imitator is not None:
            with torch.no_grad():
                logits = imitator(torch.from_numpy(obs)).logits.numpy()
            scores = logits
        flexibility = getattr(algorithm.config, "action_flexibility", None)
        if flexibility is not None:
            best = np.where(mask, logits, -np.inf).max(1, keepdims=True)
            is_allowed = mask & (logits - best > math.log(flexibility))
            scores = None
        if scores is None:
            scores = np.stack(
                [
                    algorithm.predict_value(obs, np.full(len(obs), action))
                    for action in range(self._n_actions)
                ],
                axis=1,
            )
        return np.where(is_allowed, scores, -np.inf).argmax(1)


def _dataset(rows: Any, *, n_actions: int) -> Any:
    """The episodes of `offline_peers.peer_rows`."""
    bounds = [0, *rows["ends"].tolist()]
    observations, actions, rewards = (rows[name] for name in ("observations", "actions", "rewards"))
    episodes = [
        Episode(
            observations[first:end],
            actions[first:end],
            rewards[first:end],
            bool(terminated),
        )
        for first, end, terminated in zip(bounds, bounds[1:], rows["terminated"], strict=False)
    ]
    return ReplayBuffer(
        InfiniteBuffer(),
        episodes=episodes,
        action_space=ActionSpace.DISCRETE if n_actions else ActionSpace.CONTINUOUS,
        action_size=n_actions or actions.shape[1],
    )


def _algorithm(request: dict[str, Any], shape: tuple[int, ...]) -> Any:
    kind = getattr(d3rlpy.algos, f"{request['algorithm']}Config")
    widths = request["widths"]
    encoder = (
        PixelEncoderFactory(filters=request["filters"], feature_size=widths[-1])
        if len(shape) == 3
        else VectorEncoderFactory(hidden_units=widths)
    )
    fields: dict[str, Any] = {
        field.name: encoder
        for field in dataclasses.fields(kind)
        if field.name.endswith("encoder_factory")
    }
    if not request["n_actions"]:
        # Its policies end in tanh.
        fields["action_scaler"] = MinMaxActionScaler(
            np.array(request["low"], np.float32), np.array(request["high"], np.float32)
        )
    return kind(batch_size=request["batch"], **fields).create(device="cpu:0")


def play(link: Link, request: dict[str, Any]) -> Round:
    """Train once, then answer observations with actions until an empty line."""
    Training(request).run(0.0)  # one update: torch imports some of its parts only then
    training = Training(request)

    def run() -> dict[str, Any]:
        link.say(says="trained", **training.run(request["seconds"]))
        is_checked = False
        while question := link.hear():
            obs = unpack(question["obs"])
            mask = unpack(question["mask"]) if question["mask"] else None
            if mask is not None and not is_checked:
                training.check(obs)
                is_checked = True
            link.say(says="actions", actions=pack(training.decide(obs, mask)))
        return {}

    return run


def rate(_: Link, request: dict[str, Any]) -> Round:
    """Updates and seconds of each round; one training, which continues."""
    training = Training(request)
    training.run(_WARM_UP_S)

    return lambda: training.run(request["seconds"])


if __name__ == "__main__":
    serve(["d3rlpy", "torch", "numpy"], {"play": play, "rate": rate})
