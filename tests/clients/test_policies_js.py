"""Policies compute the same in JavaScript as in NumPy: layers, heads, masks, stacks and ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.nodes import needs_node, run_script
from tests.nn.networks import random_weights
from understudy.core import tensors
from understudy.core.tensors import DTYPES, Array
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from understudy.nn.heads import head_for
from understudy.nn.network import (
    _KINDS,
    ACTIVATIONS,
    Activation,
    Centre,
    Channels,
    Constant,
    Conv,
    Dense,
    Dueling,
    Flatten,
    Input,
    Layer,
    LayerNorm,
    NetworkSpec,
    ObservationNorm,
    OneHot,
    ScaleImage,
)
from understudy.nn.policy import Policy

pytestmark = needs_node
ERROR = 1e-5
VECTORS = 1_000
F32, F64, U8, I64, BOOL = (DTYPES[name] for name in ("F32", "F64", "U8", "I64", "BOOL"))

Case = tuple[
    GameSpec,
    str,
    dict[str, tuple[Layer, ...]],
    tuple[Layer, ...],
    dict[str, tuple[Layer, ...]],
    int,
]


def case(
    obs: Any,
    *trunk: Layer,
    kind: str = "argmax",
    actions: Any = 3,
    inputs: dict[str, tuple[Layer, ...]] | None = None,
    heads: dict[str, tuple[Layer, ...]] | None = None,
    stack: int = 1,
    has_action_mask: bool = False,
) -> Case:
    game = game_spec("net", obs=obs, actions=actions, has_action_mask=has_action_mask)
    head = head_for(game, kind)
    return (
        game,
        kind,
        inputs or {},
        trunk,
        heads or {name: (Dense(head.size, 1.0),) for name in head.outputs},
        stack,
    )


ARM = Box((3,), F32, (-1.0, -2.0, 0.0), (1.0, 2.0, 0.5))
CASES: dict[str, Case] = {
    **{name: case(5, Dense(16), Activation(name)) for name in ACTIVATIONS},
    "one number": case(1, Dense(3), Activation("tanh")),
    "wide": case(64, Dense(256), Activation("relu"), Dense(256), Activation("relu"), actions=18),
    "deep": case(6, *(Dense(32), LayerNorm(), Activation("silu")) * 6),
    "nothing but a head": case(4, kind="epsilon_greedy"),
    "activation alone": case(
        5, Activation("gelu"), Dense(4), heads={"q": (Activation("elu"), Dense(3))}
    ),
    "observation norm": case(
        Box((2, 3), F64),
        Dense(8),
        inputs={"obs": (ObservationNorm(), Flatten())},
        kind="categorical",
    ),
    "dueling": case(5, Dense(16), heads={"q": (Dueling(3),)}),
    "dueling with hidden layers": case(
        5, heads={"q": (Dueling(3, hidden=8), Activation("tanh")), "value": (Dense(1),)}
    ),
    "grey image": case(
        Box((9, 10), U8),
        inputs={
            "obs": (
                ScaleImage(),
                Channels(),
                Conv(4, 3, 2),
                Activation("relu"),
                Conv(3, 2),
                Flatten(),
            )
        },
    ),
    "colour image": case(
        Box((9, 8, 3), U8), inputs={"obs": (ScaleImage(), Conv(4, 3), LayerNorm(), Flatten())}
    ),
    "stacked colour images": case(
        Box((9, 8, 3), U8),
        stack=4,
        inputs={
            "obs": (ScaleImage(), Channels((0, 3)), Conv(5, 4, 3), Activation("gelu"), Flatten())
        },
    ),
    "a grid shown from a cell": case(
        Box((5, 7, 3), U8),
        inputs={
            "obs": (
                ScaleImage(),
                Centre(channel=2, radius=2),
                Conv(4, 3),
                Activation("relu"),
                Flatten(),
            )
        },
    ),
    "a grid shown from a place": case(
        {
            "map": MultiDiscrete((3,) * 24, (4, 6)),
            "place": MultiDiscrete((4, 6), (2,)),
            "x": Box((3,), F32),
        },
        Dense(8),
        stack=2,
        inputs={
            "obs.map": (
                OneHot(3),
                Channels((0, 3)),
                Centre(
                    row=("obs.place", -2), column=("obs.place", -1), others=("obs.x", "obs.place")
                ),
                Conv(3, 1),
                Flatten(),
            ),
            "obs.place": (OneHot(6), Flatten()),
            "obs.x": (Flatten(),),
        },
    ),
    "a grid shown from x and y": case(
        {"map": MultiDiscrete((3,) * 24, (4, 6)), "state": Box((3,), F64), "y": Discrete(4)},
        inputs={
            "obs.map": (
                OneHot(3),
                Centre(row=("obs.y", -1), column=("obs.state", -3)),
                Conv(3, 1),
                Flatten(),
            ),
            "obs.state": (Flatten(),),
            "obs.y": (OneHot(4),),
        },
    ),
    "a grid of numbers that are codes": case(
        Box((4, 6), F32),
        inputs={"obs": (OneHot(3, -1), Channels((2,)), Centre(channel=1), Conv(3, 1), Flatten())},
    ),
    "stacked vectors": case(
        3, Dense(8), stack=3, inputs={"obs": (Flatten(), Dense(8), Activation("tanh"))}
    ),
    "choices and switches": case(
        {
            "one": Discrete(4, 2, I64),
            "many": MultiBinary((3,)),
            "on": Box((2,), BOOL),
            "far.away": Box((2,), F64),
        },
        Dense(8),
        Activation("tanh"),
        kind="categorical",
        inputs={"obs.one": (OneHot(4, 2),), "obs.many": (OneHot(2), Flatten())},
    ),
    "masked values": case(
        5, Dense(16), Activation("relu"), actions=Discrete(7, 3), has_action_mask=True
    ),
    "masked logits": case(
        5, Dense(16), kind="categorical", actions=["a", "b", "c", "d"], has_action_mask=True
    ),
    "gaussian": case(
        4,
        Dense(8),
        kind="gaussian_clipped",
        actions=ARM,
        heads={"mean": (Dense(3),), "log_std": (Constant(3, -0.5),)},
    ),
    "gaussian in one number": case(4, kind="gaussian_clipped", actions=Box((), F32, -2.0, 2.0)),
    "gaussian without ends": case(4, kind="gaussian_clipped", actions=Box((2,), F32, 0.0, None)),
    "gaussian in float64": case(4, kind="gaussian_clipped", actions=Box((2, 2), F64, -0.1, 0.3)),
    "gaussian through tanh": case(4, Dense(8), kind="gaussian_tanh", actions=ARM),
}


def policy_of(case: Case, seed: int) -> Policy:
    game, kind, layers, trunk, heads, stack = case
    before = (stack,) if stack > 1 else ()
    inputs = {
        name: Input((*before, *space.shape), space.dtype, layers.get(name, ()))
        for name, space in game.obs_columns.items()
    }
    network = NetworkSpec(inputs, trunk, heads)
    weights = random_weights(network, np.random.default_rng(seed))
    for name, array in weights.items():
        # As large as trained weights: outputs stay near 1 at any width.
        if array.ndim == 2:
            weights[name] = array * np.float32(min(1.0, 2 / np.sqrt(len(array))))
    return Policy(game, network, weights, head_for(game, kind), stack=stack, version=7)


def observations(policy: Policy, rng: np.random.Generator) -> dict[str, Array]:
    columns: dict[str, Array] = {}
    for name, layout in policy.network.inputs.items():
        shape = (VECTORS, *layout.shape)
        space = policy.game.obs_columns[name]
        if isinstance(space, Discrete):
            columns[name] = rng.integers(space.start, space.start + space.n, shape).astype(
                layout.dtype
            )
        elif layout.dtype.kind == "f":
            values = rng.normal(0, 2, shape)
            is_code = OneHot in map(type, layout.layers)
            columns[name] = (np.rint(values) if is_code else values).astype(layout.dtype)
        else:
            most = 256 if layout.dtype == U8 else 2
            columns[name] = rng.integers(0, most, shape).astype(layout.dtype)
    return columns


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case run in both languages."""
    folder = tmp_path_factory.mktemp("policies")
    requests = []
    expected = {}
    for seed, (name, case) in enumerate(CASES.items()):
        rng = np.random.default_rng(seed)
        policy = policy_of(case, seed)
        columns = observations(policy, rng)
        n = policy.head.size
        action_mask = rng.random((VECTORS, n)) < 0.5 if policy.game.has_action_mask else None
        if action_mask is not None:
            action_mask[np.arange(VECTORS), rng.integers(0, n, VECTORS)] = True
        files = {"policy": folder / f"{seed}.policy", "obs": folder / f"{seed}.obs"}
        files["policy"].write_bytes(policy.encode())
        files["obs"].write_bytes(tensors.encode(columns, {}))
        requests.append(
            {name: str(file) for name, file in files.items()}
            | {"actionMasks": None if action_mask is None else action_mask.tolist()}
        )
        expected[name] = (policy, columns, action_mask)
    outputs = run_script("policies.mjs", {"runs": requests})["runs"]
    return {name: (*expected[name], output) for name, output in zip(CASES, outputs, strict=True)}


def test_every_kind_of_layer_and_head_is_among_the_cases():
    places = [place for case in CASES.values() for place in policy_of(case, 0).network.places()]
    assert {type(layer) for _, layers in places for layer in layers} == set(_KINDS.values())
    kinds = {case[1] for case in CASES.values()}
    assert kinds == {"argmax", "epsilon_greedy", "categorical", "gaussian_clipped", "gaussian_tanh"}


@pytest.mark.parametrize("name", CASES)
def test_outputs_differ_only_by_rounding_errors(runs: dict[str, Any], name: str):
    policy, columns, _, output = runs[name]
    expected = policy.outputs(columns)
    assert len(output["outputs"]) == VECTORS
    for head, outputs in expected.items():
        got = np.array([row[head] for row in output["outputs"]])
        assert got.shape == outputs.shape
        assert np.abs(got - outputs).max() <= ERROR, head
    assert (output["version"], output["schema"]) == (7, policy.game.schema)


@pytest.mark.parametrize("name", CASES)
def test_the_same_actions_are_chosen(runs: dict[str, Any], name: str):
    policy, columns, action_mask, output = runs[name]
    decision = policy.decide(columns, None, deterministic=True)
    if policy.head.is_discrete:
        start = policy.game.discrete.start
        assert_same_choice(policy, columns, decision.action + start, output["actions"], None)
        if action_mask is not None:
            masked = (
                policy.decide(columns, None, action_mask=action_mask, deterministic=True).action
                + start
            )
            assert_same_choice(policy, columns, masked, output["masked"], action_mask)
    else:
        got = np.array(output["actions"]).reshape(VECTORS, policy.head.size)
        assert np.abs(got - decision.action).max() <= ERROR


def assert_same_choice(
    policy: Policy, columns: dict[str, Array], expected: Array, got: Any, action_mask: Array | None
) -> None:
    """Assert that the actions are the same, except where two are practically equal."""
    scores = policy.outputs(columns)[policy.head.outputs[0]]
    start = policy.game.discrete.start if policy.game.discrete else 0
    for at in np.flatnonzero(expected != np.array(got)):
        assert abs(scores[at, expected[at] - start] - scores[at, got[at] - start]) <= ERROR * 10
        assert action_mask is None or action_mask[at, got[at] - start]


def test_ranks_equal_those_of_the_gateway(runs: dict[str, Any]):
    from understudy.ports import LiveModels
    from understudy.serve.bots import ServedModels, _advise

    for name in ("masked values", "masked logits", "choices and switches"):
        policy, columns, action_mask, output = runs[name]
        served = ServedModels(bot=LiveModels(number=1), policy=policy, model_no=1)
        for at, got in enumerate(output["ranks"]):
            mask = None if action_mask is None else action_mask[at : at + 1]
            row = {column: array[at : at + 1] for column, array in columns.items()}
            expected = _advise(served, row, mask, policy.game).actions
            assert [(entry["action"], entry["name"]) for entry in got] == [
                (advice.action, advice.name) for advice in expected
            ]
            for entry, advice in zip(got, expected, strict=True):
                assert (
                    entry["value"] == pytest.approx(advice.value, abs=ERROR)
                    or entry["value"] is advice.value is None
                )
                assert (
                    entry["probability"] == pytest.approx(advice.probability, abs=ERROR)
                    or entry["probability"] is None
                )


def test_sampling_follows_the_probabilities_and_stays_within_bounds(tmp_path: Path):
    game = game_spec("net", obs=2, actions=4)
    network = NetworkSpec({"obs": Input((2,), F32)}, (), {"logits": (Dense(4),)})
    bias = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    weights = {"heads.logits.0.kernel": np.zeros((2, 4), np.float32), "heads.logits.0.bias": bias}
    (tmp_path / "a").write_bytes(
        Policy(game, network, weights, head_for(game, "categorical")).encode()
    )
    (tmp_path / "b").write_bytes(policy_of(CASES["gaussian"], 1).encode())
    requests: list[Any] = [{"policy": str(tmp_path / "a"), "obs": [0, 0], "draws": 20_000}]
    requests.append({**requests[0], "actionMask": [True, False, True, False]})
    requests.append({"policy": str(tmp_path / "b"), "obs": [1, -1, 2, 0.5], "draws": 2_000})
    free, action_mask, boxed = run_script("policies.mjs", {"drawn": requests})["drawn"]
    assert np.bincount(free) / 20_000 == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.02)
    assert np.bincount(action_mask, minlength=4) / 20_000 == pytest.approx(
        [0.5 / 0.65, 0, 0.15 / 0.65, 0], abs=0.02
    )
    drawn = np.array(boxed)
    assert (drawn >= [-1, -2, 0]).all()
    assert (drawn <= [1, 2, 0.5]).all()
    assert (drawn.std(0) > 0.05).all()


def test_invalid_policies_are_rejected():
    good = policy_of(CASES["relu"], 0)
    raw = good.encode()
    columns, facts = tensors.decode(raw)
    few = {name: array for name, array in columns.items() if not name.endswith("bias")}
    odd = {name: np.full_like(array, np.nan) for name, array in columns.items()}
    more = {**columns, "trunk.9.kernel": columns["trunk.0.kernel"]}
    other = json.loads(facts["network"])
    other["trunk"][0]["layer"] = "magic"
    bad = [
        raw[:-1],
        b"no",
        tensors.encode(few, facts),
        tensors.encode(odd, facts),
        tensors.encode(more, facts),
        tensors.encode(columns, {**facts, "format": "understudy-policy/2"}),
        tensors.encode(columns, {**facts, "network": json.dumps(other)}),
        tensors.encode(columns, {**facts, "head": '{"kind":"dice","size":3,"low":[],"high":[]}'}),
        tensors.encode(columns, {**facts, "game": "{}"}),
    ]
    output = run_script("policies.mjs", {"refused": [data.hex() for data in (raw, *bad)]})[
        "refused"
    ]
    assert output == [
        "accepted",
        "bad_tensors",
        "bad_tensors",
        *["bad_policy"] * 3,
        "bad_version",
        *["bad_policy"] * 3,
    ]
