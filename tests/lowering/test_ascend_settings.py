"""`target_options` of the targets that end in GE: checked at once, handed to torchair, never silently dropped."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

import turbogr_compile
from turbogr_compile import commands as cli
from turbogr_compile.errors import OptionError
from turbogr_compile.graph.streams import put_on
from turbogr_compile.lowering.torchair import load as torchair
from turbogr_compile.lowering.torchair import native
from turbogr_compile.lowering.torchair.settings import REFUSED, Settings
from turbogr_compile.pipeline.cache_key import cache_key
from turbogr_compile.pipeline.options import Options

from .simulator import needs_torchair

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "ascend.md"


def options(target: str = "ascend-sim", **target_options: object) -> Options:
    return Options.read({"target": target, "target_options": target_options}, {})


# --- what is taken and what is not -------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "eager"])
def test_other_targets_have_none(target: str):
    assert options(target).target_options == {}
    with pytest.raises(OptionError, match=f"target '{target}' has no target_options, and got 'oo_level'"):
        options(target, oo_level="O1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"oo_levl": "O1"},
            "'ascend-sim' has no target_options 'oo_levl' .did you mean 'oo_level'.*it has: mode, graph",
        ),
        ({"oo_level": "O2"}, "'oo_level' takes 'O1', 'O3'; got 'O2'"),
        ({"graph_dump": "pbtx"}, "'graph_dump' takes 'txt', 'pbtxt', 'py'; got 'pbtx' .did you mean 'pbtxt'"),
        ({"enable_single_stream": "yes"}, "'enable_single_stream' takes True or False; got 'yes'"),
        ({"static_model_ops_lower_limit": True}, "takes a whole number; got True"),
        ({"aicore_num": 24}, "'aicore_num' takes a text; got 24"),
        ({"mode": ["max-autotune"]}, "'mode' takes 'max-autotune'"),
        ({"graph_dump_path": "somewhere"}, "'graph_dump_path' needs 'graph_dump': txt, pbtxt or py"),
        ({"data_dump_mode": "all"}, "needs 'data_dump'"),
        ({"data_dump": "."}, "target 'ascend-sim' has none: verify='shadow'"),
        ({"fusion_switch_file": "not/there.cfg"}, "there is no file not/there.cfg"),
        ({"oo_level": "O1", "topology_sorting_strategy": "BFS"}, "with oo_level 'O1' GE sorts by StableRDFS"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_answered_with_the_culprit(given: dict[str, object], message: str):
    with pytest.raises(OptionError, match=message):
        options(**given)


@pytest.mark.parametrize("given", [3, "oo_level=O1", ["oo_level"]], ids=str)
@pytest.mark.parametrize("target", ["cpu", "ascend"])
def test_options_are_a_mapping(target: str, given: object):
    with pytest.raises(OptionError, match="'target_options' takes a mapping"):
        Options.read({"target": target, "target_options": given}, {})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mode": "npugraph_ex"}, "captures no backward.*max-autotune"),
        ({"mode": "reduce-overhead"}, "no backward.*max-autotune"),
        ({"static_kernel": True}, "npugraph_ex.*no such switch"),
        ({"cache_dir": "x"}, "inference only: no backward"),
        ({"dynamic_gears": {0: [1, 2]}}, "gears are for inference.*'capacity'"),
        ({"frozen_parameter": True}, "training changes them"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_torchair_cannot_do_in_training_is_refused_with_the_reason(given: dict[str, object], reason: str):
    with pytest.raises(OptionError, match=f"target_options '{next(iter(given))}'.*{reason}"):
        options(**given)


def test_a_data_dump_is_the_devices(tmp_path: Path):
    assert options("ascend", data_dump=tmp_path).target_options == {"data_dump": str(tmp_path)}
    with pytest.raises(OptionError, match="takes an existing folder"):
        options("ascend", data_dump=tmp_path / "none")


def test_every_setting_is_documented():
    text = DOCUMENT.read_text(encoding="utf-8")
    missing = [f.name for f in dataclasses.fields(Settings) if f"`{f.name}`" not in text]
    assert not missing
    assert not set(REFUSED) & {f.name for f in dataclasses.fields(Settings)}


# --- where settings show -----------------------------------------------------------------------------


def test_settings_are_part_of_the_cache_key():
    assert cache_key(options(oo_level="O1")) != cache_key(options())
    assert cache_key(options(oo_level=None)) == cache_key(options())


def test_the_command_line_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "f.py").write_text("def f(x):\n    return x * 2\n")
    command = ["run", f"{tmp_path}/f.py:f", "--inputs", "f32[2]", "--target", "ascend-sim"]
    for given, says in (("oo_levl=O1", "did you mean 'oo_level'"), ("oo_level", "--target-option takes NAME=VALUE"),
                        ("enable_single_stream=3", "takes True or False; got 3")):  # fmt: skip
        assert cli.main([*command, "--target-option", given]) == cli.WRONG_USE
        assert says in capsys.readouterr().err


# --- what torchair gets ------------------------------------------------------------------------------


EVERY = {
    "topology_sorting_strategy": "RDFS", "memory_efficiency": True, "tiling_schedule_optimize": True,
    "static_model_ops_lower_limit": 7, "multistream_parallel_mode": "cv", "deadlock_check": True,
    "pattern_fusion_pass": False, "cc_parallel_enable": True, "enable_single_stream": True, "aicore_num": "24|48",
    "oo_level": "O3", "oo_constant_folding": False, "oo_dead_code_elimination": True, "optimization_switch": "a:on",
    "export_compile_stat": "1",
}  # fmt: skip
LOCAL = {
    "ge.topoSortingMode": "2", "ge.featureBaseRefreshable": "1", "ge.tiling_schedule_optimize": "1",
    "ge.exec.static_model_ops_lower_limit": "7", "ge.autoMultistreamParallelMode": "cv", "deadlock_check": "1",
    "pattern_fusion_pass": "0", "remove_noop_ops": "0", "mode": "max-autotune",
}  # fmt: skip
PROCESS = {
    "ge.exec.enableEngineParallel": "1", "ge.enableSingleStream": "true", "ge.aicoreNum": "24|48", "ge.oo.level": "O3",
    "ge.oo.constantFolding": "false", "ge.oo.deadCodeElimination": "true", "ge.optimizationSwitch": "a:on",
    "ge.exportCompileStat": "1",
}  # fmt: skip


@pytest.fixture
def not_started(monkeypatch: pytest.MonkeyPatch):
    """As in a process that has not started GE; what this test starts is forgotten after it."""
    torchair.simulated()
    from torchair.core import _backend

    monkeypatch.setattr(_backend, "_GLOBAL_COMPILE_OPTION", None)
    return _backend


@needs_torchair
def test_each_setting_reaches_ge(not_started, tmp_path: Path):
    config = Settings.read(EVERY).config(torchair.simulated())
    local, process = config.as_dict()
    assert {k: local.get(k) for k in LOCAL} == LOCAL
    assert {k: process.get(k) for k in PROCESS} == PROCESS
    switch = tmp_path / "fusion.cfg"
    switch.touch()
    more = Settings.read({"data_dump": str(tmp_path), "data_dump_mode": "output", "fusion_switch_file": switch})
    process = more.config(torchair.simulated()).as_dict()[1]
    assert process["ge.exec.enableDump"] == "1" and process["ge.exec.dumpPath"].startswith(str(tmp_path))
    assert process["ge.exec.dumpMode"] == "output" and process["ge.fusionSwitchFile"] == str(switch)
    tested = {*EVERY, "data_dump", "data_dump_mode", "fusion_switch_file", "mode", "graph_dump", "graph_dump_path"}
    assert tested | {"deterministic", "enable_view_optimize"} == {f.name for f in dataclasses.fields(Settings)}


@needs_torchair
def test_process_wide_settings_must_not_change(not_started):
    module = torchair.simulated()
    first = Settings.read({"oo_level": "O1"}).config(module)
    not_started._GLOBAL_COMPILE_OPTION = first.as_dict()[1]
    Settings.read({"oo_level": "O1", "memory_efficiency": True}).config(module)  # this one is the graph's own
    with pytest.raises(OptionError, match=r"'oo_level' would make GE's option ge.oo.level 'O3', and an earlier .*'O1'"):
        Settings.read({}).config(module)
    with pytest.raises(OptionError, match=r"'aicore_num'.*did not set it[^\0]*target='cpu'"):
        Settings.read({"oo_level": "O1", "aicore_num": "24|48"}).config(module)


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).square().mean()


@needs_torchair
def test_settings_through_torch_compile(not_started, tmp_path: Path):
    torch._dynamo.reset()
    given = {"deterministic": True, "graph_dump": "txt", "graph_dump_path": tmp_path / "ge", "oo_level": "O1"}
    run = torch.compile(step, backend="turbogr", options={"target": "ascend-sim", "target_options": given})
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    with native.watching() as graphs:
        run(x, w).backward()
    assert [g.options["ge.deterministic"] for g in graphs] == ["1", "1"], "forward and backward"
    assert not_started._GLOBAL_COMPILE_OPTION["ge.oo.level"] == "O1"
    assert not torch.are_deterministic_algorithms_enabled(), "only while a graph is loaded"
    names = sorted(name.partition("_rank")[0] for name in os.listdir(tmp_path / "ge"))
    assert len(names) == 4 and sum(n.startswith("dynamo_original_graph") for n in names) == 2, names
    torch._dynamo.reset()
    other = turbogr_compile.compile(step, target="ascend-sim", target_options={"oo_level": "O3"})
    with pytest.raises(Exception, match="GE starts once in a process"):
        other(x, w)


@needs_torchair
def test_one_stream_does_not_go_with_several(not_started):
    @dataclasses.dataclass(frozen=True)
    class Label(turbogr_compile.Pass):
        """Put every op on a stream."""

        name = "label-everything"
        phase = turbogr_compile.Phase.POST_GRAD

        def run(self, graph, ctx):
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
                put_on(node, "host")

    torch._dynamo.reset()
    chosen = {"target": "ascend-sim", "passes": [Label()], "target_options": {"enable_single_stream": True}}
    with pytest.raises(Exception, match="does not go with nodes on streams of their own\n  try: without='overlap'"):
        turbogr_compile.compile(lambda x: x * 2, **chosen)(torch.ones(3))


@needs_torchair
def test_view_optimisation_can_be_left_out(not_started):
    """Its fault shows where the pass against it is left out; without the optimisation there is none."""
    from .test_ascend_sim import gate

    x, weight = torch.randn(2, 6, 8), torch.randn(8, 32)
    torch._dynamo.reset()
    chosen = {"target": "ascend-sim", "without": "keep-transposes", "target_options": {"enable_view_optimize": False}}
    run = turbogr_compile.compile(gate, **chosen)
    torch.testing.assert_close(run(x, weight), gate(x, weight))
