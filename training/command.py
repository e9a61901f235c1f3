"""`turbogr train`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .config import Config, read_file
from .folder import RunFolder


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, default=Path("runs/train"), help="folder of the run (runs/train)")
    command.add_argument("--resume", action="store_true", help="go on with the run in --out, as it began")
    command.add_argument("--config", type=Path, metavar="FILE", help="settings in JSON, or the run.json of a run")
    command.add_argument("--quiet", action="store_true", help="no progress")
    command.add_argument("--compare-memory", action="store_true",
                         help="also what padded eager needs for the same batch, or that it fails")  # fmt: skip
    command.add_argument("--limit", type=float, default=12.0, metavar="GIB", help="of memory that eager may take (12)")
    for setting in dataclasses.fields(Config):
        flag, text = f"--{setting.name.replace('_', '-')}", setting.metadata["help"]
        if isinstance(setting.default, bool):
            command.add_argument(flag, action="store_true", default=None, help=text)
        else:
            command.add_argument(flag, metavar="VALUE", help=text)


def settings_of(options: argparse.Namespace) -> Config:
    """Those of the run that goes on, of the file, and of the command line; later ones win."""
    given: dict[str, Any] = read_file(options.out / "run.json") if options.resume else {}
    given |= read_file(options.config) if options.config else {}
    names = [f.name for f in dataclasses.fields(Config)]
    given |= {n: v for n in names if (v := getattr(options, n)) is not None}
    return Config.read(given)


def train(options: argparse.Namespace) -> tuple[dict[str, Any], str, bool]:
    """The figures of the run, as data and as text, and whether it was interrupted."""
    config = settings_of(options)
    from .loop import train as run

    result = run(config, options.out, resume=options.resume, quiet=options.quiet)
    data, text, interrupted = result.summary, summary_text(result.summary, options.out), result.interrupted
    del result  # and the memory of the model
    if interrupted:
        text += f"\ninterrupted after step {data['steps']}; go on with: {again(options)}"
    elif options.compare_memory and os.environ.get("RANK", "0") == "0":
        from .compare_memory import compare_memory

        compared = compare_memory(config, options.out, int(options.limit * 2**30))
        RunFolder(options.out).write("compared.json", compared)
        data = data | {"compared": compared}
        text += f"\n{compared['text']}"
    return data, text if os.environ.get("RANK", "0") == "0" else "", interrupted


def plan(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What the run would need, as data and as text; data are read, nothing is allocated."""
    import tempfile

    from . import build, needs
    from .progress import Reading

    if options.ranks < 1:
        raise OptionError(f"--ranks must be at least 1, not {options.ranks}")
    config = settings_of(options)
    with tempfile.TemporaryDirectory() as folder:  # generated data, which nobody keeps
        catalogue = build.histories(config, Path(folder) / "data", Reading(shown=not options.quiet)).catalogue
    found, has = needs.needs(config, catalogue, options.ranks), needs.available()
    data = {"catalogue": catalogue, "ranks": options.ranks, "memory": found.memory, "available": has,
            "always": dict(found.always), "moments": dict(found.moments), "disk": found.disk}  # fmt: skip
    return data, f"{catalogue:,} items\n{needs.text_of(found, has, options.out, options.ranks)}"


def again(options: argparse.Namespace) -> str:
    return shlex.join(["turbogr", "train", "--out", str(options.out), "--resume"])


def summary_text(summary: dict[str, Any], out: Path) -> str:
    found = {
        "steps": f"{summary['steps']} in {summary['seconds']:.1f} s",
        "tokens": f"{summary['tokens_per_second']:,.0f} a second, {summary['padding_saved']:.0%} of padded rows saved",
        "MFU": f"{summary['mfu']:.1%} of {summary['gemm_flops'] / 1e9:.1f} GFLOP/s, measured on the same threads",
    }
    if summary["peak_memory"] is not None:
        found["memory"] = f"{summary['peak_memory'] / 2**20:,.0f} MiB at the peak, above the start"
    if summary["first_loss"] is not None:
        found["loss"] = f"{summary['first_loss']:.4f} → {summary['last_loss']:.4f}"
    if summary["hr@10"] is not None:
        found["quality"] = _quality(summary)
        found["beside"] = "; ".join(f"{name} {_quality(of)}" for name, of in summary["baselines"].items())
    found["run"] = str(out)
    return "\n".join(f"{name:8} {text}" for name, text in found.items())


def _quality(found: dict[str, Any]) -> str:
    return f"HR@10 {found['hr@10']:.4f}, NDCG@10 {found['ndcg@10']:.4f}"
