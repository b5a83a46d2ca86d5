"""Rules of the repository: no code in data, a light base install, pinned versions, no paths."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

TARGETS = {
    "setup",
    "demo",
    "test",
    "check",
    "bench",
    "card",
    "constraints",
    "clean",
    "help",
    "test-backends",
}
BASE_INSTALL = {
    "understudy",
    "numpy",
    "safetensors",
    "urllib3",
    "cryptography",
    "cffi",
    "pycparser",
}
PULLED_BY_SOME_PYTHONS = {"typing-extensions"}
NOT_IN_A_GAME = {"jax", "gymnasium", "click", "rich", "starlette", "urllib3", "cryptography"}
IMPORT_LIMIT = 120
"""Modules besides those of numpy: the cost of an import on any machine."""
IMPORT_LIMIT_MS = 150.0


# (a) No code in data.

CODE_CARRIERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "cloudpickle",
    "dill",
    "joblib",
}
RUNS_TEXT = {"eval", "exec"}
LOADS_CODE = {("yaml", "load"), ("yaml", "unsafe_load")}
SUSPECT = re.compile(rf"\b(?:{'|'.join(CODE_CARRIERS | RUNS_TEXT)}|yaml|allow_pickle)\b")
"""A file without any of these words has none of the constructs, and need not be parsed."""
PEER = "bench/against/seed_tcp.py"
"""The seed's protocol, the peer of `bench/gateway.py`, which unpickles what it receives."""
OWN_CHILD = "src/understudy/act/remote_team.py"
"""It passes the caller's game, which may be any function, to actors that it starts."""


def unsafe(source: str) -> Iterator[str]:
    """Constructs in a Python file that could run code from data, each as `line: reason`."""
    if not SUSPECT.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        for reason in reasons(node):
            yield f"{getattr(node, 'lineno', 0)}: {reason}"


def reasons(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (f"import {name.name}" for name in names if carries_code(name.name))
        case ast.ImportFrom(module=str(module)) if carries_code(module):
            yield f"from {module} import"
        case ast.Call(func=ast.Name(id=name)) if name in RUNS_TEXT:
            yield f"{name}()"
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=attr)) if (
            owner,
            attr,
        ) in LOADS_CODE:
            yield f"{owner}.{attr}()"
        case ast.Call(
            func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ) if carries_code(module):
            yield f"import of {module} by name"
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=False)):
            pass
        case ast.keyword(arg="allow_pickle"):
            yield "allow_pickle"


def carries_code(module: str) -> bool:
    return module.partition(".")[0] in CODE_CARRIERS


def test_no_file_can_run_code_from_data():
    files = [
        path
        for folder in ("src", "scripts", "bench", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    files = [
        path for path in files if ".peers" not in path.parts
    ]  # packages of others, which `make bench` installs
    files.remove(ROOT / PEER)
    files.remove(ROOT / OWN_CHILD)
    found = [
        f"{path.relative_to(ROOT)}:{why}"
        for path in files
        for why in unsafe(path.read_text(encoding="utf-8"))
    ]
    assert files
    assert found == []


def test_the_process_of_an_actor_unpickles_only_what_its_parent_sent_over_a_socket_pair():
    text = (ROOT / OWN_CHILD).read_text()
    assert {why.partition(" ")[2] for why in unsafe(text)} == {"import cloudpickle"}
    assert text.count("cloudpickle.loads(") == 2
    assert "Pipe()" in (ROOT / "src/understudy/core/child_process.py").read_text()


def test_the_peer_that_unpickles_is_neither_imported_nor_shipped():
    assert (ROOT / PEER).read_text().startswith('"""A PEER, never part of the product')
    assert set(unsafe((ROOT / PEER).read_text())) == {"19: import pickle"}
    named = re.compile(r"(?:from|import)\s+[\w.]*seed_tcp|against\s+import\s[^\n]*seed_tcp")
    files = [
        path
        for folder in ("src", "scripts", "bench", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert [
        path for path in files if ".peers" not in path.parts and named.search(path.read_text())
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal",
        "from shelve import open",
        "from joblib.externals import loky",
        "def f():\n    import cloudpickle as c",
        "eval('1')",
        "x = [exec(t) for t in texts]",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "__import__('dill')",
        "importlib.import_module('pickle')",
    ],
)
def test_the_scan_detects_each_forbidden_form(source):
    assert list(unsafe(source))


def test_the_scan_leaves_harmless_code_alone():
    assert (
        list(
            unsafe(
                "import json\nmodel.eval\nnp.load(p, allow_pickle=False)\nyaml.safe_load(t)\nname "
                "= 'pickle'"
            )
        )
        == []
    )


# (b) The base install.


def run(
    *command: str | Path, cwd: Path = ROOT, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    # Not this process's folders: an installed copy must stand alone.
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))
    }
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def must(*command: str | Path, cwd: Path = ROOT) -> str:
    finished = run(*command, cwd=cwd)
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def base_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with only `pip install understudy`."""
    uv = BIN / "uv"
    if not uv.exists():
        pytest.skip("no uv beside this Python; `make setup` installs it")
    folder = tmp_path_factory.mktemp("base")
    must(
        uv,
        "build",
        "--quiet",
        "--wheel",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "--out-dir",
        folder,
        ROOT,
    )
    (wheel,) = folder.glob("*.whl")
    must(uv, "venv", "--quiet", "--python", sys.executable, folder / "venv")
    install: list[str | Path] = [
        uv,
        "pip",
        "install",
        "--python",
        folder / "venv",
        "-c",
        ROOT / "constraints.txt",
        wheel,
    ]
    if (
        run(*install, "--offline").returncode != 0
    ):  # what `make setup` left in the cache is enough, where it is kept
        must(*install)
    return folder / "venv" / BIN.name


def test_the_base_install_is_four_packages_and_their_dependencies(base_venv):
    listed = json.loads(
        must(BIN / "uv", "pip", "list", "--python", base_venv.parent, "--format", "json")
    )
    names = {canonical(entry["name"]) for entry in listed}
    assert names - PULLED_BY_SOME_PYTHONS == BASE_INSTALL


def test_the_base_install_runs_the_code_of_the_game_developers_page(base_venv, tmp_path):
    page = (ROOT / "docs" / "game-developer.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    assert must(base_venv / "python", "-c", code, cwd=tmp_path).strip() == "60"


def test_the_base_command_names_the_next_install_line(base_venv, tmp_path):
    finished = run(base_venv / "understudy", cwd=tmp_path)
    said = (finished.stdout + finished.stderr).strip()
    assert finished.returncode == 2, said
    assert len(said.splitlines()) == 1
    assert re.search(r"pip install ['\"]?understudy\[platform\]", said), said


def test_the_direct_dependencies_of_the_base_are_exactly_four():
    assert {requirement_name(line) for line in PROJECT["dependencies"]} == {
        "numpy",
        "safetensors",
        "urllib3",
        "cryptography",
    }


# (c) What a game waits for.

IMPORT_CLOCK = """
import json, sys, time
import numpy
before = set(sys.modules)
started_s = time.process_time()  # importing waits for nothing, and a busy machine must not fail it
import understudy.client
took_ms = (time.process_time() - started_s) * 1000
print(json.dumps({"took_ms": took_ms, "loaded": sorted(set(sys.modules) - before)}))
"""


def import_once() -> dict[str, Any]:
    report: dict[str, Any] = json.loads(must(sys.executable, "-c", IMPORT_CLOCK))
    return report


def test_importing_the_client_loads_few_modules_and_nothing_heavy():
    loaded = import_once()["loaded"]
    assert "understudy.client" in loaded
    assert NOT_IN_A_GAME.isdisjoint(name.partition(".")[0] for name in loaded)
    assert len(loaded) <= IMPORT_LIMIT


@pytest.mark.slow
def test_importing_the_client_is_quick():
    assert min(import_once()["took_ms"] for _ in range(5)) <= IMPORT_LIMIT_MS


# (d) The versions everybody installs.


def requirement_name(line: str) -> str:
    return canonical(re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0])


def test_constraints_pin_every_direct_dependency_and_name_no_index():
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    unpinned = [line for line in lines if not re.match(r"[a-z0-9._-]+==[0-9]", line)]
    pinned = {requirement_name(line) for line in lines}
    extras = PROJECT["optional-dependencies"]
    direct = {
        requirement_name(line)
        for group in [PROJECT["dependencies"], *extras.values()]
        for line in group
    }
    assert "://" not in text
    assert unpinned == []
    assert direct - pinned == {PROJECT["name"]}  # `all` names the project's own extras


def test_no_dependency_has_an_upper_bound():
    extras = PROJECT["optional-dependencies"]
    lines = [line for group in [PROJECT["dependencies"], *extras.values()] for line in group]
    assert [line for line in lines if re.search(r"<|==|~=", line.partition(";")[0])] == []


# (e) The Makefile.


def test_make_lists_every_target():
    said = must("make", "help")
    assert set(re.findall(r"^  make ([\w-]+)", said, re.MULTILINE)) == TARGETS


# (f) No traces of a machine.

DEVELOPER_PATH = re.compile(r"(?<![\w.])/(?:home/\w|Users/\w|root/)")


def tree() -> list[Path]:
    """The files of the project: those that git knows or would add; all files without git."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [
            path
            for path in ROOT.rglob("*")
            if not {".venv", ".git"} & set(path.relative_to(ROOT).parts)
        ]
    return [path for path in paths if path.is_file()]


def test_no_file_names_a_path_of_a_developers_machine():
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tree()
        for match in DEVELOPER_PATH.finditer(path.read_bytes().decode("utf-8", errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["/ho" + "me/ann/x", '"/Us' + 'ers/ann"', "/ro" + "ot/.cache"])
def test_the_path_search_detects_each_form(text):
    assert DEVELOPER_PATH.search(text)


def test_errors_of_training_name_settings_and_not_flags_of_the_command_line():
    """They are also raised from Python; a whole command may be shown, and --debug."""
    offenders = []
    for folder in ("act", "training", "workers"):
        for path in sorted((ROOT / "src/understudy" / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                if not node.func.id.endswith(("Error", "Failed", "Locked", "Corrupt")):
                    continue
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                text = "".join(part for part in parts if isinstance(part, str))
                is_command = re.search(r"understudy |ray start |pip install ", text)
                if re.search(r"--(?!debug)[a-z]", text) and not is_command:
                    offenders.append(f"{path.name}:{node.lineno}: {text}")
    assert not offenders, "name the setting, as in engine='inline'"
