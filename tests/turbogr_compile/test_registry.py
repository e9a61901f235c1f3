"""Things are found by name, in rooms and in installed packages; what is wrong with a package is said, not raised."""

from __future__ import annotations

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
