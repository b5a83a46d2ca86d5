"""Settings: which source wins, how text is parsed, and which values are refused with a hint."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from understudy.core.errors import ConfigError
from understudy.core.settings import (
    Leaf,
    Range,
    Schedule,
    check_value,
    from_tree,
    leaves,
    load_object,
    parse_text,
    parse_value,
    read_toml,
    resolve,
    setting,
    toml_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oven:
    heat: float = setting(200.0, 30, 300, "Degrees.")
    fan: bool = setting(False, description="Moves the air.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    name: str = setting("ours", description="What it is called.")
    size: str = setting("small", description="How many cook.", choices=("small", "large"))
    hours: tuple[int, ...] = setting((9, 17), description="When it is open.")
    oven: Oven = Oven()


def kitchen(environ: dict[str, str] | None = None, file: Path | None = None, **flags: Any) -> Any:
    return resolve(Kitchen, flags=flags, environ=environ or {}, file=file)


def test_a_flag_wins_over_a_variable_over_its_file_over_the_toml_over_the_default(tmp_path: Path):
    toml = tmp_path / "kitchen.toml"
    toml.write_text("[oven]\nheat = 40\n")
    (tmp_path / "heat").write_text("50\n")
    environ = {"UNDERSTUDY_OVEN_HEAT": "60", "UNDERSTUDY_OVEN_HEAT_FILE": str(tmp_path / "heat")}
    chain: list[tuple[float, str]] = []
    for flags in ({"oven.heat": 70.0}, {}):
        resolved = resolve(Kitchen, flags=flags, environ=environ, file=toml)
        chain.append((resolved.config.oven.heat, resolved.origins["oven.heat"]))
    del environ["UNDERSTUDY_OVEN_HEAT"]
    for variables, file in ((environ, toml), ({}, toml), ({}, None)):
        resolved = kitchen(variables, file)
        chain.append((resolved.config.oven.heat, resolved.origins["oven.heat"]))
    assert chain == [
        (70.0, "flag --heat"),
        (60.0, "UNDERSTUDY_OVEN_HEAT"),
        (50.0, f"UNDERSTUDY_OVEN_HEAT_FILE ({tmp_path / 'heat'})"),
        (40.0, str(toml)),
        (200.0, "default"),
    ]


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("NAME", "7", "7"),
        ("HOURS", "8, 20", (8, 20)),
        ("HOURS", "[8, 20]", (8, 20)),
        ("OVEN_FAN", "TRUE", True),
        ("OVEN_FAN", "0", False),
        ("OVEN_HEAT", "100", 100.0),
        ("OVEN_HEAT", "1e2", 100.0),
    ],
)
def test_text_is_parsed_as_the_type_of_its_setting(variable: str, text: str, value: Any):
    shown = kitchen({f"UNDERSTUDY_{variable}": text}).masked()
    assert value in [entry["value"] for entry in shown.values() if entry["origin"] != "default"]


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "OVEN_HEAT",
            "hot",
            r"oven.heat is 'hot' \(UNDERSTUDY_OVEN_HEAT\); give a number: Degrees.",
        ),
        (
            "OVEN_HEAT",
            "301",
            r"oven.heat is 301 \(UNDERSTUDY_OVEN_HEAT\); give 30 to 300: Degrees.",
        ),
        ("OVEN_HEAT", "nan", "give 30 to 300"),
        ("OVEN_FAN", "perhaps", "give true or false"),
        ("HOURS", "early", r"give a list, such as \[64, 64\]"),
        ("SIZE", "huge", "size is 'huge' .*; give one of small, large: How many cook."),
        ("OVEN_HAET", "1", "UNDERSTUDY_OVEN_HAET is set .* did you mean UNDERSTUDY_OVEN_HEAT?"),
        ("OVEN_HEAT_FILE", "/nowhere/heat", "names /nowhere/heat, which cannot be read"),
    ],
)
def test_an_invalid_value_is_refused_with_its_origin(variable: str, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        kitchen({f"UNDERSTUDY_{variable}": text})


def test_a_tree_is_checked_like_a_file():
    assert from_tree(Kitchen, {"hours": [1, 2], "oven": {"fan": True}}, where="x").oven == Oven(
        fan=True
    )
    with pytest.raises(
        ConfigError,
        match=r"x sets oven.haet, but there is no such setting; did you mean oven.heat\?",
    ):
        from_tree(Kitchen, {"oven": {"haet": 1}}, where="x")


def test_only_a_setting_that_may_move_accepts_a_schedule():
    leaf = Leaf("rate", 0.1, Range(0.0, 1.0, "How fast."))
    assert check_value(leaf, {"start": 1, "end": 0}, may_move=True) == Schedule(1.0, 0.0)
    with pytest.raises(ConfigError, match="fixed for a run"):
        check_value(leaf, Schedule(1.0, 0.0))
    with pytest.raises(ConfigError, match="give 0 to 1: How fast"):
        check_value(leaf, Schedule(2.0, 0.0), may_move=True)


def test_every_value_is_restored_from_toml():
    for leaf in leaves(Kitchen):
        text = toml_text(leaf.default)
        assert (
            check_value(leaf, parse_text(Leaf(leaf.name, (), None), f"[{text}]")[0]) == leaf.default
        )


def test_a_path_is_imported():
    assert load_object("math:pi", what="number") == math.pi


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("dqm", "no algorithm 'dqm'; did you mean 'dqn'"),
        ("alphazero", "known are dqn, ppo"),
        ("math:nothing", "cannot be imported: .*; give module:Class"),
        ("nowhere_at_all:Thing", "cannot be imported: .*; give module:Class"),
        (":Thing", "cannot be imported: .*; give module:Class"),
    ],
)
def test_an_unknown_path_is_refused_in_one_line(path: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        load_object(path, what="algorithm", known=("ppo", "dqn"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [(0, 1, "0 to 1"), (0.5, math.inf, "0.5 or more"), (-math.inf, math.inf, "a number")],
)
def test_allowed_numbers_are_named_without_infinities(low: float, high: float, numbers: str):
    leaf = Leaf("size", 1.0, Range(low, high, ""))
    with pytest.raises(ConfigError, match=f"size is nan; give {numbers}$"):
        check_value(leaf, math.nan)


def test_a_number_without_a_limit_may_not_be_infinite():
    leaf = Leaf("size", 1.0, Range(0.5, math.inf, ""))
    assert check_value(leaf, 1e300) == 1e300
    with pytest.raises(ConfigError, match=r"size is inf; give a finite number$"):
        check_value(leaf, math.inf)
    assert check_value(Leaf("size", 1, Range(1, math.inf, "")), 10**400) == 10**400


def test_a_number_of_too_many_digits_is_rejected(tmp_path: Path):
    digits = "9" * 5_000
    assert parse_value(digits) == digits
    (tmp_path / "long.toml").write_text(f"size = {digits}")
    with pytest.raises(ConfigError, match="is not TOML: Exceeds the limit"):
        read_toml(tmp_path / "long.toml")
