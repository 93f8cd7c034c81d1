"""The rules of who may import whom, and what may never be on a wire."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvferry", "router", "prefill_worker", "decode_worker", "deploy", "loadtest")
ROLES = {"router", "prefill_worker", "decode_worker"}
WHERE_ROLES_MEET = {ROOT / "deploy/fleet.py"}
"""The one place where the roles meet in one program: a simulated fleet in virtual time."""
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "rpc/v1" not in str(path))


def imports_of(path: Path) -> set[str]:
    """Full names of modules imported anywhere in a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_never_go_up(path):
    top = path.relative_to(ROOT).parts[0]
    imported = {name.partition(".")[0] for name in imports_of(path)}
    if top == "kvferry":
        assert not imported & (ROLES | {"deploy", "loadtest"})
    if top in ROLES:
        assert not imported & ((ROLES - {top}) | {"deploy", "loadtest"})
    if top == "loadtest":
        assert not imported & (ROLES | {"deploy"})
    if top == "deploy" and path not in WHERE_ROLES_MEET:
        assert not imported & ROLES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_torch_lives_in_the_engine_alone(path):
    if not any(name in str(path) for name in ("kvferry/engine", "loadtest/peers")):
        assert not {name.partition(".")[0] for name in imports_of(path)} & {"torch", "transformers"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_unpickles(path):
    names = {name.partition(".")[0] for name in imports_of(path)}
    assert not names & {"pickle", "cloudpickle", "marshal", "dill", "shelve"}
    text = path.read_text()
    assert not any(word in text for word in ("torch.load(", "trust_remote_code=True", "yaml.load("))
    called = {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if "kv/" in name_of(p) or p.name in ("messages.py", "errors.py", "streams.py")],
    ids=name_of,
)
def test_the_parts_below_know_nothing_of_those_above(path):
    above = ("kvferry.engine", "kvferry.worker", "kvferry.rpc", "kvferry.text", "kvferry.config")
    assert not [name for name in imports_of(path) if name.startswith(above)]


PURE = ("decode_worker/scheduler.py", "decode_worker/choice.py", "decode_worker/fetches.py", "prefill_worker/scheduler.py",
        "router/journal.py", "router/placement.py", "router/index.py",
        "kvferry/kv/pool.py", "kvferry/kv/block_id.py", "kvferry/engine/sequence.py",
        "kvferry/engine/budget.py", "kvferry/turns.py", "loadtest/contest.py",
        "loadtest/goodput.py", "loadtest/pool_duel.py", "loadtest/transfer.py", "loadtest/trial.py")  # fmt: skip


@pytest.mark.parametrize("name", PURE)
def test_the_pure_core_has_no_io_no_clock_and_no_randomness(name):
    forbidden = {"asyncio", "time", "random", "secrets", "logging", "socket", "os", "grpc", "threading", "datetime"}
    assert not {imported.partition(".")[0] for imported in imports_of(ROOT / name)} & forbidden


def modules_after(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('\\n'.join(sys.modules))"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return set(run.stdout.split())


def test_the_router_process_has_no_torch():
    loaded = modules_after("import router.__main__")
    assert "router.dispatcher" in loaded
    assert not loaded & {"torch", "transformers", "ray"}


def test_a_worker_loads_the_other_role_nowhere():
    assert "decode_worker" not in modules_after("import prefill_worker.worker")
    assert "router" not in modules_after("import decode_worker.worker")


def test_proto_is_not_importable_and_holds_proto_files_only():
    files = [path for path in (ROOT / "proto").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".proto"}


def test_the_committed_stubs_are_fresh():
    run = subprocess.run(
        [sys.executable, "-m", "kvferry.rpc.generate", "--check"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stderr


def test_the_protos_are_clean_for_buf():
    buf = Path(sys.executable).with_name("buf")
    run = subprocess.run([buf, "lint"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_file_shadows_a_module_it_may_need():
    assert not [
        path
        for path in FILES
        if path.stem in sys.stdlib_module_names | {"grpc", "ray", "torch", "msgpack"} and path.stem != "__main__"
    ]
