"""Arguments of `understudy.train` in one mapping, for tests that vary them by name."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from understudy.training.train import TrainOptions

_OPTIONS = [field.name for field in fields(TrainOptions)]


def with_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with those that are fields of TrainOptions moved into `options`."""
    options = {name: value for name, value in arguments.items() if name in _OPTIONS}
    rest = {name: value for name, value in arguments.items() if name not in _OPTIONS}
    return {**rest, "options": TrainOptions(**options)} if options else rest
