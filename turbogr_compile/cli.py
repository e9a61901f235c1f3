"""The command line: explain, passes, run, diff, bisect, view, cost, simulate, train, report, bench, doctor."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .api import Report, explain
from .check.bisection import Snapshots, find_culprits, first_bad
from .cost import add_arguments as _cost_arguments
from .cost import cost
from .doctor import diagnose, doctor_text
from .errors import OptionError, PipelineError, TurbogrError, did_you_mean
from .graph.provenance import line_of_error
from .graph.text import diff_text, table
from .loading import load, load_module
from .lowering.torchair.fetch import fetch_torchair
from .pipeline import catalogue
from .pipeline.cache_key import cache_key, key_parts
from .pipeline.options import Options
from .pipeline.pass_base import Pass, Phase, declaration_site
from .pipeline.pipeline import Pipeline
from .progress import progress
from .show.diagram import order_svg
from .show.dump import open_directory
from .show.record import snapshot_text
from .show.recording import pipeline_order
from .show.report import report_text
from .show.view import write_view
from .simulate import add_arguments as _simulate_arguments
from .simulate import simulate

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when a check failed or something was found, 2 when the command was wrong."""
    try:
        options = _parser().parse_args(arguments)
        return options.command(options)
    except (OptionError, PipelineError) as error:
        sys.stderr.write(f"turbogr: {error}\n")
        return WRONG_USE
    except TurbogrError as error:
        sys.stderr.write(f"turbogr: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("turbogr: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `turbogr ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """argparse, with the closest name for a mistyped command."""

    def error(self, message: str) -> Any:
        if "invalid choice" in message and "'" in message:
            wrong = message.split("'")[1]
            message += did_you_mean(wrong, COMMANDS)
        if message.startswith("unrecognized arguments: --"):
            wrong = message.split()[2].partition("=")[0]
            message += did_you_mean(wrong, self.flags)
        super().error(message)

    @property
    def flags(self) -> list[str]:
        """Those of all commands."""
        groups = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return [flag for group in groups for parser in group.choices.values() for flag in parser._option_string_actions]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="turbogr", description="A compiler for generative recommenders.")
    parser.add_argument("--version", action="version", version=f"turbogr {version('turbogr')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (run, describe, arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=describe, description=describe, conflict_handler="resolve")
        command.add_argument("--json", action="store_true", help="print data instead of text")
        arguments(command)  # may want a --json of its own
        command.set_defaults(command=run)
    return parser


def _print(options: argparse.Namespace, data: Any, text: str) -> None:
    sys.stdout.write((json.dumps(data, indent=1, default=str) if options.json else text).rstrip("\n") + "\n")


# --- explain, run --------------------------------------------------------------------------------------


_OF_COMPILE = ("pipeline", "target", "codegen", "verify", "stop_after", "without")


def _model_arguments(command: argparse.ArgumentParser, needed: bool = True) -> None:
    command.add_argument("model", nargs=None if needed else "?", help="file.py:function or package.module:function")
    command.add_argument("--inputs", metavar="SPECS", help="e.g. 'f32[b=32, 64] i64[32]'; default: <function>_inputs()")
    command.add_argument("--pipeline", metavar="SPEC", help="passes to run, e.g. 'remove-noops, my-pass{size=16}'")
    command.add_argument("--add", action="append", default=[], metavar="SPEC", help="add a pass to the pipeline")
    command.add_argument("--without", action="append", default=[], metavar="PASS", help="leave a pass out of it")
    command.add_argument("--target", help="default: cpu")
    command.add_argument("--codegen", help="code generator of the target")
    command.add_argument("--target-option", action="append", default=[], metavar="NAME=VALUE",
                         help="a setting that only this target has, e.g. oo_level=O1")  # fmt: skip
    command.add_argument("--verify", help="off, fast, strict, numeric or shadow[:calls]")
    command.add_argument("--dynamic", action="store_true", help="symbolic sizes")
    command.add_argument("--stop-after", metavar="PASS[:K]", help="stop after a pass, or after its k-th rewrite")
    command.add_argument("--no-backward", action="store_true", help="do not run the backward")
    command.add_argument("--load", action="append", default=[], metavar="MODULE", help="import first (passes of yours)")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says about compiling; imports the passes it names first."""
    for module in options.load:
        load_module(module)
    given = {k: v for k in _OF_COMPILE if (v := getattr(options, k)) not in (None, [])}
    given |= {"passes": options.add} if options.add else {}
    given |= {"target_options": _target_options(options.target_option)} if options.target_option else {}
    return given | ({"dynamic": True} if options.dynamic else {})


def _target_options(given: Sequence[str]) -> dict[str, Any]:
    """'oo_level=O1' is a text; true, false and numbers are what they look like."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--target-option takes NAME=VALUE, got {text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _again(options: argparse.Namespace) -> str:
    """The command that runs the same thing."""
    words = ["turbogr", "run", options.model]
    for name in ("inputs", "pipeline", "target", "codegen", "verify"):
        words += [f"--{name}", value] if (value := getattr(options, name)) else []
    for name in ("target_option", "add", "without", "load"):
        for value in getattr(options, name):
            words += [f"--{name.replace('_', '-')}", value]
    return shlex.join(words + ["--dynamic"] * options.dynamic + ["--no-backward"] * options.no_backward)


def _explain_arguments(command: argparse.ArgumentParser) -> None:
    _model_arguments(command)
    command.add_argument("--rule", metavar="NAME", help="show this pass or rule only")
    command.add_argument("--notes", action="store_true", help="also show what passes and targets noted, such as rows")
    command.add_argument("--html", metavar="DIR", type=Path, help="also write dumps and the viewer page there")


def _run_arguments(command: argparse.ArgumentParser) -> None:
    _model_arguments(command)
    command.add_argument("--dump", metavar="DIR", type=Path, help="write dumps and the viewer page there")


def _check_dump(directory: Path) -> None:
    """On the command line a dump that cannot be written is a wrong command, not something to work around."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = open_directory(directory.absolute(), 0, os.getpid())
    if opened.refusal:
        raise OptionError(f"cannot dump there: {opened.refusal}")


def _compiled(options: argparse.Namespace, **more: Any) -> Report:
    if more.get("dump") is not None:
        _check_dump(more["dump"])
    settings = _settings(options) | {k: v for k, v in more.items() if v is not None}
    fn, args, kwargs = load(options.model, options.inputs)
    if kwargs:
        plain = fn
        fn = lambda: plain(**kwargs)  # noqa: E731
    with progress(f"compiling {options.model}"):
        try:
            return explain(fn, *args, backward=not options.no_backward, **settings)
        except TurbogrError:
            raise
        except Exception as error:
            raise _failure(options, lambda: fn(*args), error) from error


def _failure(options: argparse.Namespace, eager: Callable[[], Any], error: Exception) -> TurbogrError:
    """What the model's author needs to know: torch reports at length, the same error in eager is brief."""
    what = f"compiling {options.model}"
    try:
        eager()
    except Exception as plain:
        what, error = options.model, plain
    line = line_of_error(error)
    text = [f"{what} raised {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"]
    text += [f"  {line}"] if line else []
    text += ["  are --inputs what it takes?"] if options.inputs else []
    return TurbogrError("\n".join(text))


def _explain(options: argparse.Namespace) -> int:
    report = _compiled(options, dump=options.html, on_error="raise")
    records = [_only(r, options.rule) for r in report.records]
    if options.rule and not any(r["steps"][1:] for r in records):
        names = {s["name"] for r in report.records for s in r["steps"]} | {
            w["rule"] for r in report.records for s in r["steps"] for w in (*s["rewrites"], *s["near_misses"])
        }
        raise OptionError(f"no pass or rule named {options.rule!r} ran{did_you_mean(options.rule, names)}")
    page = f"\n\nviewer: {options.html / 'index.html'}" if options.html else ""
    noted = "".join(f"\n\n{text}" for text in _notes(records)) if options.notes else ""
    _print(options, records, report_text(records, timing=True) + noted + page)
    return 0


def _notes(records: list[dict[str, Any]]) -> Iterator[str]:
    for record in records:
        for step in record["steps"]:
            for name, text in step.get("notes", {}).items():
                yield f"{record['graph']} {step['name']}: {name}\n{text}"
        for name, text in record.get("texts", {}).items():
            yield f"{record['graph']} target {record['target']}: {name}\n{text}"


def _only(record: dict[str, Any], rule: str | None) -> dict[str, Any]:
    """The record reduced to one pass or rule."""
    if rule is None:
        return record
    steps = [
        s | {k: [x for x in s[k] if rule in (s["name"], x["rule"])] for k in ("rewrites", "near_misses")}
        for s in record["steps"]
        if s["status"] == "input" or rule in (s["name"], *(x["rule"] for x in s["rewrites"] + s["near_misses"]))
    ]
    return record | {"steps": steps, "remarks": [r for r in record["remarks"] if r["pass"] == rule]}


def _run(options: argparse.Namespace) -> int:
    report = _compiled(options, dump=options.dump, on_error="raise")
    page = f"\n\nviewer: {options.dump / 'index.html'}" if options.dump else ""
    _print(options, list(report.records), str(report) + page)
    return 0


# --- passes --------------------------------------------------------------------------------------------


def _passes_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", help="show one pass with its options and order")
    command.add_argument("--phase", choices=[p.value for p in Phase], help="only this phase")
    command.add_argument("--pipeline", metavar="SPEC", help="default: the default pipeline")
    command.add_argument("--target", default="cpu")
    command.add_argument("--graph", metavar="FILE", type=Path, help="draw the order as SVG")
    command.add_argument("--key", action="store_true", help="print the cache key and what it is made of")
    command.add_argument("--load", action="append", default=[], metavar="MODULE", help="import first (passes of yours)")


def _passes(options: argparse.Namespace) -> int:
    for module in options.load:
        load_module(module)
    settings = Options.read({"pipeline": options.pipeline, "target": options.target})
    if options.key:
        parts = {"key": cache_key(settings), **key_parts(settings)}
        _print(options, parts, json.dumps(parts, indent=1))
    elif options.graph:
        options.graph.write_text(order_svg(pipeline_order(settings.plan())), encoding="utf-8")
        _print(options, {"written": str(options.graph)}, f"wrote {options.graph}")
    elif options.name:
        facts = _pass_facts(catalogue.find(options.name), settings.plan())
        _print(options, facts, _pass_text(facts))
    else:
        every = [_pass_facts(c, settings.plan()) for c in catalogue.all_passes()]
        shown = [f for f in every if options.phase in (None, f["phase"])]
        rows = [[f["name"], f["phase"], "default" if f["in pipeline"] else "", f["summary"]] for f in shown]
        text = table(rows, ["pass", "phase", "pipeline", "what it does"])
        _print(options, shown, f"{text}\n\npipeline: {settings.plan().spec}")
    return 0


def _pass_facts(cls: type[Pass], pipeline: Pipeline) -> dict[str, Any]:
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


# --- diff, view ----------------------------------------------------------------------------------------


def _diff_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("first", help="DIR[/rank0/GRAPH][:STEP], a dump directory or one graph of it")
    command.add_argument("second", help="the same; ':STEP' alone means the same graph at another step")


def _diff(options: argparse.Namespace) -> int:
    first = _graphs_at(options.first)
    second = _graphs_at(options.second if not options.second.startswith(":") else
                        options.first.rpartition(":")[0] + options.second)  # fmt: skip
    names = [n for n in first if n in second] or ([*first][:1] if len(first) == len(second) == 1 else [])
    if not names:
        raise OptionError(f"no graph in common: {', '.join(first)} and {', '.join(second)}")
    others = iter(second.values()) if names[0] not in second else None
    diffs = {}
    for name in names:
        other = second[name] if others is None else next(others)
        diffs[name] = diff_text(first[name], other, (f"{options.first} {name}", f"{options.second} {name}"))
    text = "\n".join(d for d in diffs.values() if d) or "no difference"
    _print(options, diffs, text)
    return FAILED if any(diffs.values()) else 0


def _graphs_at(place: str) -> dict[str, str]:
    """Texts of the graphs under a dump directory, at a step or at the end."""
    directory, colon, step = place.rpartition(":") if ":" in place else (place, "", "")
    root = Path(directory)
    levels = [sorted(root.glob(level)) for level in ("record.json", "*/record.json", "rank*/*/record.json")]
    files = next((files for files in levels if files), [])
    if not files:
        raise OptionError(f"{directory!r} is not a dump directory: no record.json in it")
    found = {}
    for file in files:
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            steps = record["steps"]
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{file} is not a record of turbogr's: {error!r}") from error
        wanted = steps[-1] if not colon else next(
            (s for s in steps if step in (str(s["number"]), f"{s['number']:03d}", s["name"])), None)  # fmt: skip
        if wanted is None:
            known = [s["name"] for s in steps]
            if len(files) == 1:
                raise OptionError(f"{record['graph']} has no step {step!r}{did_you_mean(step, known)}; it has "
                                  f"{', '.join(known)}")  # fmt: skip
            continue
        found[record["graph"]] = snapshot_text(record, wanted["snapshot"])
    if not found:
        raise OptionError(f"no graph of {directory!r} has a step {step!r}")
    return found


def _view_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", type=Path, help="dump directory")
    command.add_argument("--open", action="store_true", help="open the page in the browser")


def _view(options: argparse.Namespace) -> int:
    if not (options.directory / "run.json").is_file():
        raise OptionError(f"{str(options.directory)!r} is not a dump directory: no run.json in it")
    with progress("drawing"):
        page = write_view(options.directory)
    _print(options, {"page": str(page)}, str(page))
    if options.open:
        webbrowser.open(page.absolute().as_uri())
    return 0


# --- bisect --------------------------------------------------------------------------------------------


def _bisect_arguments(command: argparse.ArgumentParser) -> None:
    _model_arguments(command, needed=False)
    command.add_argument("--fast", action="store_true", help="binary search; trusts that no later pass masks the error")
    command.add_argument("--oracle", metavar="CMD", help="instead of a model, a command that fails on wrong numbers; "
                         "it is run with TURBOGR_STOP_AFTER and TURBOGR_PIPELINE set")  # fmt: skip


def _bisect(options: argparse.Namespace) -> int:
    if options.oracle:
        return _bisect_by_command(options)
    if options.model is None:
        raise OptionError("name what to bisect as file.py:function, or give a command with --oracle")
    snapshots = Snapshots()
    _compiled(options, on_error="raise", instruments=[snapshots])
    with progress("comparing") as say:
        found = find_culprits(snapshots, options.fast, say)
    again = _again(options)
    data = [
        {"graph": f.graph, "pass": f.spec, "site": f.site, "rewrite": f.rewrite, "rewrites": f.rewrites, "rule": f.rule,
         "line": str(f.line or ""), "what": f.verdict.text, "before": f.verdict.before, "after": f.verdict.after,
         "good": f"{again} --stop-after {f.good}", "bad": f"{again} --stop-after {f.bad}"}
        for f in found
    ]  # fmt: skip
    text = "\n\n".join(
        f"{f}\n  good: {again} --stop-after {f.good}\n  bad:  {again} --stop-after {f.bad}" for f in found
    )
    stops = sum(len(kept) for _, _, kept in snapshots.runs)
    same = f"numbers are the same after each of the {stops} passes that changed a graph"
    _print(options, data, text or same)
    return FAILED if found else 0


def _bisect_by_command(options: argparse.Namespace) -> int:
    """Pass and rewrite after which the user's command begins to fail."""
    command = shlex.split(options.oracle)
    if shutil.which(command[0]) is None:
        raise OptionError(f"--oracle: no command {command[0]!r}")
    environment = dict(os.environ)
    if options.pipeline is not None or options.add or options.without:
        settings = {k: v for k, v in _settings(options).items() if k != "dynamic"}
        environment["TURBOGR_PIPELINE"] = Options.read(settings).plan().spec

    def fails(stop_after: str) -> bool:
        say(f"TURBOGR_STOP_AFTER={stop_after} {options.oracle}")
        env = {**environment, "TURBOGR_STOP_AFTER": stop_after}
        return subprocess.run(command, env=env, stdout=subprocess.DEVNULL).returncode != 0

    with progress(f"running {options.oracle}"), tempfile.TemporaryDirectory() as folder:
        names = _passes_of_program(command, environment, Path(folder) / "dump")
    with progress("bisecting") as say:
        if fails(f"{names[0]}:0"):
            _print(options, {"pass": None}, "the command fails with no pass run at all: not turbogr's passes")
            return FAILED
        guilty = first_bad(len(names), lambda i: fails(names[i]), fast=True)
        if guilty is None:
            _print(options, {"pass": None}, "the command succeeds with all passes")
            return 0
        name = names[guilty]
        high = next((k for k in (1 << i for i in range(12)) if fails(f"{name}:{k}")), 0)
        low = high // 2
        rewrite = high and low + 1 + (first_bad(high - low, lambda i: fails(f"{name}:{low + 1 + i}"), fast=True) or 0)
    good = f"TURBOGR_STOP_AFTER={name}:{rewrite - 1 if rewrite else 0}"
    bad = f"TURBOGR_STOP_AFTER={name}" + (f":{rewrite}" if rewrite else "")
    where = f"{name}, rewrite {rewrite}" if rewrite else f"{name}, outside of its rewrites"
    _print(options, {"pass": name, "rewrite": rewrite, "good": good, "bad": bad},
           f"{where}\n  good: {good} {options.oracle}\n  bad:  {bad} {options.oracle}")  # fmt: skip
    return FAILED


def _passes_of_program(command: list[str], environment: dict[str, str], folder: Path) -> list[str]:
    """Names of the passes that the program really runs: it may choose its pipeline itself."""
    subprocess.run(command, env={**environment, "TURBOGR_DUMP": str(folder)}, stdout=subprocess.DEVNULL)
    if not (folder / "run.json").is_file():
        raise OptionError("--oracle: the command compiled nothing with backend 'turbogr', or sets a dump of its own")
    records = [json.loads(f.read_text(encoding="utf-8")) for f in folder.glob("rank*/*/record.json")]
    ordered: list[dict[str, Any]] = max((r["order"]["passes"] for r in records), key=len, default=[])
    return [p["name"] for p in ordered if p["present"]]


# --- cost, simulate, doctor --------------------------------------------------------------------------------------


def _cost(options: argparse.Namespace) -> int:
    _print(options, *cost(options))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    with progress("simulating"):
        data, text = simulate(options)
    _print(options, data, text)
    return 0


def _doctor_arguments(command: argparse.ArgumentParser) -> None:
    text = "unpack the torchair that fits this torch into turbogr's cache, for target ascend-sim"
    command.add_argument("--fetch-torchair", action="store_true", help=text)


def _doctor(options: argparse.Namespace) -> int:
    if options.fetch_torchair:
        sys.stderr.write(f"torchair is in {fetch_torchair()}\n")
    found = diagnose()
    _print(options, found, doctor_text(found))
    return 0


# --- train ---------------------------------------------------------------------------------------------


def _train_arguments(command: argparse.ArgumentParser) -> None:
    from .training.command import add_arguments

    add_arguments(command)


def _train(options: argparse.Namespace) -> int:
    from .training.command import train

    data, text, interrupted = train(options)
    if text:
        _print(options, data, text)
    return INTERRUPTED if interrupted else 0


# --- report, bench ---------------------------------------------------------------------------------------


def _report_arguments(command: argparse.ArgumentParser) -> None:
    from .training.report.command import add_arguments

    add_arguments(command)


def _report(options: argparse.Namespace) -> int:
    from .training.report.command import report

    page = report(options)
    _print(options, {"page": str(page)}, str(page))
    return 0


def _bench_arguments(command: argparse.ArgumentParser) -> None:
    from .training.bench.command import add_arguments

    add_arguments(command)


def _bench(options: argparse.Namespace) -> int:
    from .training.bench.command import bench

    return bench(options)


Arguments = Callable[[argparse.ArgumentParser], None]
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, Arguments]] = {
    "explain": (_explain, "compile a function and explain what each pass did or why it did not", _explain_arguments),
    "passes": (_passes, "list passes, or show one; the order, the cache key", _passes_arguments),
    "run": (_run, "run a pipeline on a function", _run_arguments),
    "diff": (_diff, "compare dumped graphs: between passes, runs or versions", _diff_arguments),
    "bisect": (_bisect, "find the pass and the rewrite that changed the numbers", _bisect_arguments),
    "view": (_view, "write the viewer page of a dump directory", _view_arguments),
    "cost": (_cost, "what the AscendC kernels would take on an NPU, projected from a run in the twin", _cost_arguments),
    "simulate": (_simulate, "what a job would do on up to 1024 devices; simulated, not measured", _simulate_arguments),
    "train": (_train, "train a recommender: HSTU, SASRec or FuXi, on files or generated data", _train_arguments),
    "report": (_report, "write one page about run folders: curves, speed, memory, quality, remarks", _report_arguments),
    "bench": (_bench, "measure every figure that the project claims, on this machine", _bench_arguments),
    "doctor": (_doctor, "what is installed, which targets can run here, what is missing", _doctor_arguments),
}
