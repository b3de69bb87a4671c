"""What building wheels takes beside hatchling: kernels for the node, and one version for all.

The kernels of the encodings are compiled while its wheel is built: `pip install .` brings them, with no second command.
An editable install has them beside their sources. Without a C compiler, or with DILOCO_NATIVE=0, the wheel is one for
any machine, and torch does their work. `diloco_common/codec/library.py` knows how; this file only packs.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

CODEC = "common/diloco_common/codec"


class SameVersion(MetadataHookInterface):
    """Of the tools: each needs the node of its own version."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"decoupled-diloco=={metadata['version']}"]


class CustomBuildHook(BuildHookInterface[Any]):
    """Of the node's wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version`: "standard" or "editable"."""
        library = _library(Path(self.root, CODEC, "library.py"))
        if version == "editable":
            built = library.KERNELS.build()
        else:
            self._folder = tempfile.TemporaryDirectory()
            built = replace(library.KERNELS, out=Path(self._folder.name)).build()
        if isinstance(built, str):
            self.app.display_warning(f"no native kernels, torch does their work: {built}")
        elif version != "editable":
            machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{machine}"
            for path in Path(self._folder.name).glob("*.so"):
                build_data["force_include"][str(path)] = f"diloco_common/codec/kernels/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _library(path: Path) -> Any:
    """The module, which needs nothing that is not in the standard library."""
    spec = importlib.util.spec_from_file_location("diloco_kernels_library", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
