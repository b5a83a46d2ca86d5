"""Classes of a user's, in RLiable's form, for the tests of custom trainables."""

import json
from pathlib import Path
from typing import Any


class PushLeft:
    """Plays CartPole without learning; `train` has RLiable's two arguments."""

    def __init__(self, sc: Any, cfg: dict[str, Any]) -> None:
        assert sc is None
        self._cfg = cfg
        self._bonus = 0

    def train(self, env: Any, test_env: Any) -> None:
        assert env is not test_env
        self._bonus = self._cfg["hp_params"]["bonus"]

    def save(self) -> None:
        Path(self._cfg["mdl_file"]).write_text(json.dumps(self._bonus))

    def load_model(self) -> None:
        self._bonus = json.loads(Path(self._cfg["mdl_file"]).read_text())

    def evaluate(self, env: Any, num_eval_episodes: int | None = None) -> tuple[Any, float]:
        lengths = []
        for _ in range(num_eval_episodes or 3):
            env.reset()
            lengths.append(1)
            while not env.step(0)[2]:
                lengths[-1] += 1
        mdl_file = Path(self._cfg["mdl_file"])
        with (mdl_file.parent / "played.txt").open("a") as file:
            file.write(f"{len(lengths)} {sum(lengths)}\n")
        return lengths, sum(lengths) / len(lengths) + self._bonus


class RddCount:
    """RLiable's CountModel, as it is written there: rows are an RDD."""

    def __init__(self, sc: Any, cfg: dict[str, Any]) -> None:
        assert sc.parallelize([1, 2]).sum() == 3
        self._increment = cfg["hp_params"]["increment"]
        self._count = 0

    def train(self, tdata: Any, *args: Any) -> None:
        self._count = tdata.map(lambda row: row["x"]).count()

    def evaluate(self, test: Any) -> tuple[list[float], float]:
        increment, count = self._increment, self._count
        predictions = test.zipWithIndex().map(lambda y: (y[0]["x"], y[1] * increment + count))
        error = predictions.map(lambda y: (y[0] - y[1]) ** 2).sum()
        values = predictions.map(lambda y: y[1]).collect()
        return values, error / len(values)


class Answers:
    """Returns or raises what its settings say."""

    def __init__(self, sc: Any, cfg: dict[str, Any]) -> None:
        self._do = cfg["hp_params"]
        if self._do.get("raise_in") == "__init__":
            raise ValueError("bad\nsettings")

    def train(self, rows: list[Any]) -> None:
        if self._do.get("raise_in") == "train":
            raise KeyError("x")

    def evaluate(self, rows: list[Any]) -> Any:
        match self._do.get("returns"):
            case "mapping":
                return {"reward": 2, "size": 3.5}
            case "pair":
                return [1, 2], 4
            case "rows":
                return len(rows)
            case "nan":
                return float("nan")
            case "other":
                return {"loss": 1.0}
            case "text":
                return "good"
            case "exit":
                raise SystemExit(3)
        return None
