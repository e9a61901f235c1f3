"""Row rules of installed packages: modules that say how ops of theirs treat rows, by entry point `turbogr.row_ops`."""

from __future__ import annotations

from typing import Any

from ...errors import PipelineError
from ...registry import Registry

# Importing such a module is all there is to do: it declares its rules where it is imported.
ROW_OPS: Registry[Any] = Registry("row op", "turbogr.row_ops", lambda module: module, PipelineError)
