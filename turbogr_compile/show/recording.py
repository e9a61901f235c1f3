"""The instrument that fills records; dumps, traces and `explain` are subclasses or readers of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..graph import costs
from ..graph.provenance import declaration_site
from ..pipeline import catalogue
from ..pipeline.context import NearMiss
from ..pipeline.instrument import GraphRun, Instrument, Step
from ..pipeline.pass_base import Pass
from ..pipeline.pipeline import Pipeline
from ..pipeline.remarks import Remark, warn
from .record import Recorder, add_remark


class Recording(Instrument):
    """Keeps one record per graph, in the order of finishing."""

    explains = True

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def start(self, run: GraphRun) -> None:
        self.recorder = Recorder(
            run.name, run.role.value, phase=run.phase.value, target=run.target, pipeline=run.pipeline.spec
        )
        self.recorder.data["order"] = pipeline_order(run.pipeline)
        self._cost = costs.cost(run.graph)
        self.recorder.data["steps"].append({
            "number": 0, "name": "input", "spec": "", "phase": run.phase.value, "summary": "the graph as it arrived",
            "site": "", "status": "input", "reason": "", "snapshot": self.recorder.snapshot(run.graph), "rewrites": [],
            "near_misses": [], "stats": _stats(self._cost, self._cost, run), "seconds": 0.0,
        })  # fmt: skip
        self._rewrites: list[dict[str, Any]] = []

    def before(self, run: GraphRun, step: Step) -> None:
        self._rewrites = []

    def rewritten(self, run: GraphRun, step: Step) -> None:
        assert step.context is not None
        done = step.context.rewrites[-1]
        data = self.recorder.data
        before = data["snapshots"][-1]
        index = self.recorder.snapshot(run.graph)
        after = data["snapshots"][index]
        kept = set(before) & set(after)
        removed = [i for i in before if i not in kept]
        added = [i for i in after if i not in kept]
        lines = [data["nodes"][i]["line"] for i in (*removed, *added) if data["nodes"][i]["line"] is not None]
        self._rewrites.append({
            "rule": done.rule, "site": done.site, "snapshot": index, "removed": removed, "added": added,
            "line": lines[0] if lines else None,
        })  # fmt: skip

    def after(self, run: GraphRun, step: Step) -> None:
        context = step.context
        now = costs.cost(run.graph) if step.changed else self._cost
        entry = self._entry(run, step)
        entry["stats"] = _stats(self._cost, now, run)
        if context is not None:
            entry["near_misses"] = [self._near_miss(m) for m in context.near_misses]
            entry["notes"] = dict(context.notes)
            if context.timeline is not None:
                entry["timeline"] = context.timeline
            entry["stats"]["saved"] = {k: costs.formula(v) for k, v in context.savings.items()}
        self._cost = now

    def failed(self, run: GraphRun, step: Step, error: Exception) -> None:
        entry = self._entry(run, step)
        entry["stats"] = _stats(self._cost, self._cost, run)

    def finish(self, run: GraphRun) -> None:
        for remark in run.remarks:
            self.recorder.remark(remark)
        if self.records and self.records[-1]["graph"] == run.name:
            self.records.pop()  # Dynamo started over: this is the same graph again
        self.records.append(self.recorder.data)

    def lowered(self, run: GraphRun, remarks: Sequence[Remark], texts: Mapping[str, str]) -> None:
        record = next((r for r in reversed(self.records) if r["graph"] == run.name), None)
        if record is not None:
            add_lowered(record, remarks, texts)

    def _entry(self, run: GraphRun, step: Step) -> dict[str, Any]:
        entry = {
            "number": step.number, "name": step.pass_.name, "spec": step.pass_.spec, "phase": run.phase.value,
            "summary": type(step.pass_).summary(), "site": str(type(step.pass_).site()), "status": step.status,
            "reason": step.reason, "snapshot": self.recorder.snapshot(run.graph), "rewrites": self._rewrites,
            "near_misses": [], "notes": {}, "stats": {}, "seconds": round(step.seconds, 6),
        }  # fmt: skip
        self._rewrites = []
        self.recorder.data["steps"].append(entry)
        return entry

    def _near_miss(self, miss: NearMiss) -> dict[str, Any]:
        return {
            "rule": miss.rule, "site": miss.site, "node": miss.node, "line": self.recorder.line(miss.line),
            "matched": miss.matched, "total": miss.total,
            "obstacles": [{"kind": o.kind, "text": o.text, "hint": o.hint, "node": o.node} for o in miss.obstacles],
        }  # fmt: skip


def add_lowered(record: dict[str, Any], remarks: Sequence[Remark], texts: Mapping[str, str]) -> None:
    """What a target said of a graph, in its record."""
    for remark in remarks:
        add_remark(record, remark)
    record.setdefault("texts", {}).update(texts)


class UnobtrusiveRecording(Recording):
    """Records for the side: whatever goes wrong with it is said once, and neither stops training nor blames a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal = ""

    def give_up(self, reason: str) -> None:
        self.refusal = reason
        warn(f"{type(self).__name__} stops: {reason}; training goes on")

    def guarded(self, action: Callable[[], Any]) -> Any:
        if self.refusal:
            return None
        try:
            return action()
        except OSError as error:
            self.give_up(f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else ""))
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")
        return None

    def start(self, run: GraphRun) -> None:
        self.guarded(lambda: Recording.start(self, run))

    def before(self, run: GraphRun, step: Step) -> None:
        self.guarded(lambda: Recording.before(self, run, step))

    def rewritten(self, run: GraphRun, step: Step) -> None:
        self.guarded(lambda: Recording.rewritten(self, run, step))

    def after(self, run: GraphRun, step: Step) -> None:
        self.guarded(lambda: Recording.after(self, run, step))

    def failed(self, run: GraphRun, step: Step, error: Exception) -> None:
        self.guarded(lambda: Recording.failed(self, run, step, error))

    def finish(self, run: GraphRun) -> None:
        self.guarded(lambda: Recording.finish(self, run))


def _stats(before: costs.Cost, after: costs.Cost, run: GraphRun) -> dict[str, Any]:
    ops = {k: after.ops[k] - before.ops[k] for k in sorted({*before.ops, *after.ops}) if after.ops[k] != before.ops[k]}
    return {
        "nodes": [before.nodes, after.nodes],
        "flops": [costs.formula(before.flops), costs.formula(after.flops)],
        "bytes": [costs.formula(before.bytes), costs.formula(after.bytes)],
        "flops_value": [costs.at_hints(c.flops, run.graph) for c in (before, after)],
        "bytes_value": [costs.at_hints(c.bytes, run.graph) for c in (before, after)],
        "unknown": sorted(after.unknown),
        "ops": ops,
        "saved": {},
    }


def pipeline_order(pipeline: Pipeline) -> dict[str, Any]:
    """The declared order of the whole pipeline, every phase; passes it mentions but does not have are absent."""
    here = pipeline.ordered_passes()
    mentioned = {name for p in here for name in (*p.after, *p.before)} & set(catalogue.names())
    absent = [catalogue.find(name) for name in sorted(mentioned - {p.name for p in here})]
    passes = [_pass_entry(type(p), True) for p in here] + [_pass_entry(cls, False) for cls in absent]
    edges = [{"from": d.earlier, "to": d.later, "kind": d.kind, "site": str(d.site)} for d in pipeline.declarations()]
    for p in here:
        for kind in ("after", "before"):
            for other in (o for o in getattr(p, kind) if any(o == a.name for a in absent)):
                pair = (p.name, other) if kind == "before" else (other, p.name)
                site = str(declaration_site(type(p), kind))
                edges.append({"from": pair[0], "to": pair[1], "kind": kind, "site": site})
    return {"passes": passes, "edges": edges}


def _pass_entry(cls: type[Pass], present: bool) -> dict[str, Any]:
    return {"name": cls.name, "phase": cls.phase.value, "present": present, "summary": cls.summary()}
