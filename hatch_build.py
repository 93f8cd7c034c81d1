"""Makes a wheel carry the C decoder, built for each instruction set that kvferry/engine/native/build.py lists.

Without a compiler that can, the wheel is pure, and a machine builds the library on first use. An editable install never needs this.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "kvferry/engine/native"


class NativeBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = self._build_module()
        compiler = build.find_compiler()
        if version == "editable" or compiler is None or sys.platform != "linux" or os.uname().machine != "x86_64":
            return
        self._scratch = tempfile.mkdtemp()
        paths: list[Path] = []
        for level in build.LEVELS:
            path = Path(self._scratch) / build.library_name(level)
            try:
                build.compile_library(level, path, compiler)
            except OSError as error:
                self.app.display_warning(f"the wheel has no {level.name}: {error}")
            else:
                paths.append(path)
        if not paths:
            return
        build_data["force_include"].update({str(path): f"{NATIVE}/prebuilt/{path.name}" for path in paths})
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        del version, build_data, artifact_path
        shutil.rmtree(getattr(self, "_scratch", ""), ignore_errors=True)

    def _build_module(self) -> Any:
        """By its path: nothing that it imports need be installed."""
        specification = importlib.util.spec_from_file_location("native_build", Path(self.root) / NATIVE / "build.py")
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[specification.name] = module
        specification.loader.exec_module(module)
        return module
