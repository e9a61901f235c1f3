"""Reading published files: every good row is used once and in order, every bad one is counted and located."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.errors import OptionError
from turbogr_compile.training.data import DataError, Histories, Problems, generate, open_histories, reader, sorting
from turbogr_compile.training.data.kuairand import COLUMNS
from turbogr_compile.training.data.lines import chunks_of

ARRAYS = ("items", "times", "offsets", "users", "item_ids")
NAME = "log_standard_4_08_to_4_21_1k.csv"
HEADER = ",".join(COLUMNS)
NOW = 1_650_000_000


def row(user: int, item: int, second: float, click: int = 1, **others: int) -> str:
    known = {"user_id": user, "video_id": item, "time_ms": int((NOW + second) * 1000), "is_click": click, **others}
    return ",".join(str(known.get(name, 0)) for name in COLUMNS)


def folder_of(path: Path, *rows: str, name: str = NAME, end: str = "\n") -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(("\n".join([HEADER, *rows]) + end).encode())
    return path


def original(histories: Histories) -> dict[int, list[tuple[int, int]]]:
    """Item ids and seconds of each user."""
    found = {}
    for place, user in enumerate(histories.users.tolist()):
        items, times = histories.of(place)
        assert (items >= 1).all()
        found[user] = list(zip(histories.item_ids[items - 1].tolist(), (times - NOW).tolist(), strict=True))
    return found


def assert_same(a: Histories, b: Histories) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        assert getattr(a, name).dtype == getattr(b, name).dtype


def located(folder: Path) -> set[tuple[str, int, str]]:
    listed = json.loads((folder / "data" / "bad_rows.json").read_text())
    return {(file, line, kind) for file, rows in listed.items() for line, kind in rows}


def test_ten_thousand_bad_rows(tmp_path: Path) -> None:
    """Each counted and located, good rows all used."""
    size = {"users": 200, "items": 100, "mean_length": 30, "seed": 3}
    clean = open_histories(generate(tmp_path / "clean", **size), min_length=1)
    spoiled = generate(tmp_path / "spoiled", **size, bad_rows=10_000)
    read = open_histories(spoiled, min_length=1, cache=tmp_path / "cache")
    assert_same(read, clean)
    assert not clean.problems and len(read.problems) == 10_000 == sum(read.problems.counts.values())
    assert set(read.problems.lines()) == located(spoiled)
    assert read.problems.rows == clean.problems.rows + 10_000
    assert read.problems.good == clean.problems.rows

    path = tmp_path / "problems.json"
    read.problems.write(path)
    again = Problems.from_json(json.loads(path.read_text()))
    assert set(again.lines()) == located(spoiled)
    assert again.shown == read.problems.shown and str(again) == str(read.problems)
    for problem in again.shown:
        line = (spoiled / "data" / problem.file).read_bytes().split(b"\n")[problem.line - 1]
        assert problem.kind != "blank" or not line.strip()
        assert problem.kind != "nul" or b"\0" in line


@pytest.mark.parametrize("chunk", [300, 4097, 1 << 16])
def test_chunks_make_no_difference(tmp_path: Path, chunk: int) -> None:
    folder = generate(tmp_path, users=40, items=30, mean_length=20, bad_rows=500)
    whole, parts = open_histories(folder), open_histories(folder, chunk=chunk)
    assert_same(whole, parts)
    assert set(parts.problems.lines()) == located(folder)
    assert str(parts.problems) == str(whole.problems)


def test_sorting_in_parts_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = generate(tmp_path, users=60, items=30, mean_length=20)
    whole = open_histories(folder, keep="all")
    monkeypatch.setattr(reader, "PART", 200)
    assert_same(open_histories(folder, keep="all"), whole)
    assert_same(open_histories(folder, keep="all", cache=tmp_path / "cache"), whole)


ROWS = st.tuples(
    st.sampled_from([0, 1, 2, 7, 10**17]), st.integers(0, 9) | st.just(10**18 - 1), st.integers(0, 3), st.integers(0, 1)
)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(ROWS, max_size=40),
    junk=st.lists(st.sampled_from(["", "x", "1,2", HEADER, "1," * 18 + "\0"]), max_size=10),
    data=st.data(),
)
def test_every_good_row_once_and_in_time_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, ...]], junk: list[str], data: st.DataObject
) -> None:
    """Also where rows of two files interleave; rows of the same time stay as they stand."""
    first = data.draw(st.integers(0, len(rows)))
    min_length = data.draw(st.integers(1, 4))
    folder = tmp_path_factory.mktemp("rows")
    texts = [row(user, item, second, click) for user, item, second, click in rows]
    for place, line in zip(data.draw(st.lists(st.integers(0, first), min_size=len(junk))), junk, strict=False):
        texts.insert(place, line)
    split = first + len(texts) - len(rows)
    folder_of(folder, *texts[:split])
    folder_of(folder, *texts[split:], name="log_standard_4_22_to_5_08_1k.csv")

    expected: dict[int, list[tuple[int, int]]] = {}
    for user, item, second, click in rows:
        if click:
            expected.setdefault(user, []).append((item, second))
    expected = {user: sorted(of, key=lambda pair: pair[1]) for user, of in expected.items() if len(of) >= min_length}
    if not expected:
        with pytest.raises(DataError, match=f"no user has {min_length} interactions"):
            open_histories(folder, min_length=min_length, chunk=777)
        return
    with mock.patch.object(sorting, "TABLE", data.draw(st.sampled_from([0, 5, 1000]))):
        histories = open_histories(folder, min_length=min_length, chunk=777)
    assert original(histories) == dict(sorted(expected.items()))
    problems = histories.problems
    assert problems.rows == len(texts) and len(problems) == len(texts) - len(rows)
    assert problems.kept == len(histories.items) and problems.good == len(rows)
    ids = {item for of in expected.values() for item, _ in of}
    assert histories.item_ids.tolist() == sorted(ids)


def test_milliseconds_decide_the_order(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, row(1, 30, 5.9), row(1, 10, 5.1), row(1, 20, 5.5))
    assert original(open_histories(folder)) == {1: [(10, 5), (20, 5), (30, 5)]}


def test_which_interactions_count(tmp_path: Path) -> None:
    rows = [row(1, 1, 1), row(1, 2, 2, click=0), row(1, 3, 3, long_view=1), row(1, 4, 4, click=0, is_like=1)]
    folder_of(tmp_path, *rows)
    folder_of(tmp_path, row(1, 5, 5, is_rand=1), name="log_random_4_22_to_5_08_1k.csv")

    def items(**options: object) -> list[int]:
        return [item for item, _ in original(open_histories(tmp_path, min_length=1, **options))[1]]

    assert items() == items(keep="clicks") == [1, 3, 5]
    assert items(keep="all") == [1, 2, 3, 4, 5]
    assert items(keep="long_views") == [3]
    assert items(keep="likes") == [4]
    assert items(keep="all", standard_only=True) == [1, 2, 3, 4]
    with pytest.raises(OptionError, match="did you mean 'clicks'"):
        open_histories(tmp_path, keep="click")


def test_the_last_line_need_not_end(tmp_path: Path) -> None:
    rows = [row(1, n, n) for n in range(4)]
    complete = open_histories(folder_of(tmp_path / "complete", *rows, end=""))
    assert len(complete.items) == 4 and not complete.problems
    cut = open_histories(folder_of(tmp_path / "cut", *rows[:3], rows[3][:-5], end=""))
    assert len(cut.items) == 3 and list(cut.problems.lines()) == [(NAME, 5, "truncated")]


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    text = "\r\n".join([HEADER, *[row(1, n, n) for n in range(3)], HEADER, "x"]) + "\r\n"
    (tmp_path / NAME).write_bytes(b"\xef\xbb\xbf" + text.encode())
    histories = open_histories(tmp_path)
    assert len(histories.items) == 3
    assert [(line, kind) for _, line, kind in histories.problems.lines()] == [(5, "header"), (6, "fields")]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(
        "tab,long_view,time_ms,is_like,video_id,is_click,user_id\n"
        + "".join(f"1,0,{(NOW + n) * 1000},0,{n},1,4\n" for n in range(3))
    )
    assert original(open_histories(tmp_path)) == {4: [(0, 0), (1, 1), (2, 2)]}


def test_a_missing_column_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("user_id,videoid,time_ms,is_click,is_like,long_view\n1,2,3,1,0,0\n")
    with pytest.raises(DataError, match=rf"{NAME}: no column video_id in the header .*did you mean 'videoid'"):
        open_histories(tmp_path)
    (tmp_path / NAME).write_text("")
    with pytest.raises(DataError, match=f"{NAME}: no column user_id, video_id"):
        open_histories(tmp_path)


def test_compressed_files(tmp_path: Path) -> None:
    folder = generate(tmp_path / "plain", users=60, items=30, mean_length=20)
    other = tmp_path / "compressed"
    other.mkdir()
    for path in (folder / "data").glob("*.csv"):
        text = path.read_bytes()
        members = gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + b"\0" * 10
        (other / f"{path.name}.gz").write_bytes(members)
    compressed = open_histories(other)
    assert_same(compressed, open_histories(folder))
    assert not compressed.problems
    for path in (folder / "data").glob("*.csv"):
        (other / path.name).write_bytes(path.read_bytes())
    assert_same(open_histories(other), compressed)  # not twice


@pytest.mark.parametrize("damage", ["cut", "changed", "checksum"])
def test_damaged_compression_loses_nothing_before_it(tmp_path: Path, damage: str) -> None:
    rows = [row(n % 7, n * 7919 % 1000, n) for n in range(4000)]
    text = "\n".join([HEADER, *rows]) + "\n"
    packed = bytearray(gzip.compress(text.encode()))
    path = tmp_path / f"{NAME}.gz"
    if damage == "cut":
        del packed[len(packed) // 2 :]
    elif damage == "changed":
        packed[len(packed) // 2 : len(packed) // 2 + 50] = b"\xff" * 50
    else:
        packed[-6] ^= 1
    path.write_bytes(packed)
    histories = open_histories(tmp_path)
    kinds = histories.problems.counts
    assert kinds["compression"] == 1 and histories.problems.kept >= (4000 if damage == "checksum" else 1000)
    if damage != "changed":  # what follows a changed byte may inflate to anything
        found = {(user, *pair) for user, of in original(histories).items() for pair in of}
        count = histories.problems.kept
        assert found == {(n % 7, n * 7919 % 1000, n) for n in range(count)}
        assert kinds.get("truncated", 0) == (damage == "cut")


def test_endless_lines_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    path.write_bytes(b"a\n" + b"1" * 1_000_000 + b"\nb\n" + b"2" * 100_000)
    chunks = list(chunks_of(path, 1000))
    assert max(len(chunk.text) for chunk in chunks) < 10_000
    assert [chunk.line for chunk in chunks] == [1, 2, 4] and chunks[-1].unfinished


def test_a_file_of_anything_is_no_crash(tmp_path: Path) -> None:
    rows = [row(1, n, n) for n in range(3)]
    folder_of(tmp_path, *rows)
    with (tmp_path / NAME).open("ab") as file:
        file.write(np.random.default_rng(0).bytes(200_000))
    histories = open_histories(tmp_path)
    assert original(histories) == {1: [(0, 0), (1, 1), (2, 2)]}
    assert histories.problems.rows == 3 + len(histories.problems)


MOVIELENS = {
    "ratings.csv": ("userId,movieId,rating,timestamp\n", ","),
    "ratings.dat": ("", "::"),
    "u.data": ("", "\t"),
}


@pytest.mark.parametrize("name", MOVIELENS)
def test_movielens(tmp_path: Path, name: str) -> None:
    header, delimiter = MOVIELENS[name]
    rows = [(1, 31, 2.5, 30), (1, 1029, 3.0, 10), (2, 31, 4.5, 20), (1, 5, 4, 20), (2, 7, 5, 20)]
    lines = [delimiter.join(map(str, (user, item, rating, NOW + time))) for user, item, rating, time in rows]
    lines += ["1,2", delimiter.join(["1", "2", "9.5", str(NOW)]), delimiter.join(["1", "2", "bad", str(NOW)])]
    (tmp_path / name).write_text(header + "\n".join(lines) + "\n")
    for source in (tmp_path, tmp_path / name):
        histories = open_histories(source, min_length=1)
        assert original(histories) == {1: [(1029, 10), (5, 20), (31, 30)], 2: [(31, 20), (7, 20)]}
        assert histories.problems.counts == {"fields": 1, "number": 1, "range": 1}
    assert original(open_histories(tmp_path, min_length=1, keep="likes")) == {1: [(5, 20)], 2: [(31, 20), (7, 20)]}
    with gzip.open(tmp_path / f"{name}.gz", "wb") as file:
        file.write((tmp_path / name).read_bytes())
    (tmp_path / name).unlink()
    assert len(open_histories(tmp_path, min_length=1).items) == 5


def test_files_of_other_names_are_known_by_their_header(tmp_path: Path) -> None:
    folder_of(tmp_path, *[row(1, n, n) for n in range(3)], name="mine.csv")
    assert len(open_histories(tmp_path / "mine.csv").items) == 3
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="say which with kind="):
        open_histories(tmp_path / "other.csv")


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        open_histories(tmp_path / "nowhere")
    (tmp_path / "user_features_1k.csv").write_text("")
    with pytest.raises(DataError, match=r"neither log_standard_\*\.csv .* it holds user_features_1k.csv"):
        open_histories(tmp_path)
    with pytest.raises(OptionError, match="did you mean 'movielens'"):
        open_histories(tmp_path, kind="movielen")
    with pytest.raises(OptionError, match="min_length"):
        open_histories(tmp_path, min_length=0)
    folder_of(tmp_path, row(1, 1, 1))
    folder_of(tmp_path, row(1, 1, 1), name="log_standard_4_08_to_4_21_27k_part1.csv")
    with pytest.raises(DataError, match="1k, 27k, which number users and videos differently"):
        open_histories(tmp_path)


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    """Any byte that is not as it was written, any file that is missing or is none: one warning, and the same data."""
    folder, cache = folder_of(tmp_path / "data", *[row(n % 7, n, n) for n in range(60)]), tmp_path / "cache"
    first = open_histories(folder)
    open_histories(folder, cache=cache)
    (place,) = cache.iterdir()
    names = sorted(path.name for path in place.iterdir())
    chance = np.random.default_rng(0)
    for number in range(60):
        path = place / names[number % len(names)]
        data = bytearray(path.read_bytes())
        at = int(chance.integers(len(data)))
        if number % 4 == 0:
            path.write_bytes(data[:at])
        elif number % 4 == 1:
            data[at] ^= 1 << int(chance.integers(8))
            path.write_bytes(data)
        elif number % 4 == 2:
            path.write_bytes(bytes(data) + b"x")
        else:
            path.unlink()
        with pytest.warns(UserWarning, match="is damaged and made anew") as said:
            again = open_histories(folder, cache=cache)
        assert len(said) == 1
        assert_same(again, first)
    assert [path.name for path in cache.iterdir()] == [place.name]


def test_the_cache_is_used_until_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = folder_of(tmp_path / "data", *[row(1, n, n) for n in range(3)], "bad"), tmp_path / "cache"
    first = open_histories(folder, cache=cache)
    assert isinstance(first.items, np.memmap)

    def no_reading(*arguments: object) -> None:
        raise AssertionError("files were read again")

    with monkeypatch.context() as patched:
        patched.setattr(reader, "_read", no_reading)
        again = open_histories(folder, cache=cache)
    assert_same(first, again)
    assert str(again.problems) == str(first.problems) and len(again.problems) == 1
    assert len(open_histories(folder, cache=cache, min_length=2).items) == 3
    folder_of(folder, *[row(1, n, n) for n in range(5)])
    os.utime(folder / NAME, ns=(1, 1))
    assert len(open_histories(folder, cache=cache).items) == 5
    assert sorted(path.name[:10] for path in cache.iterdir()) == ["histories-"] * 3


def test_nothing_is_left_behind_by_a_reading_that_failed(tmp_path: Path) -> None:
    folder_of(tmp_path / "data", "bad")
    with pytest.raises(DataError, match="1 bad"):
        open_histories(tmp_path / "data", cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
