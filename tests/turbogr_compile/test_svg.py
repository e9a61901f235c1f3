"""Pictures: well-formed, the same every time, right marks, no box on another, bounded size."""

from __future__ import annotations

import copy
import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from turbogr_compile.show import diagram as svg

NS = "{http://www.w3.org/2000/svg}"
HOSTILE = 'x = "</title><script>alert(1)</script>" & \x07'


def node(name: str, *inputs: str, op: str = "aten.relu", kind: str = "call_function") -> dict:
    return {
        "name": name, "kind": kind, "op": "" if kind == "placeholder" else op, "args": "", "type": "f32[s0, 64]",
        "inputs": list(inputs), "text": f"%{name} : f32[s0, 64] = {op}({', '.join(f'%{i}' for i in inputs)})",
        "line": 0, "origin": None,
    }  # fmt: skip


def record(before: list[dict], after: list[dict]) -> dict:
    """Two snapshots, a step that leads from one to the other, and one that was skipped."""
    nodes = before + [n for n in after if n not in before]
    snapshots = [[nodes.index(n) for n in side] for side in (before, after)]
    step = {"rewrites": [], "near_misses": []}
    return {
        "nodes": nodes, "snapshots": snapshots,
        "lines": [{"file": "m.py", "line": 3, "code": HOSTILE, "function": "f", "where": "m.py:3"}],
        "steps": [
            {**step, "number": 0, "name": "input", "snapshot": 0},
            {**step, "number": 1, "name": "fuse", "snapshot": 1},
            {**step, "number": 2, "name": "rest", "snapshot": None},
        ],
    }  # fmt: skip


def fused() -> dict:
    x, far = node("x", kind="placeholder"), node("far", "x")
    a, b = node("a", "far"), node("b", "a", "x")
    return record(
        [x, far, a, b, node("c", "b"), node("d", "c"), node("e", "d")],
        [x, far, node("ab", "far", "x", op="turbogr.ab"), node("c", "ab"), node("d", "c"), node("e", "d")],
    )


def groups(text: str) -> dict[tuple[str, str], ET.Element]:
    """(class, name) → group, for each box of a picture of nodes."""
    found = {}
    for group in ET.fromstring(text).iter(f"{NS}g"):
        if group.get("data-node") is not None:
            sub = next(t for t in group.iter(f"{NS}text") if t.get("class") == "sub")
            name = re.match(r"%(\w+)", sub.text or "")
            assert name
            found[group.get("class", ""), name[1]] = group
    return found


def rectangles(text: str) -> list[tuple[float, float, float, float]]:
    result = []
    for group in ET.fromstring(text).iter(f"{NS}g"):
        rect = group.find(f"{NS}rect")
        if rect is not None:
            x, y = map(float, re.findall(r"-?[\d.]+", group.get("transform", "")))
            result.append((x, y, x + float(rect.get("width", 0)), y + float(rect.get("height", 0))))
    return result


def overlapping(boxes: list[tuple[float, float, float, float]]) -> list:
    return [
        (a, b) for a, b in itertools.combinations(boxes, 2)
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]  # fmt: skip


def test_region_marks_what_was_added_removed_and_rewired():
    found = groups(svg.region_svg(fused(), 1))
    kinds = {kind: {n for k, n in found if k == kind} for kind, _ in found}
    assert kinds == {
        "removed": {"a", "b"}, "added": {"ab"}, "rewired": {"c"}, "context": {"x", "far", "d"},
    }  # fmt: skip
    marks = {kind: next(t.text for t in found[kind, name].iter(f"{NS}text") if t.get("class") == "mark")
             for kind, name in (("removed", "a"), ("added", "ab"), ("rewired", "c"))}  # fmt: skip
    assert marks == {"removed": "−", "added": "+", "rewired": "~"}
    title = found["added", "ab"].find(f"{NS}title")
    assert title is not None and title.text is not None
    assert "f32[s0, 64]" in title.text and 'm.py:3  x = "</title><script>' in title.text


def test_hops_bound_the_surroundings():
    assert {n for _, n in groups(svg.region_svg(fused(), 1, hops=1))} == {"x", "far", "a", "b", "ab", "c"}
    assert {n for _, n in groups(svg.region_svg(fused(), 1, hops=3))} == {"x", "far", "a", "b", "ab", "c", "d", "e"}


def test_region_is_well_formed_and_deterministic_whatever_the_user_wrote():
    text = svg.region_svg(fused(), 1)
    root = ET.fromstring(text)
    assert root.tag == f"{NS}svg" and not list(root.iter(f"{NS}script"))
    assert "prefers-color-scheme:dark" in text and "\x07" not in text
    assert text == svg.region_svg(copy.deepcopy(fused()), 1)


def test_what_a_rewired_node_reads_now_is_shown_and_loose_surroundings_are_not():
    """Two equal nodes become one: the survivor is no neighbour of the removed node, yet it is the point."""
    x, other, keep = node("x", kind="placeholder"), node("other", kind="placeholder"), node("keep", "x")
    before = [x, other, keep, node("twin", "x", "other"), node("user", "twin")]
    dot = svg.region_dot(record(before, [x, other, keep, node("user", "keep")]), 1, hops=1)
    boxes = set(re.findall(r'^    "(\w+:\w+)" \[', dot, re.M))
    assert boxes == {f"before:{n}" for n in ("x", "other", "keep", "twin", "user")} | {
        "after:x", "after:keep", "after:user",
    }  # fmt: skip


def test_embedded_picture_leaves_style_to_the_page_and_stacks():
    beside, stacked = svg.region_svg(fused(), 1), svg.change_svg(fused(), 0, 1, "fuse", embedded=True)
    assert "<style>" in beside and "<style>" not in stacked
    width, height = (float(ET.fromstring(stacked).get(k, 0)) for k in ("width", "height"))
    wide, low = (float(ET.fromstring(beside).get(k, 0)) for k in ("width", "height"))
    assert width < wide and height > low


@pytest.mark.parametrize(("step", "note"), [(0, "Nothing changed."), (2, "Nothing changed.")])
def test_step_without_change_says_so(step, note):
    assert note in svg.region_svg(fused(), step)


def test_reordering_is_told_apart_from_nothing():
    x, a, b = node("x", kind="placeholder"), node("a", "x"), node("b", "x")
    assert "Same nodes, in another order." in svg.region_svg(record([x, a, b], [x, b, a]), 1)


def test_big_region_is_capped_with_a_note():
    x = node("x", kind="placeholder")
    old = [node(f"old{i}", f"old{i - 1}" if i else "x") for i in range(100)]
    text = svg.region_svg(record([x, *old], [x]), 1)
    assert len(groups(text)) == svg.CAP
    assert f"{101 - svg.CAP} more nodes of this region are not drawn." in text


def test_boxes_never_overlap_and_stay_on_the_paper():
    x = node("x", kind="placeholder")
    weights = [node(f"w{i}", kind="placeholder") for i in range(5)]
    layers = [node(f"l{i}", f"l{i - 1}" if i else "x", f"w{i}", "x") for i in range(5)]
    wide = [node(f"s{i}", "l4", f"l{i % 4}") for i in range(6)]
    join = node("join", *(n["name"] for n in wide), "l0", op="aten.cat")
    picture = svg.region_svg(record([x], [x, *weights, *layers, *wide, join]), 1)
    boxes = rectangles(picture)
    assert len(boxes) == 18 and overlapping(boxes) == []
    root = ET.fromstring(picture)
    right, bottom = (float(root.get(k, 0)) for k in ("width", "height"))
    assert all(a >= 0 and b >= 0 and c <= right and d <= bottom for a, b, c, d in boxes)


def test_edges_end_on_their_target_and_cross_no_box():
    """Every vertical stretch of an edge must lie outside the boxes of the rows it passes."""
    x = node("x", kind="placeholder")
    chain = [node(f"n{i}", f"n{i - 1}" if i else "x") for i in range(4)]
    picture = svg.region_svg(record([x], [x, *chain, node("end", "n3", "x")]), 1, hops=1)
    boxes = rectangles(picture)
    for group in ET.fromstring(picture).iter(f"{NS}g"):
        path = group.find(f"{NS}path")
        if path is None:
            continue
        left, top = map(float, re.findall(r"-?[\d.]+", group.get("transform", "")))
        here = [0.0, 0.0]
        for kind, numbers in re.findall(r"([MVHQ])([-\d. ]+)", path.get("d", "")):
            values = [float(v) for v in numbers.split()]
            if kind == "V":
                low, high = sorted((here[1] + top, values[0] + top))
                inside = [b for b in boxes if b[0] < here[0] + left < b[2] and low < b[3] - 1 and high > b[1] + 1]
                assert inside == []
            here = {"M": values, "Q": values[-2:], "V": [here[0], values[0]], "H": [values[0], here[1]]}[kind]
        end = here[0] + left, here[1] + top
        assert any(b[0] <= end[0] <= b[2] and abs(b[1] - end[1]) < 1 for b in boxes)


def order() -> dict:
    passes = [("a", "pre-grad", True), ("b", "pre-grad", True), ("gone", "pre-grad", False), ("z", "post-grad", True)]
    edges = [("a", "b", "after"), ("gone", "b", "before"), ("b", "z", "needs"), ("nowhere", "z", "after")]
    return {
        "passes": [{"name": n, "phase": p, "present": here, "summary": "Does <it>."} for n, p, here in passes],
        "edges": [{"from": a, "to": b, "kind": k, "site": f"passes/{b}.py:9"} for a, b, k in edges],
    }  # fmt: skip


def test_order_has_lanes_labels_and_dashed_absentees():
    text = svg.order_svg(order())
    root = ET.fromstring(text)
    said = [t.text for t in root.iter(f"{NS}text")]
    assert "pre-grad" in said and "post-grad" in said
    labels = [t.text or "" for t in root.iter(f"{NS}text") if t.get("class") == "label"]
    assert sorted(labels) == ["after", "before", "needs"]
    absent = [g for g in root.iter(f"{NS}g") if g.get("class") == "absent"]
    assert len(absent) == 1 and "not in this pipeline" in [t.text for t in absent[0].iter(f"{NS}text")]
    assert re.search(r"\.absent rect\{stroke-dasharray", text)
    assert overlapping(rectangles(text)) == []
    assert text == svg.order_svg(copy.deepcopy(order()))


def test_pass_that_runs_twice_is_one_box():
    twice = order()
    twice["passes"].append(twice["passes"][0])
    assert svg.order_svg(twice) == svg.order_svg(order())


def test_order_runs_downwards_inside_a_phase():
    boxes = {}
    for group in ET.fromstring(svg.order_svg(order())).iter(f"{NS}g"):
        if group.find(f"{NS}rect") is not None:
            name = next(t.text for t in group.iter(f"{NS}text") if t.get("class") == "head")
            boxes[name] = [float(v) for v in re.findall(r"-?[\d.]+", group.get("transform", ""))]
    assert boxes["a"][1] == boxes["gone"][1] < boxes["b"][1]
    assert boxes["z"][0] > max(boxes[n][0] for n in ("a", "b", "gone"))


def test_order_of_nothing_and_of_a_cycle_can_be_drawn():
    assert "no passes" in svg.order_svg({"passes": [], "edges": []})
    knot = order()
    knot["edges"].append({"from": "b", "to": "a", "kind": "after", "site": ""})
    ET.fromstring(svg.order_svg(knot))


def test_dot_of_the_same_region():
    text = svg.region_dot(fused(), 1)
    assert text.startswith('digraph "fuse" {') and text.count("{") == text.count("}")
    assert '"after:ab" [label="+ turbogr.ab\\n%ab  f32[s0, 64]", color=green3' in text
    assert '"before:a" -> "before:b";' in text and '"after:a"' not in text
