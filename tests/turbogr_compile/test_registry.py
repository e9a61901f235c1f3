"""Things are found by name, in rooms and in installed packages; what is wrong with a package is said, not raised."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest

from turbogr_compile import registry
from turbogr_compile.errors import OptionError
from turbogr_compile.pipeline import catalogue
from turbogr_compile.pipeline.target import target_names
from turbogr_compile.registry import HOME, PACKAGE, ROOMS, Registry, modules_of, sources_of

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_of_the_house_is_a_room():
    folders = {p.parent for top in (ROOT, ROOT / PACKAGE) for p in top.glob("*/__init__.py")} - {ROOT / PACKAGE}
    assert set(ROOMS.values()) == folders and {"passes", "lowering", "kernels", "runtime"} <= set(ROOMS)
    assert HOME == ROOT / PACKAGE


def test_packages_of_a_room_are_no_things():
    """What passes or targets share lies in packages beside them."""
    assert "pack_rows" in modules_of("passes") and not any((ROOMS["passes"] / m).is_dir() for m in modules_of("passes"))
    assert len(catalogue.names()) >= 19 and all(
        catalogue.find(name).name == name for name in modules_as_names("passes")
    )
    assert target_names() == ["ascend", "ascend-sim", "cpu", "eager"]


def modules_as_names(room: str) -> list[str]:
    return [m.replace("_", "-") for m in modules_of(room)]


def test_sources_reach_into_packages():
    found = sources_of("runtime")
    assert "turbogr_compile.runtime" in found and "turbogr_compile.runtime.sharding.table" in found
    assert len(found) == len(list(ROOMS["runtime"].rglob("*.py")))


class Package(Distribution):
    """An installed package that nobody installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def metadata(self):  # type: ignore[override]
        return {"Name": self._name}

    def read_text(self, filename):
        return None

    def locate_file(self, path):
        return Path(path)


def entry(package: str, name: str, value: str) -> EntryPoint:
    made = EntryPoint(name, value, "test.things")
    vars(made)["dist"] = Package(package)
    return made


@pytest.fixture
def things(monkeypatch) -> Registry:
    installed = (
        entry("alpha", "double", "turbogr_compile.errors:did_you_mean"),
        entry("beta", "double", "turbogr_compile.errors:TurbogrError"),
        entry("beta", "cpu", "turbogr_compile.errors:TurbogrError"),
        entry("gamma", "gone", "no_such_module:thing"),
        entry("gamma", "here", "turbogr_compile.errors:OptionError"),
    )
    monkeypatch.setattr(registry, "_installed", lambda group: installed)
    return Registry("thing", "test.things", lambda imported: imported, OptionError, room="lowering")


def test_a_broken_package_is_named_and_harms_nobody_else(things):
    assert things.find("here") is OptionError
    assert OptionError in things.all()
    (said,) = [t for t in things.troubles() if "gone" in t]
    assert "package gamma (no_such_module:thing)" in said and "ModuleNotFoundError" in said


def test_asking_for_a_broken_one_is_an_error_that_names_it(things):
    with pytest.raises(OptionError, match=r"thing 'gone' of package gamma .* cannot be imported"):
        things.find("gone")


def test_twins_are_named_and_the_first_is_used(things):
    twins = [t for t in things.troubles() if "is not used" in t]
    assert len(twins) == 2
    assert any("thing 'double' of package beta" in t and "package alpha" in t for t in twins)
    assert any("thing 'cpu' of package beta" in t and "turbogr has one" in t for t in twins)
    assert things.find("double").__name__ == "did_you_mean"
    assert things.find("cpu").__name__ == "turbogr_compile.lowering.cpu"


def test_a_wrong_name_gets_the_closest_one(things):
    with pytest.raises(OptionError, match=r"no thing is named 'cpus' \(did you mean 'cpu'\?\); there are: ascend"):
        things.find("cpus")


PACKAGE_FILES = {
    "shop/__init__.py": "",
    "shop/tools.py": """
        import argparse
        from turbogr_compile import Instrument

        SUMMARY = "sell things"

        def arguments(command: argparse.ArgumentParser) -> None:
            command.add_argument("what")

        def run(options: argparse.Namespace) -> int:
            print("sold", options.what)
            return 0

        class Watcher(Instrument):
            def finish(self, run):
                print("watched", run.role.value)
    """,
    "shop/leaves.py": "raise SystemExit(3)",
    "shop/percent.py": """
        SUMMARY = "saves 50% of time"
        def arguments(command):
            raise ValueError("no")
        def run(options):
            return 0
    """,
    "shop/ops.py": """
        import torch

        @torch.library.custom_op("shop::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2
        twice.register_fake(lambda x: torch.empty_like(x))
        twice.register_autograd(lambda ctx, grad: grad * 2)
    """,
    "shop/rules.py": """
        import turbogr_compile

        turbogr_compile.row_op(
            "shop::twice",
            models=("x",),
            axes=lambda typing, node: typing.dims(typing.arg(node, "x")),
            mixes=lambda check, node, space: None,
            packed=lambda emitter, node, rows: emitter.again(node, x=emitter.packed(emitter.arg(node, "x"), rows)),
        )
    """,
    "shop-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n",
    "shop-1.0.dist-info/entry_points.txt": """
        [turbogr.commands]
        sell = shop.tools
        torn = shop.nowhere
        leaves = shop.leaves
        empty = shop.ops
        percent = shop.percent
        [turbogr.targets]
        none = shop.ops
        [turbogr.passes]
        lost = shop.ops
        [turbogr.instruments]
        watcher = shop.tools:Watcher
        [turbogr.row_ops]
        shop = shop.rules
        torn = shop.nowhere
    """,
}
USES_ROW_OPS = """
import torch, turbogr_compile
import shop.ops
table = torch.nn.Embedding(9, 4, padding_idx=0)
def step(ids):
    return (torch.ops.shop.twice(table(ids)) * (ids != 0)[..., None]).sum()
ids = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])
print(turbogr_compile.explain(step, ids, codegen="aten", instruments=["watcher"]))
"""


@pytest.fixture
def shop(tmp_path) -> Path:
    for name, text in PACKAGE_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def told(arguments: list[str], shop: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(shop)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=shop, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_a_package_brings_commands_instruments_and_row_ops(shop):
    assert "sell things" in told(["-m", "turbogr_compile", "--help"], shop)
    assert told(["-m", "turbogr_compile", "sell", "hats"], shop) == "sold hats\n"
    said = told(["-c", USES_ROW_OPS], shop)
    assert "watched captured" in said
    assert "live on" in said and "row-ops-unusable" in said and "shop.nowhere" in said


def test_badly_shaped_packages_take_nothing_down(shop):
    helped = told(["-m", "turbogr_compile", "--help"], shop)
    assert "saves 50% of time" in helped and "leaves" not in helped
    assert "shop" not in told(["-m", "turbogr_compile", "diff", "--help"], shop)
    for command, message in (("leaves", "cannot be imported: SystemExit"), ("empty", "cannot be used: a command is"),
                             ("percent", "cannot say what it takes: ValueError('no')")):  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "turbogr_compile", command], cwd=shop, capture_output=True,
                              text=True, env={**os.environ, "PYTHONPATH": str(shop)})  # fmt: skip
        assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr


def test_doctor_names_what_is_broken(shop):
    said = told(["-m", "turbogr_compile", "doctor"], shop)
    assert "warning  target 'none' of package shop (shop.ops) cannot be used" in said
    assert "warning  pass 'lost' of package shop (shop.ops) is not there: importing it registers none" in said
    assert "warning  command 'torn' of package shop (shop.nowhere) cannot be imported" in said
    assert "warning  row op 'torn' of package shop (shop.nowhere) cannot be imported" in said
