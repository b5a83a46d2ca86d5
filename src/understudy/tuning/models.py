"""CountModel: RLiable's example of a class that trains on rows, and a pattern for your own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class CountModel:
    """Counts the rows it trains on, and predicts that `x` continues from there by `increment`.

    Its metric is the mean squared error.
    """

    def __init__(self, sc: Any, cfg: Mapping[str, Any]) -> None:
        self._cfg = cfg
        self._increment = cfg["hp_params"].get("increment", 1)
        self._count = 0

    def train(self, data: Sequence[Mapping[str, float]]) -> None:
        self._count = len(data)

    def predict(self, data: Sequence[Mapping[str, float]]) -> list[float]:
        return [self._count + number * self._increment for number in range(len(data))]

    def evaluate(self, data: Sequence[Mapping[str, float]]) -> tuple[list[float], float]:
        predictions = self.predict(data)
        errors = [(row["x"] - value) ** 2 for row, value in zip(data, predictions, strict=True)]
        return predictions, sum(errors) / len(errors)

    def save(self) -> None:
        Path(self._cfg["mdl_file"]).write_text(json.dumps({"count": self._count}))

    def load_model(self) -> None:
        self._count = json.loads(Path(self._cfg["mdl_file"]).read_text())["count"]
