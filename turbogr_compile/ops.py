"""`torch.ops.turbogr`, filled when it is first asked for: after torch, importing turbogr_compile is enough."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

PACKAGE = __name__.rpartition(".")[0]


def announce() -> None:
    """Nothing where torch is not imported yet: importing `turbogr_compile.kernels`, or compiling, defines the ops."""
    torch = sys.modules.get("torch")
    spaces: Any = getattr(torch, "ops", None)
    if spaces is None or f"{PACKAGE}.kernels" in sys.modules:
        return

    class Ops(type(spaces.aten)):  # type: ignore[misc]
        """The namespace of our ops, which its ops are found under by name."""

        __module__ = type(spaces.aten).__module__

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                import_module(f"{PACKAGE}.kernels")  # waits for a thread that is just importing them
            return super().__getattr__(name)

    spaces.turbogr = Ops("turbogr")
