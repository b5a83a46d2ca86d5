"""Manifest: the signed facts about a model, and the check that a policy file matches them."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from understudy.core.errors import InvalidName, Refused
from understudy.core.names import game_name
from understudy.core.tensors import Array
from understudy.core.wording import joined, shortened
from understudy.nn.policy import Policy, decode_policy

MAX_POLICY_BYTES = 256 * 1024 * 1024
GOLDEN_ERROR = 1e-4
"""Absolute and relative tolerance of golden outputs, since other processors round differently."""
_GOLDEN_FACTOR = 2_654_435_761
"""2^32 divided by the golden ratio: its multiples modulo 2^32 are spread evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """How a model was trained."""

    algorithm: str
    seed: int = 0
    parent: int = 0
    """Number of the previous release of the same training, which was trained further; 0: none."""
    code_version: str = ""
    cursor_from: str = ""
    cursor_to: str = ""
    """The model learned from the store from `cursor_from` (empty: its start) to `cursor_to`."""
    steps: int = 0
    """Number of stored steps that the model learned from."""
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The signed facts of one model; its policy is stored separately, under its hash."""

    game: str
    schema: str
    model_no: int
    policy_sha256: str
    policy_bytes: int
    lineage: Lineage
    golden: Mapping[str, Any]
    """The outputs of every head of the network for two fixed observations."""

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain values, for a signed entry."""
        return asdict(self)

    @property
    def name(self) -> str:
        return model_name(self.game, self.model_no)


def model_name(game: str, model_no: int) -> str:
    """The model's name in messages and in the notes of episodes: `my-game/7`."""
    return f"{game}/{model_no}"


def number_of(name: str) -> int:
    """The number of the model with this name."""
    return int(name.rpartition("/")[2])


def manifest_from_json(facts: Any) -> Manifest:
    """Parse a manifest; Refused unless all fields are present and valid."""
    try:
        lineage = Lineage(**_typed(facts["lineage"], Lineage))
        manifest = Manifest(**_typed(facts, Manifest) | {"lineage": lineage})
        game_name(manifest.game)
    except (TypeError, KeyError, ValueError, InvalidName) as error:
        raise Refused("bad_manifest", shortened(str(error), 200)) from None
    is_hash = len(manifest.policy_sha256) == 64 and set(manifest.policy_sha256) <= set(
        "0123456789abcdef"
    )
    if manifest.model_no < 1 or not is_hash or not 0 < manifest.policy_bytes <= MAX_POLICY_BYTES:
        raise Refused(
            "bad_manifest",
            f"model {manifest.model_no} of {manifest.policy_bytes} bytes has an invalid number, "
            f"size or hash; expected a number from 1, 1 to {MAX_POLICY_BYTES} bytes and a hash of "
            "64 hex digits",
        )
    return manifest


def _typed(facts: Any, kind: type) -> dict[str, Any]:
    expected = {kind_field.name: kind_field.type for kind_field in fields(kind)}
    if not isinstance(facts, dict) or facts.keys() != expected.keys():
        raise ValueError(f"a {kind.__name__} must have exactly the fields {joined(expected)}")
    for name, value in facts.items():
        is_dict = name in ("lineage", "golden", "config", "metrics")
        expected_type: Any = dict if is_dict else expected[name]
        if type(value) is not expected_type:
            raise ValueError(
                f"{name} is a {type(value).__name__}; expected {expected_type.__name__}"
            )
    return facts


def make_manifest(policy: Policy, raw: bytes, *, model_no: int, lineage: Lineage) -> Manifest:
    """Create the manifest of a policy whose bytes are `raw`."""
    outputs = policy.outputs(_golden_obs(policy))
    golden = {
        name: np.asarray(array, np.float64).tolist() for name, array in sorted(outputs.items())
    }
    return Manifest(
        game=policy.game.game,
        schema=policy.game.schema,
        model_no=model_no,
        policy_sha256=hashlib.sha256(raw).hexdigest(),
        policy_bytes=len(raw),
        lineage=lineage,
        golden=golden,
    )


def open_policy(manifest: Manifest, raw: bytes) -> Policy:
    """Decode a policy; Refused unless its hash and its outputs match the manifest."""
    if (
        len(raw) != manifest.policy_bytes
        or hashlib.sha256(raw).hexdigest() != manifest.policy_sha256
    ):
        raise Refused(
            "bad_hash", f"the {len(raw)} bytes of {manifest.name} do not match the signed hash"
        )
    policy = decode_policy(raw)
    if (policy.game.game, policy.game.schema) != (manifest.game, manifest.schema):
        raise Refused(
            "bad_policy",
            f"{manifest.name} contains a policy of another game or schema, of {policy.game.game}",
        )
    for name, array in policy.outputs(_golden_obs(policy)).items():
        try:
            expected = np.asarray(manifest.golden[name], np.float64)
            is_close = expected.shape == array.shape and np.allclose(
                array, expected, GOLDEN_ERROR, GOLDEN_ERROR
            )
        except (KeyError, TypeError, ValueError):
            is_close = False
        if not is_close:
            # This understudy computes differently, or the weights are not those that were signed.
            raise Refused(
                "bad_golden", f"output {name!r} of {manifest.name} differs from the signed one"
            )
    return policy


def _golden_obs(policy: Policy) -> dict[str, Array]:
    """Two fixed observations that clients in every language can compute (docs/formats.md)."""
    columns = {}
    drawn = 0
    for name, column in policy.network.inputs.items():
        shape = (2, *column.shape)
        size = math.prod(shape)
        numbers = np.arange(drawn + 1, drawn + 1 + size, dtype=np.uint64)
        hashes = (numbers * np.uint64(_GOLDEN_FACTOR)) & np.uint64(0xFFFFFFFF)
        drawn += size
        is_float = np.issubdtype(column.dtype, np.floating)
        values = hashes / 2**31 - 1 if is_float else hashes >> np.uint64(31)
        columns[name] = values.reshape(shape).astype(column.dtype)
    return columns
