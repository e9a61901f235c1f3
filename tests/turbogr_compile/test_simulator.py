"""The simulator: exact where a formula exists, equal to an event queue, conserving time, monotone, honest."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.errors import OptionError
from turbogr_compile.kernels.twin.cost import SOCS
from turbogr_compile.simulator import report
from turbogr_compile.simulator.calibration import (
    SHIPPED,
    Calibration,
    Kernel,
    fit,
    load_calibration,
    measure_here,
    save_calibrations,
)
from turbogr_compile.simulator.cluster import cluster_of
from turbogr_compile.simulator.events import COMPUTE, INSIDE, LINKS, NODE, PEERS, RESOURCES, WORLD, Timeline, usage
from turbogr_compile.simulator.figures import PROVENANCES, Figure
from turbogr_compile.simulator.variants import FEATURES, Loads, Variant, ladder, simulate
from turbogr_compile.simulator.workload import Compute, Load, Workload

EVERY = [Variant(frozenset(f), "+".join(f) or "naive") for n in range(6) for f in itertools.combinations(FEATURES, n)]


def still(**more) -> Compute:
    """Equal lengths and no random delays, so that formulas hold; kernels priced by FLOPs and bytes."""
    workload = Workload(lengths="equal", longest=512, sequences=4, layers=4, width=256, **more)
    workload = replace(workload, jitter=workload.jitter.replaced(0.0))
    return Compute(workload, cluster_of("910B2"), Calibration("910B2", "assumed", "none", 128))


def outcome(compute: Compute, variant: str, devices: int, steps: int = 3):
    return simulate(compute, Variant.read(variant), devices, Loads(compute.workload, compute, steps))


# --- the event core --------------------------------------------------------------------------------------


@st.composite
def programs(draw):
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tasks = []
    for number in range(draw(st.integers(1, 12))):
        on = draw(st.sets(st.sampled_from(RESOURCES), min_size=1, max_size=2))
        seconds = draw(st.lists(st.integers(0, 9), min_size=nodes * per_node, max_size=nodes * per_node))
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        tasks.append((tuple(sorted(on)), seconds, after, draw(st.sampled_from([None, NODE, PEERS, WORLD]))))
    return nodes, per_node, tasks


def by_queue(nodes: int, per_node: int, tasks: list) -> dict[tuple[int, int], tuple[float, float]]:
    """The same, event by event: each device has a queue per resource, and a collective starts with its last member."""
    devices = range(nodes * per_node)

    def group(device: int, among: str | None) -> list[int]:
        if among is None:
            return [device]
        same = {NODE: lambda d: d // per_node, PEERS: lambda d: d % per_node, WORLD: lambda d: 0}[among]
        return [d for d in devices if same(d) == same(device)]

    queues = {(d, r): [t for t, task in enumerate(tasks) if r in task[0]] for d in devices for r in RESOURCES}
    done: dict[tuple[int, int], tuple[float, float]] = {}
    started: set[tuple[int, int]] = set()
    events: list[tuple[float, int, int]] = []
    now = 0.0

    def ready(t: int, d: int) -> bool:
        on, _, after, _ = tasks[t]
        return all(queues[d, r][0] == t for r in on) and all((a, d) in done for a in after)

    while len(done) < len(tasks) * len(devices):
        moved = True
        while moved:
            moved = False
            for t, (_, seconds, _, among) in enumerate(tasks):
                for d in devices:
                    members = group(d, among)
                    if (t, d) not in started and all(ready(t, m) for m in members):
                        took = max(seconds[m] for m in members)
                        for m in members:
                            started.add((t, m))
                            heapq.heappush(events, (now + took, t, m))
                        moved = True
        now, t, d = heapq.heappop(events)
        finished = [(t, d)]
        while events and events[0][0] == now:
            finished.append(heapq.heappop(events)[1:])
        for t, d in finished:
            took = max(tasks[t][1][m] for m in group(d, tasks[t][3]))
            done[t, d] = now - took, now
            for r in tasks[t][0]:
                queues[d, r].pop(0)
    return done


@settings(max_examples=60, deadline=None)
@given(programs())
def test_vectors_of_times_are_what_a_queue_of_events_gives(program):
    nodes, per_node, tasks = program
    timeline = Timeline(nodes, per_node)
    issued = []
    for number, (on, seconds, after, among) in enumerate(tasks):
        issued.append(timeline.run(str(number), on, seconds, [issued[a] for a in after], among))
    for (task, device), (start, end) in by_queue(nodes, per_node, tasks).items():
        assert (issued[task].start[device], issued[task].end[device]) == (start, end)


@settings(max_examples=40, deadline=None)
@given(programs(), st.integers(0, 10), st.integers(1, 20))
def test_time_is_conserved(program, begin, span):
    """Every instant of a device is compute, exposed communication, exposed host work or waiting: counted one by one."""
    nodes, per_node, tasks = program
    timeline = Timeline(nodes, per_node)
    for number, (on, seconds, _, among) in enumerate(tasks):
        timeline.run(str(number), on, seconds, (), among)
    found = usage(timeline.tasks, begin, begin + span)
    counted = np.zeros(4)
    for device, instant in itertools.product(range(nodes * per_node), range(begin, begin + span)):
        busy = {r for t in timeline.tasks if t.start[device] <= instant < t.end[device] for r in t.on}
        counted[0 if COMPUTE in busy else 1 if busy & set(LINKS) else 2 if busy else 3] += 1
    assert np.allclose(found, counted / counted.sum()) and math.isclose(sum(found), 1.0)


def test_a_pipeline_of_two_resources():
    """n buckets of compute c, each followed by communication m: n * c + m, or c + n * m where links are the limit."""
    for compute, link in ((3.0, 2.0), (2.0, 3.0)):
        timeline = Timeline(1, 4)
        for _ in range(5):
            timeline.run("send", INSIDE, link, [timeline.run("compute", COMPUTE, compute)], NODE)
        assert timeline.tasks[-1].end.tolist() == [max(5 * compute + link, compute + 5 * link)] * 4


def test_a_collective_waits_for_its_group_only():
    timeline = Timeline(2, 2)
    slow = timeline.run("compute", COMPUTE, [1.0, 5.0, 2.0, 3.0])
    assert timeline.run("a", INSIDE, 1.0, [slow], NODE).start.tolist() == [5, 5, 3, 3]
    assert timeline.run("b", "across", 1.0, [slow], PEERS).start.tolist() == [2, 5, 2, 5]
    assert timeline.run("c", "host", 1.0, [slow], WORLD).end.tolist() == [6] * 4


# --- steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 8, 16, 64])
def test_the_naive_step_is_the_sum_of_its_parts(devices):
    compute = still()
    w, c = compute.workload, compute.cluster
    tokens = np.full(1, 4 * 512.0)
    pairs = np.full(1, 4 * 512 * 513 / 2)
    load = Load(tokens, pairs, w.distinct(tokens), w.distinct_negatives(tokens))
    rows = load.history + load.negatives

    def sent(size):
        return c.all_to_all(size, devices)

    dense = float(w.dense * 2)
    parts = [
        sent(8.0), sent(rows * 8), compute.lookup(rows), sent(rows * w.row_bytes), compute.forward(load),
        compute.loss(load, False), compute.loss(load, True), compute.backward(load),
        2 * c.reduce_inside(dense, devices) + c.reduce_across(dense, devices),
        sent(rows * w.row_bytes), compute.update(rows), compute.dense_update(),
    ]  # fmt: skip
    wanted = float(np.sum([np.asarray(p).reshape(-1)[0] for p in parts]))
    assert outcome(compute, "naive", devices).step_seconds == pytest.approx(wanted, rel=1e-9)


def test_collectives_by_hand():
    c = cluster_of("910B2")
    rate = 25e9 * 0.7
    assert c.all_to_all_inside(8e6, 8) == pytest.approx(10.5e-6 + 7e6 / (196e9 * 0.7))
    assert c.all_to_all(16e6, 16) == pytest.approx(11.5e-6 + 8e-6 + 8e6 / rate)
    assert c.reduce_across(8e6, 32) == pytest.approx(10e-6 + 4 * 1.5e-6 + 2 * 1e6 * 0.75 / rate)
    assert c.rows_across(1e6, 3e6, 32) == pytest.approx(10e-6 + 3e-6 + 3e-6 + 3e6 / rate)  # to each other: 3 x 1e6
    assert c.rows_across(1e6, 1.5e6, 32) == pytest.approx(10e-6 + 3e-6 + 3e-6 + 2.5e6 * 0.75 / rate)
    assert c.all_to_all_inside(8e6, 1) == c.reduce_across(1e6, 8) == c.rows_across(1e6, 1e6, 8) == 0


@pytest.mark.parametrize("variant", EVERY, ids=lambda v: v.name)
def test_every_variant_conserves_time_and_computes_the_same(variant):
    compute = still()
    found = simulate(compute, variant, 16, Loads(compute.workload, compute, 3))
    assert sum(found.usage) == pytest.approx(1.0, abs=1e-9) and min(found.usage) >= 0
    assert found.usage.communication <= found.communicating + 1e-12
    naive = outcome(compute, "naive", 16)
    if "hierarchical" not in variant:  # which applies more rows on each device
        busy, wanted = found.usage.compute * found.step_seconds, naive.usage.compute * naive.step_seconds
        assert busy == pytest.approx(wanted, rel=0.02)
        assert found.step_seconds <= naive.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("variant", ["naive", "prefetch+overlap", "overlap+hierarchical", "semi-async"])
def test_better_parts_never_make_a_step_longer(variant):
    compute = still()
    cluster = compute.cluster
    before = outcome(compute, variant, 32).step_seconds
    for name, factor in (
        ("inside", 2),
        ("across", 2),
        ("link_efficiency", 1.2),
        ("collective_start", 0.5),
        ("peak", 2),
    ):
        faster = replace(cluster, **{name: getattr(cluster, name).replaced(float(getattr(cluster, name)) * factor)})
        assert outcome(replace(compute, cluster=faster), variant, 32).step_seconds <= before * (1 + 1e-12), name


def test_one_node_has_nothing_to_gain_from_hierarchy():
    compute = still()
    for rest in ("", "overlap+", "semi-async+overlap+"):
        plain = Variant.read(rest.strip("+") or "naive")
        near = Variant(plain.features | {"hierarchical"}, "near")
        loads = Loads(compute.workload, compute, 2)
        a, b = (simulate(compute, v, 8, loads).step_seconds for v in (plain, near))
        assert a == b


def test_balancing_takes_the_waiting_out():
    workload = replace(Workload(sequences=16), jitter=Workload().jitter.replaced(0.0))
    compute = replace(still(), workload=workload)
    given, balanced = outcome(compute, "naive", 16), outcome(compute, "balanced", 16)
    assert given.imbalance > 0.05 > 0.01 > balanced.imbalance
    assert balanced.usage.waiting < 0.2 * given.usage.waiting


def test_semi_async_hides_what_fits_under_compute():
    compute = replace(still(), workload=replace(still().workload, width=1024, longest=2048, layers=8))
    found = outcome(compute, "prefetch+overlap+semi-async", 16, steps=6)
    assert found.usage.communication < 0.25 * outcome(compute, "naive", 16).usage.communication


def test_semi_async_is_one_step_stale_and_no_more():
    """A lookup for step t+1 starts after the update of step t-1 on each device, and before that of step t."""
    found = outcome(still(), "semi-async+prefetch+overlap", 16, steps=4)
    lookups = [t for t in found.timeline.tasks if t.name == "lookup"]
    updates = [t for t in found.timeline.tasks if t.name == "update rows"]
    for step in range(2, len(lookups)):
        assert (lookups[step].start >= updates[step - 2].end).all()
        assert step - 1 >= len(updates) or (lookups[step].start < updates[step - 1].start).all()


def test_the_same_seed_gives_the_same_figures():
    compute = replace(still(), workload=Workload(sequences=4, longest=512))
    assert outcome(compute, "balanced", 16)[2:8] == outcome(compute, "balanced", 16)[2:8]
    other = replace(compute, workload=replace(compute.workload, seed=1))
    assert outcome(compute, "naive", 16).step_seconds != outcome(other, "naive", 16).step_seconds


def test_a_thousand_devices_are_simulated():
    compute = replace(still(), workload=Workload(sequences=4))
    found = outcome(compute, "prefetch+overlap+balanced+semi-async", 1024, steps=1)
    assert found.timeline.devices == 1024 and 0 < found.usage.compute < 1


# --- ids -------------------------------------------------------------------------------------------------


def test_distinct_items_are_those_that_draws_find():
    workload = replace(Workload(), items=Figure(5000, "rows", "assumed", "for the test"))
    share = np.arange(1, 5001) ** -1.0
    share /= share.sum()
    for drawn in (100, 3000, 40_000):
        assert workload.distinct(drawn)[0] == pytest.approx((1 - (1 - share) ** drawn).sum(), rel=2e-3)
        assert workload.distinct_negatives(drawn)[0] == pytest.approx(5000 * (1 - (1 - 1 / 5000) ** drawn), rel=2e-3)
    random = np.random.default_rng(0)
    seen = np.mean([len(np.unique(random.choice(5000, 3000, p=share))) for _ in range(20)])
    assert workload.distinct(3000)[0] == pytest.approx(seen, rel=0.02)


# --- calibrations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("soc", SOCS)
def test_shipped_kernels_are_projected_and_no_faster_than_the_device(soc):
    found = load_calibration(SHIPPED, soc)
    assert found.provenance == "projected" and "twin" in found.source
    for op, flops in {"jagged_attention": 4.0, "jagged_attention_backward": 10.0}.items():  # 2 and 5 products
        assert found.kernels[op](0.0, 1e12) >= 1e12 * flops / SOCS[soc].peak
    assert found.kernels["sampled_softmax"].row >= 2.0 / SOCS[soc].peak
    for name in ("norm_gate", "embedding"):
        assert found.kernels[name].row >= 2 * 2 / SOCS[soc].bandwidth * 0.8, "reads and writes two bytes"


def test_a_fit_and_its_file(tmp_path):
    true = Kernel(1e-5, 2e-12, 3e-14, 0.0, 0)
    work = [(1e5, 1e7), (4e5, 1e7), (1e5, 2e9), (8e5, 3e9)]
    found = fit([(float(true(*w)), *w) for w in work])
    assert found.pair == pytest.approx(true.pair, rel=1e-6) and found.error < 1e-6 and found.points == 4
    save_calibrations(tmp_path / "c.json", [Calibration("x", "measured", "test", 64, {"op": found})])
    assert load_calibration(tmp_path / "c.json", "x").kernels["op"] == found


def test_bad_calibrations(tmp_path):
    bad = {
        "missing": (None, "No such file"),
        "text": ("{", "no calibration"),
        "other": ('{"devices": {"910B1": {}}}', "no device '910B2'"),
        "keys": ('{"devices": {"910B2": {"kernels": {"a": {"b": 1}}}}}', "no calibration"),
    }
    for name, (content, message) in bad.items():
        path = tmp_path / f"{name}.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(OptionError, match=message):
            load_calibration(path, "910B2")


def test_kernels_are_timed_here(tmp_path):
    found = measure_here(sizes=(8, 24, 40), head_dim=16, seconds=0.0)
    assert found.provenance == "measured"
    for op in ("jagged_attention", "norm_gate", "embedding", "sampled_softmax", "linear"):
        for name in (op, f"{op}_backward"):
            assert found.kernels[name].points == 3 and found.kernels[name](1e6, 1e6) > 0
    save_calibrations(tmp_path / "here.json", [found])
    assert load_calibration(tmp_path / "here.json", "910B2").device == "here"


# --- reports ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> dict:
    compute = Compute(Workload(sequences=4, longest=512), cluster_of("910B2"), load_calibration(SHIPPED, "910B2"))
    return report.run(compute, ladder(), [8, 16], 2)


def test_assumptions_say_where_they_come_from(data):
    names = {a["name"] for a in data["assumptions"]}
    assert {"inside", "across", "peak", "jitter", "jagged_attention", "popularity", "link efficiency"} <= names
    for known in data["assumptions"]:
        assert known["provenance"] in PROVENANCES and known["source"] and known["text"]
    with pytest.raises(ValueError, match="provenance 'guess'"):
        Figure(1.0, "", "guess", "")


def test_text_is_honest(data):
    text = report.text(data)
    assert "Simulated, not measured" in text and "paper-reported" in text and "no agreement is claimed" in text
    for known in data["assumptions"]:
        assert known["source"] in text and known["provenance"] in text
    row = next(line for line in text.splitlines() if line.startswith("paper-reported"))
    assert "94%" in row and "0.97" in row
    assert max(len(line) for line in text.split("part ")[0].splitlines()) < 130


def test_data_is_json(data):
    assert json.loads(json.dumps(data))["paper-reported"]["scaling"]["value"] == 0.97
    for found in data["outcomes"]:
        shares = [found[k] for k in ("utilisation", "exposed_communication", "exposed_host", "waiting")]
        assert sum(shares) == pytest.approx(1.0)


class Page(HTMLParser):
    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def test_the_page_is_one_file_and_says_the_same(data):
    text = report.page(data)
    page = Page(text)
    assert page.open == [] and page.links == [] and "http://" not in text and "https://" not in text
    assert "prefers-color-scheme: dark" in text and "Simulated, not measured" in text and "<script" not in text
    for variant in data["variants"]:
        assert text.count(variant["name"]) >= 4
    assert (
        text.count("<svg") == 4
        and "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).lower().split()
    )
    assert "paper-reported  0.97" in text and "paper-reported  94%" in text


def test_names_are_escaped(data):
    hostile = json.loads(json.dumps(data).replace("+ prefetch", "<script>x</script>"))
    assert "<script" not in report.page(hostile)
