"""TORCH_TRACE: one text, diff and JSON artifact per pass that changed the graph, for tlparse's report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import _torch
from ..graph.text import diff_text
from ..pipeline.instrument import GraphRun
from ..pipeline.remarks import Remark
from .record import snapshot_text
from .recording import UnobtrusiveRecording
from .report import step_header


class TorchTrace(UnobtrusiveRecording):
    """Emits what a dump would hold into torch's structured trace."""

    @staticmethod
    def wanted() -> bool:
        return _torch.trace_enabled()

    def finish(self, run: GraphRun) -> None:
        super().finish(run)
        if self.records:
            record = self.records.pop()
            self.guarded(lambda: _emit(record))

    def lowered(self, run: GraphRun, remarks: Sequence[Remark], texts: Mapping[str, str]) -> None:
        def emit() -> None:
            for name, text in texts.items():
                _torch.trace_artifact(f"turbogr.{run.name}.{name}.txt", "string", text)

        self.guarded(emit)


def _emit(record: dict[str, Any]) -> None:
    last = None
    for step in record["steps"]:
        if step["status"] not in ("input", "changed"):
            continue
        text = step_header(record, step) + snapshot_text(record, step["snapshot"])
        stem = f"turbogr.{record['graph']}.{step['number']:03d}.{step['name']}"
        _torch.trace_artifact(f"{stem}.txt", "string", text)
        if last is not None:
            _torch.trace_artifact(f"{stem}.diff", "string", diff_text(last, text))
        last = text
    facts = {k: record[k] for k in ("graph", "role", "target", "pipeline", "remarks", "steps")}
    _torch.trace_artifact(f"turbogr.{record['graph']}.json", "json", facts)
