"""Compiled programs on the disk: what was cut short is taken out, and compiled only once more."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

from understudy.learn.compile_cache import delete_truncated_entries

WHOLE = zlib.compress(b"a program" * 100)

# Compiles one program again and again, with its entry on the disk whole, cut, cut still, and taken
# out.
SCRIPT = """
import json, sys, warnings
from pathlib import Path
import jax, jax.numpy as jnp
from understudy.learn.compile_cache import delete_truncated_entries

folder = Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
told = []
def program(x): return jnp.sin(x) @ x
x = jnp.ones((4, 4))
def call():
    jax.clear_caches()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(program)(x)
    (entry,) = folder.glob("jit_program-*-cache")
    told.append([
        sum("persistent compilation cache" in str(one.message) for one in caught),
        entry.stat().st_size > 100,
    ])
    return entry
entry = call()
entry.write_bytes(entry.read_bytes()[:100])
call()
call()
dropped = delete_truncated_entries(folder)
call()
call()
print(json.dumps([told, dropped, delete_truncated_entries(folder)]))
"""


def test_jax_never_replaces_a_truncated_entry_until_it_is_removed(tmp_path: Path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    told, dropped, dropped_later = json.loads(found.stdout)
    assert told == [
        [0, True],
        [1, False],
        [1, False],
        [0, True],
        [0, True],
    ]  # warnings, and whether it is whole
    assert (dropped, dropped_later) == (1, 0)


def test_only_what_came_since_the_last_look_is_read_and_what_is_empty_always_goes(tmp_path: Path):
    for name, raw in {
        "a-cache": WHOLE,
        "b-cache": WHOLE[:-4],
        "c-cache": b"",
        "b-atime": b"",
        "notes": b"",
    }.items():
        (tmp_path / name).write_bytes(raw)
    (tmp_path / "z-cache").write_bytes(b"\x28\xb5\x2f\xfdrest")
    assert delete_truncated_entries(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a-cache",
        "b-atime",
        "checked",
        "notes",
        "z-cache",
    ]
    for name, raw in {"old-cache": WHOLE[:9], "empty-cache": b"", "new-cache": WHOLE[:9]}.items():
        (tmp_path / name).write_bytes(raw)
    for name in ("old-cache", "empty-cache"):
        os.utime(tmp_path / name, (1.0, 1.0))
    assert delete_truncated_entries(tmp_path) == 2
    assert (tmp_path / "old-cache").exists()


def test_a_folder_that_is_not_there_is_left_alone(tmp_path: Path):
    assert delete_truncated_entries(tmp_path / "none") == 0
    assert not (tmp_path / "none").exists()
