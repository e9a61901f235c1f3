"""What the build adds to a wheel: an SBOM, of what is in it and what it asks for."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "turbogr.cdx.json"


class Sbom(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        builder = self.build_config.builder
        files = {file.distribution_path: Path(file.path).read_bytes() for file in builder.recurse_included_files()}
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / NAME
        path.write_text(json.dumps(sbom(self.metadata.core, files), indent=1) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def sbom(core: Any, files: dict[str, bytes]) -> dict[str, Any]:
    """CycloneDX 1.6, without a time or a number of its own: the same sources give the same bytes."""
    extras = [(f"{text}; extra {name}") for name, some in sorted(core.optional_dependencies.items()) for text in some]
    asked = [(text, "required") for text in sorted(core.dependencies)] + [(text, "optional") for text in extras]
    asked = [(text, scope) for text, scope in asked if _name(text) != core.name]
    whole = {"type": "library", "bom-ref": core.name, "name": core.name, "version": core.version}
    whole |= {"purl": f"pkg:pypi/{core.name}@{core.version}", "licenses": [{"expression": core.license_expression}]}
    names = sorted({_name(text) for text, _ in asked})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": whole,
            "lifecycles": [{"phase": "build"}],
            "properties": [{"name": "turbogr:versions", "value": "the installer chooses them; see turbogr:asks"}],
        },
        "components": [
            *(_asked(name, [one for one in asked if _name(one[0]) == name]) for name in names),
            *(_file(path, content) for path, content in sorted(files.items())),
        ],
        "dependencies": [{"ref": core.name, "dependsOn": names}],
    }


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _asked(name: str, asked: list[tuple[str, str]]) -> dict[str, Any]:
    scope = "required" if any(scope == "required" for _, scope in asked) else "optional"
    component = {"type": "library", "bom-ref": name, "name": name, "purl": f"pkg:pypi/{name}", "scope": scope}
    return component | {"properties": [{"name": "turbogr:asks", "value": text} for text, _ in asked]}


def _file(path: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    return {"type": "file", "name": path, "hashes": [{"alg": "SHA-256", "content": digest}]}
