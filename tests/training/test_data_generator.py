"""Generated data: the published schema, the same for the same seed, heavy tails, and something to learn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from turbogr_compile.errors import OptionError
from turbogr_compile.training.data import generate, open_histories
from turbogr_compile.training.data.corrupt import SPOILERS
from turbogr_compile.training.data.kuairand import COLUMNS
from turbogr_compile.training.data.write_numbers import write_numbers


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "data").iterdir())}


def test_the_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    first = contents(generate(tmp_path / "a", users=40, items=50, mean_length=20, seed=5, bad_rows=30))
    assert first == contents(generate(tmp_path / "b", users=40, items=50, mean_length=20, seed=5, bad_rows=30))
    assert first != contents(generate(tmp_path / "c", users=40, items=50, mean_length=20, seed=6, bad_rows=30))


def test_files_have_the_published_schema(tmp_path: Path) -> None:
    folder = generate(tmp_path, users=300, items=60, mean_length=30)
    names = sorted(contents(folder))
    assert [name.removesuffix("_generated.csv") for name in names] == [
        "log_random_4_22_to_5_08", "log_standard_4_08_to_4_21", "log_standard_4_22_to_5_08",
    ]  # fmt: skip
    for name in names:
        path = folder / "data" / name
        assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
        rows = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64, ndmin=2)
        column = dict(zip(COLUMNS, rows.T, strict=True))
        local = column["time_ms"] // 1000 + 8 * 3600
        day = np.array([20220401, 20220501])[(local >= 1651363200).astype(int)]
        first = np.array([19083, 19113])[(local >= 1651363200).astype(int)]  # 1 April, 1 May since 1970
        np.testing.assert_array_equal(column["date"], day + local // 86400 - first)
        np.testing.assert_array_equal(column["hourmin"], local % 86400 // 3600 * 100)
        assert (column["date"] >= (20220408 if "4_08" in name else 20220422)).all()
        assert (column["date"] <= (20220421 if "4_08" in name else 20220508)).all()
        assert (column["is_rand"] == ("random" in name)).all()
        for flag in [name for name in COLUMNS if name.startswith("is_")] + ["long_view"]:
            assert set(column[flag].tolist()) <= {0, 1}
        assert column["tab"].max() <= 14


def test_lengths_have_a_heavy_tail(tmp_path: Path) -> None:
    lengths = open_histories(generate(tmp_path, users=1500, items=300, mean_length=60)).lengths
    assert 45 < lengths.mean() < 75
    assert np.median(lengths) < 0.65 * lengths.mean()
    top = np.sort(lengths)[-150:].sum() / lengths.sum()
    assert top > 0.35  # a tenth of the users
    assert open_histories(generate(tmp_path / "cut", users=200, items=50, max_length=80)).lengths.max() <= 80


def test_what_comes_next_can_be_learned(tmp_path: Path) -> None:
    """Knowing the last item is worth much more than knowing what is popular."""
    histories = open_histories(generate(tmp_path, users=1500, items=300, mean_length=60))
    size = histories.catalogue + 1
    last = histories.offsets[1:] - 1
    seen = np.ones(len(histories.items), dtype=bool)
    seen[last] = False
    targets = histories.items[last]
    popularity = np.bincount(histories.items[seen], minlength=size)
    by_popularity = np.isin(targets, np.argsort(-popularity)[:10]).mean()
    pairs = np.zeros((size, size))
    first = np.flatnonzero(seen[1:] & seen[:-1])
    np.add.at(pairs, (histories.items[first], histories.items[first + 1]), 1)
    best = np.argsort(-pairs[histories.items[last - 1]], axis=1)[:, :10]
    by_last = (best == targets[:, None]).any(axis=1).mean()
    assert by_popularity < 0.2 and by_last > 3 * by_popularity
    popular = np.sort(popularity)[::-1]
    assert popular[: size // 10].sum() > 0.18 * popular.sum()


def test_bad_rows_are_listed(tmp_path: Path) -> None:
    folder = generate(tmp_path, users=30, items=40, mean_length=20, bad_rows=600)
    listed = json.loads((folder / "data" / "bad_rows.json").read_text())
    kinds = [kind for rows in listed.values() for _, kind in rows]
    assert len(kinds) == 600 and kinds.count("truncated") == 3
    assert {kind for kind, _ in SPOILERS} | {"truncated"} == set(kinds)


def test_numbers_are_written_as_python_writes_them(tmp_path: Path) -> None:
    columns = [np.array([0, 9, 10, 123456789012]), np.array([7, 0, 1, 99]), np.array([0, 0, 0, 0])]
    write_numbers(tmp_path / "t.csv", ("a", "b", "c"), columns)
    rows = [",".join(map(str, row)) for row in zip(*(column.tolist() for column in columns), strict=True)]
    assert (tmp_path / "t.csv").read_text() == "\n".join(["a,b,c", *rows]) + "\n"


@pytest.mark.parametrize("wrong", [{"users": 0}, {"items": 1}, {"mean_length": 2}, {"max_length": 1}])
def test_impossible_sizes(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        generate(tmp_path, **wrong)
