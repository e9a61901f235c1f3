"""Lines of text become rows, or a reason; chunks give what their lines give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.training.data import Problems, rows
from turbogr_compile.training.data.rows import BLANK, LONGEST, Bad, Column, Layout, Parsed, judge, parse

LAYOUT = Layout(
    4,
    (Column("user", 0, 0, 10**18 - 1), Column("time", 2, 1000, 9999), Column("rating", 3, 0, 5, whole=False)),
    header=b"user,other,time,rating",
)


def bad_lines(parsed: Parsed) -> list[tuple[int, Bad]]:
    return sorted([*parsed.bad, *((at, BLANK) for at in parsed.blank.tolist())], key=lambda found: found[0])


GOOD = [
    (b"1,2,1500,3", [1, 1500, 3.0]),
    (b"0,0,1000,4.5", [0, 1000, 4.5]),
    (b"00012,-7,9999,0.5", [12, 9999, 0.5]),
    (b"7,1e5,1500,5", [7, 1500, 5.0]),
    (b"7,.5,1500,5.", [7, 1500, 5.0]),
    (b" 7 ,2,\t1500,1", [7, 1500, 1.0]),
    (b"7.0,2.25,1500.,1", [7, 1500, 1.0]),
    (b"999999999999999999,1,1500,1", [999999999999999999, 1500, 1.0]),
]

BAD = [
    (b"1,2,1500", "fields", "3 fields instead of 4"),
    (b"1,2,1500,3,", "fields", "5 fields"),
    (b"1,,1500,3", "missing", "field 2 is empty"),
    (b",2,1500,3", "missing", "user is empty"),
    (b"1,2,1500,", "missing", "rating is empty"),
    (b"1, ,1500,3", "missing", "field 2"),
    (b"x,2,1500,3", "number", "user is 'x', not a whole number"),
    (b"1,2a,1500,3", "number", "field 2 is '2a', not a number"),
    (b"1.5,2,1500,3", "number", "whole"),
    (b"1,2,1500,1.2.3", "number", "rating"),
    (b"1,.,1500,3", "number", "field 2"),
    (b"1,2,1500,nan", "number", "rating"),
    (b"1,2,1500,inf", "number", "rating"),
    ("１,2,1500,3".encode(), "number", "user"),
    (b"-1,2,1500,3", "range", "user is '-1', outside of 0.."),
    (b"1,2,999,3", "range", "time"),
    (b"1,2,10000,3", "range", "time"),
    (b"1,2,1500,5.5", "range", "rating"),
    (b"1,2,1500,-1", "range", "rating"),
    (b"1" * 19 + b",2,1500,3", "range", "user"),
    (b"-" + b"1" * 4000 + b",2,1500,3", "range", "user"),
    (b"1,\xff,1500,3", "encoding", "byte 3 is not UTF-8"),
    (b"1,2\0,1500,3", "nul", "1 NUL"),
    (b'1,"2",1500,3', "quotes", "quotes"),
    (b"1," + b"2" * LONGEST + b",1500,3", "long", "longer than"),
    (b"user,other,time,rating", "header", "the header again"),
    (b"", "blank", "empty"),
    (b" \t ", "blank", "empty"),
]


@pytest.mark.parametrize(("line", "values"), GOOD)
def test_good_lines(line: bytes, values: list[float]) -> None:
    assert judge(line, LAYOUT) == values
    parsed = parse(line + b"\n", LAYOUT)
    assert [column.tolist() for column in parsed.values] == [[value] for value in values] and not bad_lines(parsed)


@pytest.mark.parametrize(("line", "kind", "reason"), BAD)
def test_bad_lines(line: bytes, kind: str, reason: str) -> None:
    judged = judge(line, LAYOUT)
    assert isinstance(judged, Bad) and judged.kind == kind and reason in judged.reason
    parsed = parse(line + b"\n", LAYOUT)
    assert bad_lines(parsed) == [(0, judged)] and not any(len(column) for column in parsed.values)


FIELDS = st.one_of(
    st.integers(0, 12_000).map(lambda n: str(n).encode()),
    st.sampled_from(
        [b"1500", b"3", b"4.5", b"0.25", b".5", b"5.", b"1.2.3", b"-1", b"+2", b"", b" ", b"1e3", b"9" * 18]
    ),
    st.binary(max_size=4).filter(lambda b: b"\n" not in b and b"\r" not in b),
)
LINES = st.one_of(
    st.lists(FIELDS, min_size=1, max_size=6).map(b",".join),
    st.tuples(FIELDS, FIELDS, st.sampled_from([b"1500", b"1501"]), FIELDS).map(b",".join),
    st.sampled_from([line for line, *_ in [*GOOD, *BAD]]),
)


@settings(max_examples=400, deadline=None)
@given(lines=st.lists(LINES, max_size=12), ending=st.sampled_from([b"\n", b"\r\n"]))
def test_a_chunk_gives_what_its_lines_give(lines: list[bytes], ending: bytes) -> None:
    lines = [line for line in lines if not line.endswith(b"\r")]
    parsed = parse(b"".join(line + ending for line in lines), LAYOUT)
    judged = [judge(line, LAYOUT) for line in lines]
    assert parsed.lines == len(lines)
    assert bad_lines(parsed) == [(at, found) for at, found in enumerate(judged) if isinstance(found, Bad)]
    rows = [found for found in judged if not isinstance(found, Bad)]
    for number, column in enumerate(parsed.values):
        assert column.tolist() == [row[number] for row in rows]


def test_a_delimiter_of_two_bytes() -> None:
    layout = Layout(3, (Column("a", 0, 0, 99), Column("b", 2, 0, 99)), delimiter=b"::")
    lines = [b"1::2::3", b"1:2::3", b"1,2,3", b"1:::2::3", b"1\x1f2\x1f3", b"4::5::6", b"1::2::3::"]
    parsed = parse(b"\n".join(lines) + b"\n", layout)
    assert [column.tolist() for column in parsed.values] == [[1, 4], [3, 6]]
    assert [(at, bad.kind) for at, bad in bad_lines(parsed)] == [
        (1, "fields"), (2, "fields"), (3, "number"), (4, "fields"), (6, "fields"),
    ]  # fmt: skip


def test_rows_keep_their_order_where_some_are_not_plain() -> None:
    lines = [f"{n},{'-1' if n % 3 else '1'},1500,1" for n in range(50)]
    parsed = parse("".join(f"{line}\n" for line in lines).encode(), LAYOUT)
    np.testing.assert_array_equal(parsed.values[0], np.arange(50))


def test_empty_lines_are_not_looked_at_one_by_one(monkeypatch) -> None:
    """A file may have as many of them as it has rows, or a million times as many."""
    asked = []
    monkeypatch.setattr(rows, "judge", lambda line, layout: asked.append(line) or judge(line, layout))
    parsed = parse((b"\n" * 1000 + b"1,2,1500,3\n \n") * 2 + b"\r\n" * 5, LAYOUT)
    assert asked == [b" "] * 2 and parsed.lines == 2009
    assert parsed.blank.tolist() == [at for at in range(2009) if at not in (1000, 2002)] and not parsed.bad


@given(lines=st.sets(st.integers(1, 60)), cut=st.integers(0, 60))
def test_many_lines_at_once_are_as_many_alone(lines: set[int], cut: int) -> None:
    one, many = Problems(), Problems()
    for line in sorted(lines):
        one.add("blank", "a.csv", line, "empty line")
    for part in ([n for n in sorted(lines) if n < cut], [n for n in sorted(lines) if n >= cut]):
        many.add_all("blank", "a.csv", np.array(part, dtype=np.int64), "empty line")
    assert one.to_json() == many.to_json()
