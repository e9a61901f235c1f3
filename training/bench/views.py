"""Results as text for a terminal, as the README's table, and as one page for a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ...errors import OptionError
from ...files import replace_file
from ...show.charts import Bar, bars
from ...show.page import render
from ...show.table import table
from .catalogue import PROVENANCES, README

TINY = "Tiny sizes only show that everything runs: their figures mean nothing."
PAPER_NOTE = (
    "The paper (arXiv 2605.13433, abstract) reports about Ascend NPUs, another model and KuaiRand-27K. Its definitions "
    "are not known: its figures stand beside ours for orientation, and no agreement is claimed. Nothing of ours has "
    "run on an NPU."
)


def machine_text(results: dict[str, Any]) -> str:
    known = results["machine"]
    return ", ".join(
        [
            f"{known['cpu']}, {known['cores']} cores",
            known["system"],
            f"Python {known['python']}",
            f"torch {known['torch']}",
        ]
    )


def _claims(results: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
    """Benchmark, claim, and whether the claim is the benchmark's first."""
    for benchmark in results["benchmarks"]:
        for i, claim in enumerate(benchmark["claims"]):
            yield benchmark, claim, i == 0


def _figure(claim: dict[str, Any]) -> str:
    return claim["text"] if claim["text"] is not None else "failed"


def text(results: dict[str, Any]) -> str:
    rows = [
        [b["name"] if first else "", c["what"], _figure(c), c["provenance"], c["paper"]]
        for b, c, first in _claims(results)
    ]
    parts = [machine_text(results), *([TINY] if results["size"] == "tiny" else [])]
    parts.append(table(rows, ["benchmark", "what", "figure", "kind", "paper-reported"]))
    parts += [f"{b['name']} failed: {b['error']}\n  {b['command']}" for b in results["benchmarks"] if b["error"]]
    return "\n\n".join(parts)


def markdown(results: dict[str, Any]) -> str:
    """The README's table: of what it states."""
    lines = [f"`turbogr bench --size {results['size']}` on {machine_text(results)}."]
    if results["size"] == "tiny":
        lines.append(TINY)
    lines += ["", "| what | figure | | the paper reports |", "|---|---:|---|---|"]
    for benchmark in results["benchmarks"]:
        stated = [c for c in benchmark["claims"] if c["stated"] == README]
        if stated:
            lines.append(f"| **{_cell(benchmark['what'])}** | | | |")
        for c in stated:
            lines.append(f"| {_cell(c['what'])} | {_cell(_figure(c))} | {c['provenance']} | {_cell(c['paper'])} |")
    return "\n".join([*lines, "", PAPER_NOTE]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def page(results: dict[str, Any]) -> str:
    ratios = [
        Bar(f"{b['name']}: {c['what']}", c["value"], c["text"], "c3")
        for b, c, _ in _claims(results)
        if c["value"] is not None and c["text"].endswith("x") and "/ turbogr" in c["what"]
    ]
    return render(
        Path(__file__).with_name("page.html.j2"),
        results=results,
        machine=machine_text(results),
        tiny=TINY if results["size"] == "tiny" else "",
        paper_note=PAPER_NOTE,
        provenances=PROVENANCES,
        ratios=Markup(bars("Times faster", ratios, width=900)) if ratios else "",
        failed=[b for b in results["benchmarks"] if b["error"] is not None],
    )


def write(path: Path, content: str) -> None:
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error
