"""`turbogr simulate`: what a training job would do on up to 1024 devices. Simulated, never measured."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import OptionError, TurbogrError
from ..files import reading
from .common.output import show
from .common.progress import progress

SUMMARY = "what a job would do on up to 1024 devices; simulated, not measured"

SCALES = "8,16,64,256,1024"
MOST = 4096
# What can be simulated: beyond it nothing is wrong but the time it takes, or the memory.
BOUNDS = {
    "steps": (1, 10_000),
    "sequences": (1, 1 << 20),
    "longest": (1, 1 << 20),
    "layers": (1, 10_000),
    "width": (1, 1 << 20),
    "negatives": (0, 1_000_000),
    "seed": (0, (1 << 63) - 1),
    "jitter": (0, 1000),
    "popularity": (0, 1000),
}


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--devices", default=SCALES, metavar="N,N", help=f"numbers of devices (default {SCALES})")
    text = "naive, or some of prefetch, overlap, balanced, hierarchical, semi-async; may be given several times"
    command.add_argument("--variant", action="append", metavar="A+B", help=text)
    command.add_argument("--soc", default="910B2", metavar="NAME", help="device: 910B1 to 910B4 (default 910B2)")
    command.add_argument("--costs", type=Path, metavar="FILE", help="times of kernels, as --calibrate writes them; "
                         "default: 910B, projected by the AscendC twin")  # fmt: skip
    command.add_argument("--calibrate", choices=("here", "twin"), help="write such a file and stop: kernels timed on "
                         "this machine, or projected anew")  # fmt: skip
    command.add_argument("--html", type=Path, metavar="FILE", help="also write the charts as one page")
    for name, kind, value, text in (
        ("steps", int, 6, "steps to simulate"),
        ("sequences", int, 32, "sequences of a device in a step"),
        ("longest", int, 4096, "where sequences are cut"),
        ("layers", int, 12, "layers of the model"),
        ("width", int, 1024, "width of the model and of table rows"),
        ("negatives", float, 1.0, "negative rows fetched per token"),
        ("seed", int, 0, "of lengths and delays"),
    ):
        command.add_argument(f"--{name}", type=kind, default=value, metavar="N", help=f"{text} (default {value})")
    command.add_argument("--lengths", default="log-normal", help="log-normal, zipf or equal (default log-normal)")
    for name, text in (
        ("jitter", "random delay of a device, as a share"),
        ("popularity", "Zipf exponent of items"),
        ("link-efficiency", "share of the links' bandwidth that is reached"),
        ("linear-efficiency", "share of the peak that dense layers reach"),
    ):
        command.add_argument(f"--{name}", type=float, metavar="X", help=f"{text}; default: see the assumptions")


def run(options: argparse.Namespace) -> int:
    for name, (low, high) in BOUNDS.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise OptionError(f"--{name} must be at least {low} and at most {high}, not {value}")
    with progress("simulating"):
        data, text = _simulated(options)
    show(options, data, text)
    return 0


def _simulated(options: argparse.Namespace) -> tuple[Any, str]:
    """Facts and figures, and the same as text."""
    from ..simulator import report
    from ..simulator.calibration import SHIPPED, load_calibration
    from ..simulator.cluster import cluster_of
    from ..simulator.variants import Variant, ladder
    from ..simulator.workload import Compute, Workload

    cluster = _replaced(cluster_of(options.soc), options, "link_efficiency")
    if options.calibrate:
        return _calibrate(options)
    workload = _replaced(
        Workload(
            lengths=options.lengths,
            sequences=options.sequences,
            longest=options.longest,
            layers=options.layers,
            width=options.width,
            negatives=options.negatives,
            seed=options.seed,
        ),
        options,
        "jitter",
        "popularity",
        "linear_efficiency",
    )
    scales = _scales(options.devices, cluster.per_node)
    variants = [Variant.read(text) for text in options.variant] if options.variant else ladder()
    if options.html and not options.html.absolute().parent.is_dir():
        raise OptionError(f"--html: no directory {options.html.absolute().parent}")
    calibration = load_calibration(options.costs or SHIPPED, options.soc)
    with reading(options.costs) if options.costs else nullcontext():
        data = report.run(Compute(workload, cluster, calibration), variants, scales, options.steps)
        text = report.text(data)
    if options.html:
        report.write_page(options.html, data)
        text += f"\n\npage: {options.html}"
    return data, text


def _calibrate(options: argparse.Namespace) -> tuple[Any, str]:
    from ..kernels.cpu.toolchain import Unavailable
    from ..show.table import table
    from ..simulator.calibration import measure_here, project_twin, save_calibrations

    if options.costs is None:
        raise OptionError("--calibrate writes a file: name it with --costs FILE")
    try:
        found = [measure_here()] if options.calibrate == "here" else project_twin([options.soc])
    except Unavailable as error:
        raise TurbogrError(f"the twin compiles kernels, and {error}") from error
    save_calibrations(options.costs, found)
    known = [known for one in found for known in one.assumptions()]
    rows = [[k["name"], k["text"], k["provenance"], k["source"]] for k in known]
    return known, f"{table(rows, ['kernel', 'time', 'provenance', 'source'])}\n\nwrote {options.costs}"


def _replaced(holder: Any, options: argparse.Namespace, *names: str) -> Any:
    """With the figures that the command line changes."""
    for name in names:
        value = getattr(options, name)
        if value is None:
            continue
        share = name.endswith("efficiency")
        if share and not 0 < value <= 1:
            raise OptionError(f"--{name.replace('_', '-')} is a share, above 0 and at most 1; got {value}")
        holder = replace(holder, **{name: getattr(holder, name).replaced(value)})
    return holder


def _scales(text: str, per_node: int) -> list[int]:
    try:
        scales = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise OptionError(f"--devices takes numbers with commas between them, such as {SCALES}; got {text!r}") from None
    for scale in scales:
        if not 1 <= scale <= MOST:
            raise OptionError(f"--devices: {scale} is not between 1 and {MOST}")
        if scale > per_node and scale % per_node:
            raise OptionError(f"--devices: {scale} devices do not fill nodes of {per_node}; take a multiple of it")
    return scales
