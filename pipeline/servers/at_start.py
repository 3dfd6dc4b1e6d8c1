"""Baked beside the server's packages: Python runs it whenever it starts in the image, before anything of the server.

- `PIPELINE_SERVER_CACHES=/some/folder` starts without the baked caches: each variable that names a place below their
  root then names the same place below that folder.
- FlashInfer's baked modules fit one GPU architecture, and their path does not say so. FlashInfer does not find them on
  another one, nor without the baked caches, and compiles its own.

Standard library only, and as little as can be, since every Python process of the image pays for it.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

ROOT = "/opt/warm"
VARIABLE = "PIPELINE_SERVER_CACHES"
MODULES = "/opt/pipeline/server/modules.json"  # {"arch": as FlashInfer names it, "names": […]}
_ENV = "flashinfer.jit.env"


def leave_out() -> None:
    """Let the variables name places below the user's folder."""
    for name, value in list(os.environ.items()):
        if value == ROOT or value.startswith(f"{ROOT}/"):
            os.environ[name] = os.environ[VARIABLE] + value[len(ROOT) :]


class Finder:
    """Finds one module of FlashInfer as Python does, and changes it once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: object = None) -> ModuleSpec | None:  # noqa: ANN401, ARG004
        """As `importlib` asks for it."""
        if name != _ENV:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def changed(module: ModuleType) -> None:
                load(module)
                hide(module)

            spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


def hide(module: Any) -> None:  # noqa: ANN401 - `flashinfer.jit.env`
    """Hide the baked modules unless the name of FlashInfer's workspace, the architecture, says that they fit."""
    with open(MODULES, encoding="utf-8") as stream:  # noqa: PTH123
        baked = json.load(stream)
    if not os.environ.get(VARIABLE) and module.FLASHINFER_WORKSPACE_DIR.name == baked["arch"]:
        return

    class Folder(type(module.FLASHINFER_AOT_DIR)):  # type: ignore[misc]
        """FlashInfer's folder of modules built ahead of time, without those that were baked."""

        def __truediv__(self, name: str) -> Any:  # noqa: ANN401
            return super().__truediv__(f"{name}-of-another-gpu" if name in baked["names"] else name)

    module.FLASHINFER_AOT_DIR = Folder(module.FLASHINFER_AOT_DIR)


if os.environ.get(VARIABLE):
    leave_out()
if os.path.exists(MODULES):  # noqa: PTH110
    sys.meta_path.insert(0, Finder)
