"""The plan of the house is kept: the contract has no exceptions, knows every room, and is what the documents show."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from turbogr_compile.registry import BESIDE, HOME, ROOMS


@pytest.fixture(scope="module")
def house():
    """The programs beside this file, which `make` runs."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        yield {name: importlib.import_module(name) for name in ("floors", "count")}
    finally:
        sys.path.remove(str(Path(__file__).parent))
        for name in ("floors", "count"):
            sys.modules.pop(name, None)


def test_no_import_is_excepted(house):
    assert house["count"].count()["exceptions"] == 0


def test_every_room_has_a_floor(house):
    alone = {p.stem for p in HOME.glob("*.py") if not p.stem.startswith("__")}
    assert {room for floor in house["floors"].floors() for room in floor} == {*ROOMS, *alone}


def test_every_pass_is_in_the_contract_of_passes(house):
    passes = next(c for c in house["floors"].contract()["contracts"] if c["name"].startswith("a pass"))
    listed = {name.strip() for name in passes["layers"][0].split("|")}
    assert listed == {p.stem for p in ROOMS["passes"].glob("*.py")} - {"__init__"}


def test_the_document_shows_the_floors(house):
    assert house["floors"].written() == house["floors"].drawing(), "run: python tests/house/floors.py --write"


def test_rooms_beside_the_package_are_packaged(house):
    text = (house["floors"].ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for room in BESIDE:
        assert f'{room} = "turbogr_compile/{room}"' in text and f'"{room}"' in text


def test_counting_sees_every_module(house):
    found = house["count"].count()
    assert found["files"] > 300 and found["rooms"]["passes"]["files"] > 19
    assert set(found["rooms"]) - {"(door)"} >= set(ROOMS)
    assert found["fan-in"].keys() <= house["count"].modules().keys()


def test_nobody_inside_goes_through_the_front_door(house):
    """The door brings any room along: an import of a public name from the package would pass every contract."""
    users = {"training", "benchmarks", "examples", "commands"}
    found = {}
    for name, file in house["count"].modules().items():
        if name.split(".")[1:2] and name.split(".")[1] not in users:
            used = house["count"].imports(name, file, house["count"].modules())
            found |= {name: used & {"turbogr_compile"}} if "turbogr_compile" in used else {}
    assert found == {}
