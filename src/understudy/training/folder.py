"""A run's folder: its request, its progress and its result.

RUN/run.json               game, seed, wrappers, creation time, package versions
RUN/preset.toml            every setting; with the game, the seed and the files beside it, it
                           reproduces the run
RUN/checkpoints/           where a killed run resumes
RUN/store/                 the experience of its actors, to refill the replay; all of it only with
                           keep_history
RUN/network.json           only if a network was given by its spec, or taken from another run
RUN/start.safetensors      only if it started from another run's policy
RUN/curve.csv, curve.png   evaluations over time
RUN/guarded.csv            rejected chunks and updates, and restored weights, if any
RUN/best.safetensors       the best policy evaluated so far; last.safetensors: the newest
RUN/videos/                episodes of the best policy, if requested
RUN/result.json            exists once the run has finished
"""

import csv
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError, Refused
from understudy.core.log import make_folder, storage_error, write_file
from understudy.nn.network import NetworkSpec, network_from_json, network_to_json
from understudy.nn.policy import Policy, decode_policy
from understudy.training.events import Guarded

CURVE = (
    "env_steps",
    "updates",
    "train_s",
    "return_mean",
    "return_low",
    "return_high",
    "train_return",
)
INTERVAL = ("return_low", "return_high")
"""Columns that are empty (NaN in memory) if there were too few episodes for an interval."""
GUARDED = ("env_steps", "what", "chunks")
_NAME = (str,)
_TEXT = (str, type(None))
_COUNT = (int,)
_FACTS: Mapping[str, tuple[type, ...]] = {
    "game": _TEXT,
    "name": _NAME,
    "env_kwargs": (dict,),
    "wrappers": (list,),
    "frame_skip": _COUNT,
    "algorithm": _NAME,
    "seed": _COUNT,
    "until": (int, float, type(None)),
    "starts": _COUNT,
    "extensions": _COUNT,
    "created_ms": _COUNT,
    "schema": _NAME,
    "from_store": _TEXT,
    "init_from": _TEXT,
}
"""The facts read from run.json, and their types."""
_OPTIONAL_FACTS = {"extensions"}
"""Facts that older runs lack."""
_TEMPORARY = re.compile(r"\..*\.tmp")


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.store = root / "store"
        self.lock = root / ".lock"
        self.curve = root / "curve.csv"
        self.picture = root / "curve.png"
        self.guarded = root / "guarded.csv"

    @property
    def exists(self) -> bool:
        return (self.root / "run.json").exists()

    def create(
        self,
        facts: Mapping[str, Any],
        preset: str,
        *,
        network: NetworkSpec | None = None,
        start: Policy | None = None,
    ) -> None:
        """Write the request to disk; run.json is written last, and its presence marks a run."""
        make_folder(self.root.resolve())
        write_file(self.root / "preset.toml", preset.encode(), mode=0o644)
        if network is not None:
            write_file(self.root / "network.json", network_to_json(network), mode=0o644)
        if start is not None:
            self.save_policy("start", start)
        self.write_json("run.json", facts)

    def facts(self, *, is_whole: bool = True) -> dict[str, Any]:
        """The facts in run.json; ConfigError if there is no run, or a fact is missing or invalid.

        With `is_whole=False`, facts may be missing.
        """
        path = self.root / "run.json"
        try:
            facts = json.loads(path.read_bytes())
            if not isinstance(facts, dict):
                raise ValueError(f"expected an object, got {facts!r:.80}")
            for name, types in _FACTS.items():
                if is_whole and name not in facts and name not in _OPTIONAL_FACTS:
                    raise ValueError(f"{name} is missing")
                if name in facts and type(facts[name]) not in types:
                    expected = " or ".join(
                        "null" if kind is type(None) else kind.__name__ for kind in types
                    )
                    raise ValueError(f"{name} is {facts[name]!r:.80}, expected {expected}")
        except OSError as error:
            raise ConfigError(
                f"{self.root} is not a run ({error}); give the folder that 'train' printed"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"{path} is damaged: {error}; restore it from a copy, or train again"
            ) from None
        return facts

    def network(self) -> NetworkSpec | None:
        """The network spec that the run was started with, if any."""
        path = self.root / "network.json"
        return network_from_json(path.read_bytes()) if path.exists() else None

    def write_json(self, name: str, fields: Mapping[str, Any]) -> None:
        write_file(
            self.root / name,
            (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode(),
            mode=0o644,
        )

    def extend(self, facts: Mapping[str, Any], preset: str) -> None:
        """Reopen a finished run; if killed midway, the run finishes at its previous end again."""
        (self.root / "result.json").unlink()
        self.write_json("run.json", facts)
        write_file(self.root / "preset.toml", preset.encode(), mode=0o644)

    def result(self) -> dict[str, Any] | None:
        """The run's result, or None until it has finished."""
        path = self.root / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def saved_steps(self) -> int | None:
        """The step of the newest checkpoint; None if there is none yet."""
        return max(
            (int(path.stem) for path in self.checkpoints.glob("[0-9]*.safetensors")), default=None
        )

    # --- Policies ---------------------------------------------------------------------------------

    def save_policy(self, name: str, policy: Policy) -> None:
        try:
            write_file(self.root / f"{name}.safetensors", policy.encode(), mode=0o644)
        except OSError as error:
            raise storage_error(error, f"the {name} policy", then="resume the run") from error

    def policy(self, name: str = "best") -> Policy:
        """The policy in `policy_path(name)`; ConfigError if there is none yet."""
        return _read_policy(self.policy_path(name))

    def policy_path(self, name: str = "best") -> Path:
        """The file of the `best` or `last` policy; `last` if no evaluation has chosen a best."""
        for candidate in (name, "last"):
            if (path := self.root / f"{candidate}.safetensors").exists():
                return path
        raise ConfigError(
            f"{self.root} has no policy yet; train it first: understudy train GAME --resume --out "
            f"{self.root}"
        )

    def start(self) -> Policy:
        """The policy of another run that this one started from, as it was then."""
        return _read_policy(self.root / "start.safetensors")

    # --- The curve --------------------------------------------------------------------------------

    def cut_curve(self, env_steps: int) -> list[dict[str, float]]:
        """Drop evaluations after these steps, which a resumed run repeats; returns the rest."""
        rows = [row for row in self.curve_rows() if row["env_steps"] <= env_steps]
        lines = [",".join(CURVE), *(",".join(_cells(row)) for row in rows)]
        write_file(self.curve, ("\n".join(lines) + "\n").encode(), mode=0o644)
        return rows

    def add_to_curve(self, row: Mapping[str, float]) -> None:
        with self.curve.open("a", newline="") as file:
            csv.writer(file).writerow(_cells(row))

    def curve_rows(self) -> list[dict[str, float]]:
        if not self.curve.exists():
            return []
        rows = []
        with self.curve.open(newline="") as file:
            for row in csv.DictReader(file):
                # A kill may leave a partial line.
                if all(
                    row.get(name) not in ((None,) if name in INTERVAL else (None, ""))
                    for name in CURVE
                ):
                    rows.append({name: float(row[name] or math.nan) for name in CURVE})
        return rows

    # --- The guard --------------------------------------------------------------------------------

    def add_guarded(self, event: Guarded) -> None:
        """Append an event; the file has all of them, while a terminal shows only a few."""
        is_new = not self.guarded.exists()
        with self.guarded.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([GUARDED] if is_new else [])
            writer.writerow([event.env_steps, event.what, " ".join(event.chunks)])

    def cut_guarded(self, env_steps: int) -> None:
        """Drop the lines after these steps, which a resumed run repeats."""
        if not self.guarded.exists():
            return
        with self.guarded.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["chunks"] is not None]
        with io.StringIO(newline="") as text:
            writer = csv.DictWriter(text, GUARDED)
            writer.writeheader()
            writer.writerows(row for row in rows if int(row["env_steps"]) <= env_steps)
            write_file(self.guarded, text.getvalue().encode(), mode=0o644)


def _read_policy(path: Path) -> Policy:
    try:
        return decode_policy(path.read_bytes())
    except (OSError, Refused) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; restore it from a copy, or train again"
        ) from None


def _cells(row: Mapping[str, float]) -> list[str]:
    """A row of the curve as text: whole numbers in full, others to eight digits.

    The ends of an unknown interval are empty.
    """
    texts = {
        name: str(int(row[name])) if float(row[name]).is_integer() else f"{row[name]:.8g}"
        for name in CURVE
    }
    return ["" if name in INTERVAL and math.isnan(row[name]) else texts[name] for name in CURVE]


def default_folder(parent: Path, game: str, algorithm: str) -> Path:
    """`parent/GAME-ALGORITHM-N` with the first free N, starting at 1."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", f"{game}-{algorithm.rpartition(':')[2].lower()}")
    existing = {path.name for path in parent.iterdir()} if parent.is_dir() else set()
    number = 1
    while f"{stem}-{number}" in existing:
        number += 1
    return parent / f"{stem}-{number}"


def is_empty(folder: Path) -> bool:
    """Whether a run may use the folder; files of a run killed before its start do not count."""
    unstarted = {".lock", "preset.toml", "network.json", "start.safetensors"}
    if not folder.is_dir():
        return not folder.exists()
    return all(name in unstarted or _TEMPORARY.fullmatch(name) for name in os.listdir(folder))


def check_free(folder: Path) -> None:
    """ConfigError unless a run may start in this folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file; give a folder that is empty or does not exist yet, such as "
            f"{folder}-1"
        )
    if not is_empty(folder):
        raise ConfigError(f"{folder} is not empty; give another folder, or resume the run in it")


def seed_folders(root: Path) -> Sequence[Path]:
    """The folders `seed-N` of a training with several seeds, in order, or the folder itself."""
    folders = {
        int(path.name[5:]): path
        for path in root.glob("seed-*")
        if path.is_dir() and path.name[5:].isdecimal()
    }
    return [folders[seed] for seed in sorted(folders)] or [root]


def draw_curve(folder: RunFolder, *, title: str, goal: float | None) -> None:
    """Draw curve.png: evaluation returns over steps, with intervals; nothing if there are none."""
    rows = folder.curve_rows()
    if not rows:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported late: it is slow
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))  # a constrained layout would draw everything twice
    figure.subplots_adjust(left=0.12, right=0.98, bottom=0.13, top=0.92)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [row["env_steps"] for row in rows]
    axes.fill_between(
        steps,
        [row["return_low"] for row in rows],
        [row["return_high"] for row in rows],
        alpha=0.2,
        color="tab:blue",
    )
    axes.plot(
        steps,
        [row["return_mean"] for row in rows],
        marker=".",
        color="tab:blue",
        label="greedy, held-out seeds",
    )
    axes.plot(
        steps, [row["train_return"] for row in rows], color="tab:gray", lw=1, label="while training"
    )
    if goal is not None:
        axes.axhline(goal, color="tab:green", lw=1, ls="--", label=f"goal {goal:g}")
    axes.set(title=title, xlabel="steps", ylabel="return")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format="png", pil_kwargs={"compress_level": 1})
    write_file(folder.picture, png.getvalue(), mode=0o644)
