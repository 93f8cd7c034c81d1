"""Makes the committed stubs from `proto/`, or checks that they are fresh: `python -m kvferry.rpc.generate [--check]`.

protoc writes imports of the package `kvferry.v1`; they are rewritten to `kvferry.rpc.v1`, where the stubs live, so that no
importable `proto` or second `kvferry` package exists. Called by `make stubs` and by the architecture test.
"""

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "kvferry" / "rpc" / "v1"


def make_stubs(into: Path) -> dict[str, str]:
    """Returns file name -> text of every stub; `into` is an empty scratch folder."""
    from grpc_tools import protoc  # pyright: ignore[reportMissingImports]

    proto = ROOT / "proto"
    files = sorted(str(path.relative_to(proto)) for path in proto.rglob("*.proto"))
    outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{proto}", *outputs, *files]) != 0:
        raise SystemExit("protoc failed: see above")
    stubs = {"__init__.py": '"""Generated from proto/kvferry/v1 by `make stubs`. Do not edit."""\n'}
    for path in sorted(into.rglob("*_pb2*.py*")):
        stubs[path.name] = re.sub(r"\bkvferry\.v1 import\b", "kvferry.rpc.v1 import", path.read_text())
    return stubs


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        stubs = make_stubs(Path(scratch))
    committed = {path.name: path.read_text() for path in STUBS.glob("*.py*")} if STUBS.exists() else {}
    if "--check" in sys.argv[1:]:
        stale = sorted(name for name in stubs.keys() | committed.keys() if stubs.get(name) != committed.get(name))
        if stale:
            raise SystemExit(f"stale stubs: {', '.join(stale)}; run `make stubs` and commit them")
        print("the committed stubs are fresh")
        return
    STUBS.mkdir(exist_ok=True)
    for name in committed.keys() - stubs.keys():
        (STUBS / name).unlink()
    for name, text in stubs.items():
        (STUBS / name).write_text(text)
    print(f"wrote {len(stubs)} files to {STUBS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
