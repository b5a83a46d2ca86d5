"""The data folder: one place for everything a platform keeps, and where each part of it is."""

import os
from dataclasses import dataclass
from pathlib import Path

from understudy.core.errors import ConfigError
from understudy.core.log import is_locked
from understudy.stores.database import has_store


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths inside a data folder."""

    root: Path
    store_name: str = "store"
    """Another one for the copy of a store that lies elsewhere."""

    @property
    def stream(self) -> Path:
        return self.root / "stream"

    @property
    def store(self) -> Path:
        return self.root / self.store_name

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def games(self) -> Path:
        return self.root / "models" / "games"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def requests(self) -> Path:
        return self.root / "requests"

    def game_names(self) -> list[str]:
        """Games with a registered spec."""
        return sorted(path.name for path in self.games.iterdir()) if self.games.is_dir() else []

    def has_store(self) -> bool:
        """Whether a store was ever created here."""
        return has_store(self.store)

    def has_writer(self) -> bool:
        """Whether some process has the store open for writing."""
        return is_locked(self.store / ".lock")

    def must_exist(self) -> "DataFolder":
        """Itself, or ConfigError when nothing was ever recorded here."""
        if not self.root.is_dir() or not any((self.store.exists(), self.stream.exists(), self.spool.exists())):
            raise ConfigError(
                f"{self.root} holds no recorded data; record some first, such as "
                f"'understudy simulate CartPole-v1 --data {self.root}', or name another folder with --data"
            )
        return self


def data_folder(given: str | None) -> DataFolder:
    """The folder named by `--data` or UNDERSTUDY_DATA."""
    text = given or os.environ.get("UNDERSTUDY_DATA")
    if not text:
        raise ConfigError("no data folder was named; give --data DIR, or set UNDERSTUDY_DATA")
    try:
        path = Path(text).expanduser().resolve()
        is_taken = path.exists() and not path.is_dir()
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"--data {text[:80]!r} is no folder: {error}; give a path such as D") from None
    if is_taken:
        raise ConfigError(f"{path} is a file; give a folder to --data")
    return DataFolder(path)
