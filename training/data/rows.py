"""Numbers out of lines of text: whole chunks at once, and line by line where a line is not plain.

`judge` says what a line is; `parse` says the same for a chunk of lines, some thirty times as fast: it takes lines of
digits and delimiters as they are, and asks `judge` about any other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

LONGEST = 4096  # bytes of a line; rows have about 80
DIGITS = 18  # of a whole number: always fits 64 bits
_SEPARATOR = b"\x1f"  # stands for a delimiter of several bytes
_NEWLINE, _DOT, _ZERO = b"\n"[0], b"."[0], b"0"[0]
_WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Column:
    """A field that is read. Others only have to be numbers."""

    name: str
    at: int
    low: float
    high: float
    whole: bool = True


@dataclass(frozen=True)
class Layout:
    """What each line of a file should look like."""

    fields: int
    columns: tuple[Column, ...]
    delimiter: bytes = b","
    header: bytes = b""  # as it stands in the file, to know it again


@dataclass(frozen=True)
class Bad:
    """Why a line is not a row."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Parsed:
    """Rows of a chunk: the values of each column, and the bad lines by their place in the chunk.

    Blank lines are listed apart: there may be as many as there are rows.
    """

    values: list[np.ndarray]
    lines: int
    bad: list[tuple[int, Bad]]
    blank: np.ndarray


BLANK = Bad("blank", "empty line")
_NONE = np.zeros(0, dtype=np.int64)


def judge(line: bytes, layout: Layout) -> list[float | int] | Bad:
    """The values of the columns, or why there are none. The line comes without its end."""
    if len(line) > LONGEST:
        return Bad("long", f"longer than {LONGEST} bytes; starts with {shown(line)}")
    if b"\0" in line:
        return Bad("nul", f"{line.count(0)} NUL bytes in {shown(line)}")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return Bad("encoding", f"byte {error.start + 1} is not UTF-8 ({error.reason}) in {shown(line)}")
    if not text.strip():
        return BLANK
    if layout.header and line == layout.header:
        return Bad("header", "the header again")
    if '"' in text or "'" in text:
        return Bad("quotes", f"quotes in {shown(line)}")
    fields = text.split(layout.delimiter.decode())
    if len(fields) != layout.fields:
        return Bad("fields", f"{len(fields)} fields instead of {layout.fields} in {shown(line)}")
    columns = {column.at: column for column in layout.columns}
    found: dict[int, float | int] = {}
    for at, field in enumerate(field.strip(" \t") for field in fields):
        column = columns.get(at)
        name = column.name if column else f"field {at + 1}"
        if not field:
            return Bad("missing", f"{name} is empty")
        wanted = _WHOLE if column and column.whole else _NUMBER
        if not wanted.fullmatch(field):
            return Bad("number", f"{name} is {shown(field.encode())}, not a {'whole ' * (wanted is _WHOLE)}number")
        if column:
            value = _value(field, column)
            if not column.low <= value <= column.high:
                return Bad("range", f"{name} is {shown(field.encode())}, outside of {column.low}..{column.high}")
            found[at] = value
    return [found[column.at] for column in layout.columns]


def parse(chunk: bytes, layout: Layout) -> Parsed:
    """Of complete lines; the last one ends with a newline, too."""
    if b"\r" in chunk:
        chunk = chunk.replace(b"\r\n", b"\n")
    plain, delimiter = chunk, layout.delimiter
    if len(delimiter) > 1:
        plain = chunk.replace(_SEPARATOR, b"?").replace(delimiter, _SEPARATOR)
        delimiter = _SEPARATOR
    text = np.frombuffer(plain, dtype=np.uint8)
    places = np.flatnonzero((text - _ZERO) > 9)  # of all that is not a digit; unsigned, so smaller bytes are large
    marks = text[places]
    ends = places[marks == _NEWLINE]
    begins = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    plain_lines, stops = _plain_lines(text, places, marks, len(ends), layout, delimiter[0])

    good = _no_empty_field(places, begins[plain_lines], stops)
    good &= stops[:, -1] - begins[plain_lines] <= LONGEST
    for column in layout.columns:
        good &= stops[:, column.at] - _starts(column.at, begins[plain_lines], stops) <= DIGITS
    if not good.all():
        plain_lines, stops = plain_lines[good], stops[good]

    values = []
    good = np.ones(len(plain_lines), dtype=bool)
    for column in layout.columns:
        read = _whole_numbers if column.whole else _decimals
        found = read(text, _starts(column.at, begins[plain_lines], stops), stops[:, column.at])
        good &= (found >= column.low) & (found <= column.high)
        values.append(found)
    if good.all() and len(plain_lines) == len(ends):
        return Parsed(values, len(ends), [], _NONE)
    return _with_others(chunk, layout, plain_lines[good], [column[good] for column in values], ends == begins)


def _plain_lines(
    text: np.ndarray, places: np.ndarray, marks: np.ndarray, lines: int, layout: Layout, delimiter: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lines with the right number of fields and nothing odd in them, and where each of their fields stops."""
    fields = layout.fields
    if len(marks) == lines * fields:
        grid = marks.reshape(lines, fields)
        if (grid[:, -1] == _NEWLINE).all() and (grid[:, :-1] == delimiter).all():
            return np.arange(lines), places.reshape(lines, fields)
    newline, between = marks == _NEWLINE, marks == delimiter
    line = np.cumsum(newline) - newline
    good = np.bincount(line[between], minlength=lines)[:lines] == fields - 1
    odd = ~newline & ~between
    dots = np.flatnonzero(marks == _DOT)
    if len(dots):
        odd[dots[_decimal_points(text, places, between, line, dots, layout)]] = False
    good[line[odd]] = False
    stops = places[good[line] & (newline | between)]
    return np.flatnonzero(good), stops.reshape(-1, fields)


def _no_empty_field(places: np.ndarray, begins: np.ndarray, stops: np.ndarray) -> np.ndarray:
    if len(places) and places[0] > 0 and (np.diff(places) > 1).all():
        return np.ones(len(stops), dtype=bool)
    return (stops[:, 0] > begins) & (np.diff(stops, axis=1) > 1).all(axis=1)


def _starts(at: int, begins: np.ndarray, stops: np.ndarray) -> np.ndarray:
    return begins if at == 0 else stops[:, at - 1] + 1


def _decimal_points(
    text: np.ndarray, places: np.ndarray, between: np.ndarray, line: np.ndarray, dots: np.ndarray, layout: Layout
) -> np.ndarray:
    """Which dots stand between two digits, alone in a field that need not be whole."""
    before = np.cumsum(between)
    first = np.searchsorted(line, line[dots])  # mark of each dot's line
    at = before[dots] - before[first] + between[first]
    whole = np.isin(at, [column.at for column in layout.columns if column.whole])
    field = line[dots] * (layout.fields + 1) + np.minimum(at, layout.fields)
    first_in_field = np.searchsorted(field, field, side="left")
    last_in_field = np.searchsorted(field, field, side="right")
    digits = ((text[places[dots] - 1] - _ZERO) <= 9) & ((text[places[dots] + 1] - _ZERO) <= 9) & (places[dots] > 0)
    return ~whole & digits & (last_in_field - first_in_field == 1)


def _whole_numbers(text: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Digits from the last to the first; only those numbers go on that have more of them."""
    values = np.zeros(len(starts), dtype=np.int64)
    if not len(starts):
        return values
    widths = stops - starts
    shortest, longest = int(widths.min()), int(widths.max())
    for digit in range(shortest):
        values += (text[stops - (digit + 1)] - _ZERO) * np.int64(10**digit)
    rest = np.arange(len(starts))
    for digit in range(shortest, longest):
        rest = rest[widths[rest] > digit]
        values[rest] += (text[stops[rest] - (digit + 1)] - _ZERO) * np.int64(10**digit)
    return values


def _decimals(text: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    values, scale = np.zeros((2, len(starts)))
    widths = stops - starts
    for at in range(int(widths.max(initial=0))):
        inside = np.flatnonzero(widths > at)
        byte = text[starts[inside] + at]
        point = byte == _DOT
        scale[inside[point]] = 1.0
        digit = inside[~point]
        values[digit] = values[digit] * 10 + (byte[~point] - _ZERO)
        scale[digit] *= 10
    return values / np.maximum(scale, 1.0)


def _with_others(
    chunk: bytes, layout: Layout, plain_lines: np.ndarray, values: list[np.ndarray], empty: np.ndarray
) -> Parsed:
    """Ask about every line that is neither plain nor empty; those that are rows after all take their place."""
    known = empty.copy()
    known[plain_lines] = True
    split = chunk.split(b"\n")
    bad, blank, also, also_values = [], [], [], []
    for at in np.flatnonzero(~known).tolist():
        judged = judge(split[at], layout)
        if judged is BLANK:
            blank.append(at)
        elif isinstance(judged, Bad):
            bad.append((at, judged))
        else:
            also.append(at)
            also_values.append(judged)
    empty[blank] = True
    if also:
        place = np.argsort(np.concatenate([plain_lines, also]), kind="stable")
        for number, own in enumerate(values):
            more = np.array([row[number] for row in also_values], dtype=own.dtype)
            values[number] = np.concatenate([own, more])[place]
    return Parsed(values, len(empty), bad, np.flatnonzero(empty))


def _value(field: str, column: Column) -> float | int:
    if not column.whole:
        return float(field)
    digits = field.partition(".")[0]
    return int(digits) if len(digits) <= 2 * DIGITS else float("-inf" if digits.startswith("-") else "inf")


def shown(line: bytes) -> str:
    """The start of a line, for messages."""
    text = line[:60].decode(errors="backslashreplace")
    return repr(text) + ("..." if len(line) > 60 else "")
