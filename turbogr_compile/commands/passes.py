"""`turbogr passes`: which passes there are, and in which order they run."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..graph.phases import Phase
from .common.model import import_first, load_argument
from .common.output import show

if TYPE_CHECKING:
    from ..pipeline.pass_base import Pass
    from ..pipeline.pipeline import Pipeline

SUMMARY = "list passes, or show one; the order, the cache key"


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", help="show one pass with its options and order")
    command.add_argument("--phase", choices=[p.value for p in Phase], help="only this phase")
    command.add_argument("--pipeline", metavar="SPEC", help="default: the default pipeline")
    command.add_argument("--target", default="cpu")
    command.add_argument("--graph", metavar="FILE", type=Path, help="draw the order as SVG")
    command.add_argument("--key", action="store_true", help="print the cache key and what it is made of")
    load_argument(command)


def run(options: argparse.Namespace) -> int:
    from ..pipeline import catalogue
    from ..pipeline.cache_key import cache_key, key_parts
    from ..pipeline.options import Options
    from ..show.diagram import order_svg
    from ..show.recording import pipeline_order
    from ..show.table import table

    import_first(options)
    settings = Options.read({"pipeline": options.pipeline, "target": options.target})
    if options.key:
        parts = {"key": cache_key(settings), **key_parts(settings)}
        show(options, parts, json.dumps(parts, indent=1))
    elif options.graph:
        options.graph.write_text(order_svg(pipeline_order(settings.plan())), encoding="utf-8")
        show(options, {"written": str(options.graph)}, f"wrote {options.graph}")
    elif options.name:
        facts = _pass_facts(catalogue.find(options.name), settings.plan())
        show(options, facts, _pass_text(facts))
    else:
        every = [_pass_facts(c, settings.plan()) for c in catalogue.all_passes()]
        shown = [f for f in every if options.phase in (None, f["phase"])]
        rows = [[f["name"], f["phase"], "default" if f["in pipeline"] else "", f["summary"]] for f in shown]
        text = table(rows, ["pass", "phase", "pipeline", "what it does"])
        troubles = "".join(f"\n\nwarning: {trouble}" for trouble in catalogue.PASSES.troubles())
        show(options, shown, f"{text}\n\npipeline: {settings.plan().spec}{troubles}")
    return 0


def _pass_facts(cls: type[Pass], pipeline: Pipeline) -> dict[str, Any]:
    from ..graph.provenance import declaration_site

    return {
        "name": cls.name,
        "phase": cls.phase.value,
        "summary": cls.summary(),
        "help": inspect.getdoc(cls) or "",
        "site": str(cls.site()),
        "in pipeline": any(p.name == cls.name for p in pipeline.passes()),
        "options": {f.name: {"type": getattr(f.type, "__name__", f.type), "default": f.default}
                    for f in dataclasses.fields(cls)},
        "order": {k: {"passes": list(getattr(cls, k)), "declared": str(declaration_site(cls, k))}
                  for k in ("after", "before", "needs") if getattr(cls, k)},
        "roles": sorted(r.value for r in cls.roles),
    }  # fmt: skip


def _pass_text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['name']}   phase {facts['phase']}   {facts['site']}", "", facts["help"], ""]
    for name, option in facts["options"].items():
        lines.append(f"  option {name}: {option['type']} = {option['default']}")
    for kind, order in facts["order"].items():
        lines.append(f"  {kind} {', '.join(order['passes'])}   {order['declared']}")
    return "\n".join(lines).rstrip()
