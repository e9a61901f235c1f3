"""label-streams, and what the GE targets make of its labels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from turbogr_compile import _torch
from turbogr_compile.functional import trace_with_lines
from turbogr_compile.graphs import is_collective, is_wait
from turbogr_compile.instrument import GraphRun
from turbogr_compile.manager import Manager
from turbogr_compile.options import Options
from turbogr_compile.pass_base import Phase, Role, Vocabulary
from turbogr_compile.streams import COMMUNICATION, put_on, stream_of
from turbogr_compile.text import graph_text
from turbogr_compile.verify import Verifier

X, W = torch.randn(4, 3), torch.randn(3, 3)


@pytest.fixture(autouse=True, scope="module")
def group(tmp_path_factory):
    """One process is a group too."""
    meeting_point = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def add_up(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def run(fn, *inputs: Tensor, pipeline: str = "label-streams", phase: Phase = Phase.POST_GRAD) -> GraphRun:
    options = Options.read({"pipeline": pipeline, "on_error": "raise", "verify": "strict", "target": "eager"})
    module = trace_with_lines(fn, _torch.fake_inputs(inputs), phase, {})
    words = Vocabulary(phase)
    role = Role.CAPTURED if phase is Phase.PRE_GRAD else Role.FORWARD
    made = GraphRun("test", role, phase, "eager", options.plan(), options, module, words, inputs)
    Manager(made, [Verifier("strict")]).run_all()
    for wanted, found in zip(flat(fn(*inputs)), flat(module(*inputs)), strict=True):
        torch.testing.assert_close(found, wanted)
    return made


def flat(value) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def names(made: GraphRun) -> list[str]:
    return [n.target.overloadpacket.__name__ for n in made.graph.nodes if n.op == "call_function"]


def test_a_collective_gets_a_label_and_is_waited_for_where_it_is_read():
    made = run(lambda x, w: add_up(x) + (x @ w).relu(), X, W)
    assert names(made) == ["all_reduce", "mm", "relu", "wait_tensor", "add"]
    assert [n.name for n in made.graph.nodes if stream_of(n) == COMMUNICATION] == ["all_reduce"]
    assert made.steps[0].status == "changed"


def test_the_label_is_in_the_dump():
    lines = graph_text(run(lambda x: add_up(x) + 1, X).graph).splitlines()
    assert any(line.endswith("[stream=communication]") and "all_reduce" in line for line in lines), lines


def test_a_label_alone_is_a_change():
    made = run(lambda x: add_up(x), X)
    assert names(made) == ["all_reduce", "wait_tensor"] and made.steps[0].status == "changed"


def test_collectives_keep_their_order():
    def fn(x, w):
        first, second = add_up(x), add_up(x @ w)
        return second + 1, first * 2

    made = run(fn, X, W)
    assert names(made) == ["all_reduce", "mm", "all_reduce", "wait_tensor", "add", "wait_tensor", "mul"]


def test_waits_for_one_reader_stand_together():
    assert names(run(lambda x: add_up(x) + add_up(x * 2), X))[-3:] == ["wait_tensor", "wait_tensor", "add"]


def test_what_nobody_reads_stays():
    def fn(x):
        add_up(x)
        return x + 1

    assert names(run(fn, X)) == ["all_reduce", "wait_tensor", "add"]


def test_no_collective_no_change():
    assert run(lambda x: x + 1, X).steps[0].status == "unchanged"


def test_twice_is_once():
    made = run(lambda x, w: add_up(x) + x @ w, X, W, pipeline="repeat(label-streams)")
    assert [step.status for step in made.steps] == ["changed", "unchanged"]


def test_a_stream_has_a_known_name():
    node = torch.fx.Graph().placeholder("x")
    with pytest.raises(ValueError, match="no stream is named 'comms'; there are: communication, host"):
        put_on(node, "comms")


# --- the passes before ---------------------------------------------------------------------------------

CLEANUP = "remove-noops, fold-views, eliminate-common, eliminate-dead-code"


def test_equal_collectives_are_not_merged():
    made = run(lambda x: add_up(x * 1) + add_up(x * 1), X, pipeline=CLEANUP, phase=Phase.PRE_GRAD)
    assert sum(is_collective(n) for n in made.graph.nodes) == sum(is_wait(n) for n in made.graph.nodes) == 2


def test_a_collective_whose_result_is_not_read_stays():
    def fn(x):
        add_up(x)
        return x + 1

    made = run(fn, X, pipeline=CLEANUP, phase=Phase.PRE_GRAD)
    assert [is_collective(n) or is_wait(n) for n in made.graph.nodes if n.op == "call_function"] == [True, True, False]
