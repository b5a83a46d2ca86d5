# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""Plain torch: one decision for one observation, and acting on Gymnasium's vector env."""

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from torch import nn

from bench.against import payload
from bench.against.link import Link, Round, serve


def policy(net: str) -> nn.Sequential:
    """The network of that name with the common weights."""
    convs, layers = payload.weights(net)
    parts: list[nn.Module] = []
    for (kernel, bias), (out, into, side, stride) in zip(convs, payload.NATURE_CONVS, strict=False):
        conv = nn.Conv2d(into, out, side, stride)
        conv.weight.data = torch.from_numpy(kernel)
        conv.bias.data = torch.from_numpy(bias)
        parts += [conv, nn.ReLU()]
    parts += [nn.Flatten()] if convs else []
    for kernel, bias in layers:
        linear = nn.Linear(*kernel.shape)
        linear.weight.data = torch.from_numpy(kernel.T.copy())
        linear.bias.data = torch.from_numpy(bias)
        parts += [linear, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def inference(_: Link, request: dict[str, Any]) -> Round:
    """From a NumPy observation to an action."""

    def make(net: str) -> Callable[[payload.Array], int]:
        network = policy(net)
        is_image = net == "Nature"

        def act(obs: payload.Array) -> int:
            with torch.inference_mode():
                batch = torch.from_numpy(obs)[None]
                return int(network(batch.float().div_(255) if is_image else batch).argmax())

        return act

    return payload.inference(make, request)


def collect(_: Link, request: dict[str, Any]) -> Round:
    """Sampled actions on Gymnasium's own vector form of CartPole."""
    envs = gymnasium.make_vec(
        "CartPole-v1", num_envs=request["envs"], vectorization_mode="vector_entry_point"
    )
    network = policy("64-64")
    obs, _info = envs.reset(seed=0)

    def run() -> dict[str, Any]:
        nonlocal obs
        began_s = time.perf_counter()
        with torch.inference_mode():
            for _ in range(request["steps"]):
                actions = torch.distributions.Categorical(
                    logits=network(torch.from_numpy(obs)), validate_args=False
                )
                obs, *_rest = envs.step(actions.sample().numpy())
        took_s = time.perf_counter() - began_s
        return {
            "values": {"collect": request["steps"] * request["envs"] / took_s},
            "right": obs.shape[1] == 4,
        }

    return run


if __name__ == "__main__":
    serve(["torch", "gymnasium", "numpy"], {"inference": inference, "collect": collect})
