"""One smoke test per private torch API, so that an upgrade of torch breaks here first."""

from __future__ import annotations

import functools
import logging
import os
import threading
from datetime import timedelta
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turbogr_compile import _torch
from turbogr_compile.testing import trace_graph

aten = torch.ops.aten


@pytest.fixture
def graph():
    return trace_graph(lambda x: (torch.rand_like(x) + x.relu()).sum(), "f32[a, b]").graph


def test_compile_id_outside_of_dynamo():
    assert _torch.compile_id() == "-"


def test_compile_id_inside_of_dynamo():
    seen = []

    def backend(module, inputs):
        seen.append(_torch.compile_id())
        return module.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert seen == ["0.0"]


def test_fake_mode_and_shape_env_of_a_graph(graph):
    mode = _torch.fake_mode_of(graph)
    assert isinstance(mode, _torch.FakeTensorMode) and _torch.shape_env_of(graph) is mode.shape_env


def test_guards_are_counted(graph):
    env = _torch.shape_env_of(graph)
    before = _torch.guard_count(env)
    bool(graph.find_nodes(op="placeholder")[0].meta["val"].shape[0] % 3 == 1)
    assert _torch.guard_count(env) == before + 1 and "Mod" in _torch.new_guards(env, before)[0]


def test_guards_can_be_forbidden(graph):
    env = _torch.shape_env_of(graph)
    with pytest.raises(Exception, match="guards"), _torch.trying(env):
        bool(graph.find_nodes(op="placeholder")[0].meta["val"].shape[0] % 5 == 1)


def test_unbacked_sizes_are_found():
    graph = trace_graph(lambda x: x.nonzero(), "f32[4]").graph
    (node,) = graph.find_nodes(op="call_function", target=aten.nonzero.default)
    (size,) = _torch.free_unbacked(node.meta["val"])
    assert node.meta["unbacked_bindings"] == {size: _torch.path_of_size(0)}


def test_sizes_are_made_of_operations_that_are_known():
    def arithmetic(n: Any) -> list[Any]:
        return [n * 2 + 3, n // 4, n % 3, n * n, torch.sym_max(n, 7), torch.sym_min(n, 5)]

    graph = trace_graph(lambda x: x, "f32[n]").graph
    (node,) = graph.find_nodes(op="placeholder")
    symbol = node.meta["val"].shape[0]

    def value(expression: Any) -> Any:
        if not expression.args:
            return 11 if expression == symbol.node.expr else int(expression)
        return functools.reduce(_torch.size_operator(expression), [value(a) for a in expression.args])

    assert [value(size.node.expr) for size in arithmetic(symbol)] == arithmetic(11)
    assert _torch.size_operator(1 / symbol.node.expr) is None


def test_mutation_is_read_from_the_schema():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    written = graph.call_function(aten.add_.Tensor, (x, 1))
    assert _torch.mutated_arguments(written) == [x] and not _torch.is_functional(written)
    assert _torch.is_functional(graph.call_function(aten.add.Tensor, (x, 1)))


def test_random_and_impure_ops(graph):
    (random,) = graph.find_nodes(op="call_function", target=aten.rand_like.default)
    (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
    assert _torch.is_random(random) and random.is_impure()
    assert not _torch.is_random(relu) and not relu.is_impure()


def test_ops_that_let_gradients_through(graph):
    (random,) = graph.find_nodes(op="call_function", target=aten.rand_like.default)
    (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
    (x,) = graph.find_nodes(op="placeholder")[-1:]
    assert _torch.carries_gradient(relu, x) and not _torch.carries_gradient(random, x)


def test_copy_keeps_names_metadata_and_sources(graph):
    _torch.mark_added_input(graph.find_nodes(op="placeholder")[0])
    copied = _torch.copy_graph(graph)
    assert [n.name for n in copied.nodes] == [n.name for n in graph.nodes]
    assert copied.find_nodes(op="placeholder")[0]._dynamo_source is None
    first, second = (next(n for n in g.nodes if n.op == "call_function") for g in (graph, copied))
    assert first.meta == second.meta and first is not second


def test_aot_autograd_with_each_partitioner():
    for partition in (_torch.default_partition, _torch.min_cut_partition):
        module = torch.fx.symbolic_trace(lambda x: (x.sin().sum(),))
        x = torch.randn(3, requires_grad=True)
        roles = []

        def compiler(graph, inputs, roles=roles):
            roles.append(len(inputs))
            return _torch.boxed(graph.forward)

        compiled = _torch.aot_autograd(
            module, [x], fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition, decompositions={}
        )
        compiled(x)[0].backward()
        torch.testing.assert_close(x.grad, x.detach().cos())
        assert len(roles) == 2


@pytest.mark.parametrize(
    "options", [{"target": "cpu"}, {"target": "eager"}, {"target": "cpu", "codegen": "inductor"}], ids=str
)
def test_a_backward_may_run_twice(options):
    """No kernel writes into a saved tensor: retain_graph works as it does in eager."""
    table, linear = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16)
    ids = torch.arange(28).view(4, 7)
    ids[1, 3:] = 0
    torch._dynamo.reset()

    def step(ids):
        h = torch.relu(linear(table(ids)))
        h = torch.sigmoid(linear(h)) * h
        return (h * (ids > 0)[..., None]).pow(2).sum()

    def grad():
        found, table.weight.grad = table.weight.grad, None
        return found

    loss = torch.compile(step, backend="turbogr", options=options)(ids)
    loss.backward(retain_graph=True)
    once = grad()
    loss.backward()
    torch.testing.assert_close(grad(), once)
    step(ids).backward()
    torch.testing.assert_close(grad(), once)


def test_run_plainly_takes_its_inputs_and_records_no_gradient():
    run = _torch.run_plainly(torch.fx.symbolic_trace(lambda x: (x.sin(),)))
    x = torch.randn(3, requires_grad=True)
    values = [x]
    (result,) = run(values)
    assert values == [] and not result.requires_grad and run._boxed_call
    torch.testing.assert_close(result, x.detach().sin())


@pytest.mark.slow
def test_inductor_takes_our_passes_and_key():
    seen = []

    def inner(graph, inputs, *args, **kwargs):
        seen.append(bool(kwargs.get("is_backward")))
        return _torch.compile_fx_inner(graph, inputs, *args, **kwargs)

    def backend(module, inputs):
        return _torch.inductor(module, inputs, inner, lambda joint: seen.append("joint"), "k", reuse_autograd=False)

    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    assert seen == ["joint", False, True]


def test_dynamo_flags_apply_to_a_backend_without_wrapper():
    def backend(module, inputs):
        return module.forward

    flags = _torch.DynamoFlags(capture_scalar_outputs=True)
    backend.backend_ctx_ctor = lambda: flags
    torch._dynamo.reset()
    fn = _torch.optimize(lambda x: x.sum().item() + x, backend, nopython=True)
    torch.testing.assert_close(fn(torch.ones(2)), torch.full((2,), 3.0))


def test_run_backward_leaves_grad_alone():
    w = torch.ones(2, requires_grad=True)
    ran = []
    h = w * 2
    h.register_hook(lambda g: ran.append(g))
    _torch.run_backward({"loss": h.sum(), "n": 3})
    assert w.grad is None and len(ran) == 1


@pytest.mark.skipif("TORCH_TRACE" in os.environ, reason="a trace is wanted")
def test_trace_is_off_by_default():
    """Also in tests, although pytest listens to all other loggers: recorded graphs are compiled in another way."""
    assert not _torch.trace_enabled()
    _torch.trace_artifact("nothing", "string", "")


def test_whoever_listens_to_the_trace_gets_one():
    listener = logging.NullHandler()
    torch._logging._internal.trace_log.addHandler(listener)
    try:
        assert _torch.trace_enabled()
    finally:
        torch._logging._internal.trace_log.removeHandler(listener)


def test_pytest_listens_without_asking_for_a_trace():
    listener = type("Capture", (logging.NullHandler,), {"__module__": "_pytest.logging"})()
    logger = torch._logging._internal.trace_log
    logging.Logger.addHandler(logger, listener)  # not by the one that tests keep pytest away with
    try:
        assert listener in logger.handlers and not _torch.trace_enabled()
    finally:
        logger.removeHandler(listener)


def test_contexts_beside_a_compilation():
    with torch.autocast("cpu", torch.bfloat16), _torch.without_autocast(), _torch.outside_compilation():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_named_symbols_are_backed():
    env = _torch.ShapeEnv()
    size = _torch.named_symbol(env, "b", 12)
    assert size.node.hint == 12 and env.backed_var_to_val[size.node.expr] == 12


def test_fake_twins():
    (fake, number) = _torch.fake_inputs([torch.ones(2, 3), 4])
    assert isinstance(fake, _torch.FakeTensor) and fake.shape == (2, 3) and number == 4


def test_erased_nodes_are_known():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    assert not _torch.is_erased(node)
    graph.erase_node(node)
    assert _torch.is_erased(node)


def test_cpp_compiler_is_looked_up():
    assert isinstance(_torch.cpp_compiler(), str)


def test_row_counts_are_known_at_run_time_only(graph):
    count = _torch.new_row_count(_torch.fake_mode_of(graph), 12)
    assert _torch.statically_known_true(count >= 1) and _torch.statically_known_true(count <= 12)
    assert not _torch.guard_or_false(count == 3) and _torch.guard_or_false(3 == 3)
    assert not count.node.has_hint()


def test_real_inputs_behind_dynamo_placeholders():
    seen = []

    def backend(module, inputs):
        seen.append(_torch.real_inputs(module))
        return module.forward

    torch._dynamo.reset()
    x = torch.arange(3)
    torch.compile(lambda x: x + 1, backend=backend)(x)
    assert len(seen[0]) == 1 and torch.equal(seen[0][0], x)


def test_transformer_layers_are_one_graph():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    _torch.trace_transformer_layers()
    flags = _torch.DynamoFlags(ignore_logging_functions=_torch.quiet_functions())
    backend.backend_ctx_ctor = lambda: flags
    layer = torch.nn.TransformerEncoderLayer(4, 1, 4, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x, pads = torch.randn(2, 3, 4), torch.tensor([[False, False, True]] * 2)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
    run = _torch.optimize(lambda x: encoder(x, mask, src_key_padding_mask=pads), backend)
    torch.testing.assert_close(run(x), encoder(x, mask, src_key_padding_mask=pads))
    assert len(graphs) == 1


def test_a_line_of_a_log_does_not_cut_a_graph(monkeypatch):
    """Methods that a library adds to loggers included; what is asked of a logger is answered."""
    log, graphs = logging.getLogger("turbogr.test"), []
    monkeypatch.setattr(logging.Logger, "warning_once", lru_cache(logging.Logger.warning), raising=False)

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    def told(x):
        log.info("one of %s", 2)
        log.warning_once("twice")
        return x + 1

    def asked(x):
        return x + 1 if log.isEnabledFor(logging.ERROR) else x - 1

    flags = _torch.DynamoFlags(ignore_logging_functions=_torch.quiet_functions())
    backend.backend_ctx_ctor = lambda: flags
    for step in (told, asked):
        torch._dynamo.reset()
        torch.testing.assert_close(_torch.optimize(step, backend)(torch.ones(2)), torch.full((2,), 2.0))
    assert len(graphs) == 2


def test_dispatch_modes_see_ops():
    seen = []

    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    assert aten.add.Tensor in seen


# --- what the targets that end in GE use ---------------------------------------------------------------


def test_decompositions_of_an_op_are_those_of_its_overloads():
    table = _torch.decompositions(aten.softplus)
    assert aten.softplus.default in table


def test_a_graph_is_described_anew_in_symbols_of_another_mode(graph):
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    mode = _torch.new_fake_mode()
    size = _torch.named_symbol(mode.shape_env, "rows", 1021)
    doubled = _torch.symbolic_int(mode.shape_env, 2 * size.node.expr)
    assert doubled.node.hint == 2042
    with mode:
        given = torch.empty(size, doubled)
    with _torch.tracing_with(mode):
        assert _torch.detect_fake_mode() is mode
        _torch.propagate(module, mode, [given])
    relu = next(n for n in graph.nodes if "relu" in str(n.target))
    assert relu.meta["val"].shape[1].node.expr == 2 * size.node.expr


def test_parts_of_a_graph_are_compiled_apart():
    def f(x):
        return ((x + 1).relu().cos() * 2).sin()

    module = torch.fx.GraphModule(torch.nn.Module(), trace_graph(f, "f32[3]").graph)
    seen = []

    def compile_part(part):
        seen.append([str(n.target) for n in part.graph.nodes if n.op == "call_function"])
        return part

    whole = _torch.compile_parts(module, lambda node: "cos" not in str(node.target), compile_part)
    assert len(seen) == 2 and not any("cos" in op for part in seen for op in part)
    x = torch.randn(3)
    torch.testing.assert_close(whole(x)[0] if isinstance(whole(x), (tuple, list)) else whole(x), f(x))


def test_memory_and_strides_of_fake_tensors():
    (x,) = _torch.fake_inputs([torch.ones(2, 3)])
    assert _torch.is_alias(x, x.t()) and not _torch.is_alias(x, x.clone())
    assert _torch.surely_contiguous(x) and not _torch.surely_contiguous(x.t())


def test_a_process_group_is_found_by_its_name(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert _torch.process_group(dist.group.WORLD.group_name) is _torch.process_group(dist.group.WORLD)
        assert _torch.group_tag(dist.group.WORLD.group_name) == _torch.group_tag(dist.group.WORLD) != ""
        assert _torch.group_of(_torch.group_tag(dist.group.WORLD), [0]) is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_group_in_python_is_found_by_its_name(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = dist.ProcessGroup(0, 1)
        store = dist.PrefixStore("mine", _torch.default_store())
        _torch.name_group(group, dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10)), "mine")
        assert group.group_name == "mine"
        store.set("word", "given")
        assert _torch.default_store().get("mine/word") == b"given"
        short = dist.new_group([0], timeout=timedelta(seconds=7))
        assert _torch.group_timeout(short) == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_something_around_what_inductor_compiled():
    compiled = SimpleNamespace(current_callable=lambda values: sum(values))
    _torch.call_through(compiled, lambda run: lambda values: 2 * run(values))
    assert compiled.current_callable([1, 2]) == 6
    from torch._inductor.output_code import CompiledFxGraph

    assert "current_callable" in CompiledFxGraph.__dataclass_fields__


def test_writes_to_a_tensor_are_counted():
    x = torch.zeros(2)
    before = _torch.version_of(x)
    x[0] = 1
    assert _torch.version_of(x) == before + 1
    with torch.inference_mode():
        assert _torch.version_of(torch.zeros(2)) is None


# --- tensors without data ----------------------------------------------------------------------------------


class Described(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_wrappers_describe_memory_they_do_not_have():
    with _torch.below_torch_function():
        x = _torch.wrapper(Described, (2, 3), (1, 2), torch.float64, torch.device("cpu"))
        assert type(x) is Described and x.shape == (2, 3) and x.stride() == (1, 2) and x.dtype is torch.float64


def test_lazy_twins_keep_the_old_value():
    x = torch.arange(4.0)
    twin = _torch.lazy_twin(x)
    assert twin is not None and _torch.address_of(x) == _torch.address_of(twin)
    x.data.add_(1)
    assert twin.tolist() == [0, 1, 2, 3] and _torch.address_of(x) != _torch.address_of(twin)


def test_foreign_memory_has_no_lazy_twin():
    numpy = pytest.importorskip("numpy")
    assert _torch.lazy_twin(torch.from_numpy(numpy.zeros(3))) is None
    assert _torch.lazy_twin(torch.zeros(3).share_memory_()) is None


def test_hooks_on_saved_tensors_are_seen():
    assert not _torch.saved_tensors_are_hooked()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert _torch.saved_tensors_are_hooked()


def test_transforms_are_seen():
    seen = []
    torch.vmap(lambda x: seen.append(_torch.transforms_active()) or x)(torch.ones(2))
    assert seen == [True] and not _torch.transforms_active()


def test_dispatch_modes_are_seen_and_can_be_left():
    ops = []
    with _torch.watching_ops(lambda op, args, kwargs: ops.append(op)):
        assert len(_torch.dispatch_modes()) == 1
        torch.ones(1) + 1
        with _torch.without_modes():
            torch.ones(1) * 2
    assert aten.add.Tensor in ops and aten.mul.Tensor not in ops and not _torch.dispatch_modes()


def test_the_lock_of_compilations_is_held_while_one_is_under_way():
    taken = []

    def backend(module, inputs):
        other = threading.Thread(target=lambda: taken.append(_torch.compile_lock.acquire(blocking=False)))
        other.start()
        other.join()
        return module.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert taken == [False] and _torch.compile_lock.acquire(blocking=False)
    _torch.compile_lock.release()


@pytest.mark.parametrize("grad", [True, False])
def test_a_gradient_edge_keeps_its_graph(grad):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    y = Twice.apply(x)
    with torch.set_grad_enabled(grad):
        edge = _torch.gradient_edge(y)
    del y
    assert torch.autograd.grad([edge], x, [torch.ones(2)])[0].tolist() == [2, 2]


def test_a_number_without_data_has_no_value():
    mode = _torch.new_fake_mode()
    _torch.fake_of_sizes(mode, torch.tensor(2.0, dtype=torch.float64), set(), "x")
    assert mode.shape_env is not None and not mode.shape_env.backed_var_to_val


def test_assumptions_about_sizes_can_be_asked():
    mode = _torch.new_fake_mode()
    fake = _torch.fake_of_sizes(mode, torch.ones(4, 3), {0}, "x")
    assert isinstance(fake.shape[0], torch.SymInt) and fake.shape[1] == 3
    bool(fake.shape[0] > 3)
    holds = _torch.checks_of(mode.shape_env, [fake])
    assert holds([torch.ones(7, 3)]) and not holds([torch.ones(2, 3)]) and not holds([torch.ones(7, 2)])


def test_assumptions_about_sizes_can_be_read():
    mode = _torch.new_fake_mode()
    fake = _torch.fake_of_sizes(mode, torch.ones(4, 3), {0}, "x")
    size = fake.shape[0]
    bool(size * 3 > 9)
    symbol = size.node.expr
    (condition,) = [text for text in _torch.assumptions(mode.shape_env, {symbol}) if "*" in text]
    assert eval(condition, {str(symbol): 4}) and not eval(condition, {str(symbol): 3})
    assert _torch.assumptions(mode.shape_env, set()) == _torch.assumptions(None, {symbol}) == []
    assert _torch.least_of(mode.shape_env, symbol) >= 2 and _torch.least_of(None, symbol) == 0
    assert eval(_torch.python_of((size // 2).node.expr), {str(symbol): 5}) == 2


def test_tensors_are_recognised_at_once():
    def likeness(*tensors):
        return _torch.alike(tensors, [[None, 3], [2]])

    x, y = torch.ones(4, 3), torch.ones(2, dtype=torch.int64)
    alike = likeness(x, y)
    assert alike(x, y) and alike(torch.ones(7, 3), y) and alike(torch.ones(3, 7).T, y)
    for other in (torch.ones(4, 2), torch.ones(4), torch.ones(4, 3).double(), torch.ones(4, 3, device="meta"),
                  torch.nn.Parameter(x), torch.complex(x, x).conj().imag, x.to_sparse()):  # fmt: skip
        assert not alike(other, y)
    assert not alike(x, torch.ones(3, dtype=torch.int64)) and not alike(x, y.int())


def test_plain_tensors_go_to_their_kernels_as_they_are():
    x = torch.ones(4, 3)
    with torch.inference_mode():
        assert _torch.is_plain(x) and _torch.is_plain(torch.ones(2))
        inference = torch.ones(2)
    assert _torch.is_plain(x) and _torch.is_plain(torch.nn.Parameter(x)) and _torch.is_plain(inference)
    for other in (None, 3, x.to_sparse(), x.to("meta"), torch.complex(x, x).conj().imag, torch._efficientzerotensor(3)):
        assert not _torch.is_plain(other)
    assert not _torch.is_plain(_torch.fake_inputs([x])[0])


def test_watchers_of_ops_are_seen():
    assert not _torch.is_watched()
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert _torch.is_watched()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.is_watched()
    assert not _torch.is_watched()


def test_autograd_functions_and_reasons_of_graph_breaks_are_in_dynamos_graph():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def step(x):
        y = Twice.apply(x)
        torch._dynamo.graph_break()
        return y + 1

    seen = []

    def backend(gm, inputs):
        found = gm.graph.find_nodes(op="call_function", target=_torch.autograd_function_apply)
        seen.append((len(found), _torch.break_reason(gm)))
        return gm

    torch._dynamo.reset()
    torch.compile(step, backend=backend)(torch.ones(2, requires_grad=True))
    (calls, (reason, stack)), (_, none) = seen
    assert calls == 1 and "graph_break()" in reason and stack[-1].name == "step" and none is None


def test_sizes_that_change_open_and_then_all():
    def backend(gm, inputs):
        values = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        shapes.append([[str(s) for s in x.shape] for x in values if isinstance(x, torch.Tensor)])
        return gm

    shapes: list = []
    torch._dynamo.reset()
    run = _torch.optimize(lambda x: x * 2, backend)
    for size in ((2, 2), (2, 3), (4, 4), (5, 6)):
        run(torch.ones(size))
    (first,), (second,), (third,) = shapes
    assert first == ["2", "2"] and second[0] == "2" and not second[1].isdigit()
    assert not any(s.isdigit() for s in third) and len(set(third)) == 2  # equal sizes are no law


def test_signals_to_dynamo_are_no_errors():
    for signal in (torch._dynamo.exc.TensorifyScalarRestartAnalysis, torch._dynamo.exc.SkipFrame):
        assert issubclass(signal, _torch.SIGNALS)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_arguments_of_functions_and_roots_of_backwards_can_be_replaced(monkeypatch):
    from torch._functorch import utils
    from torch.nn.parallel import distributed

    monkeypatch.setattr(utils, "unwrap_dead_wrappers", utils.unwrap_dead_wrappers)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(distributed, "_DDPSink", distributed._DDPSink)
    x, other = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    asked = []
    _torch.teach_autograd.__wrapped__(
        torch.Tensor, lambda a: other if a is x else a, lambda of: asked.append(of) or [other]
    )
    assert Doubled.apply(x).tolist() == [6, 6] and _torch.apply_as_it_is(Doubled, x).tolist() == [2, 2]
    torch.autograd.backward([x], [torch.ones(2)])
    assert x.grad is None and other.grad.tolist() == [1, 1] and not asked
    torch.autograd.backward([x], [torch.ones(2)], inputs=[x])
    assert x.grad is None and other.grad.tolist() == [2, 2] and asked == [[x]]


def test_outputs_of_ddp_with_unused_parameters_are_copied_where_they_are_of_a_kind(monkeypatch):
    from torch.nn.parallel import distributed

    class Kind(torch.Tensor):
        pass

    monkeypatch.setattr(distributed, "_DDPSink", distributed._DDPSink)
    _torch.deferral._teach_ddp(Kind)
    ddp = SimpleNamespace(static_graph=False, _ddp_sink_clone=True)
    plain, ours = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True).as_subclass(Kind)
    (out,) = distributed._DDPSink.apply(lambda: ddp, plain)
    assert "Sink" in type(out.grad_fn).__name__
    copied, number = distributed._DDPSink.apply(lambda: ddp, ours, 3)
    assert "Sink" not in type(copied.grad_fn).__name__ and number == 3
    assert torch.equal(copied, ours) and copied.data_ptr() != ours.data_ptr()


def test_autograd_can_be_reached_from_below():
    class Looks(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            inside = torch.ones(1, requires_grad=True)
            with _torch.above_autograd():
                assert (inside * 2).requires_grad
            return torch.zeros(1)

    with _torch.below_torch_function():
        x = _torch.wrapper(Looks, (1,), (1,), torch.float32, torch.device("cpu")).requires_grad_()
        assert (x * 1).requires_grad


def test_hooks_of_modules_and_tensors_are_seen():
    def nothing(*_):
        pass

    of_module = (
        "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_pre_hook",
        "state_dict_post_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook",
    )  # fmt: skip
    for kind in of_module:
        module = torch.nn.Linear(1, 1)
        assert not _torch.has_hooks(module)
        getattr(module, f"register_{kind}")(nothing)
        assert _torch.has_hooks(module), kind
    for kind in ("hook", "post_accumulate_grad_hook"):
        weight = torch.nn.Linear(1, 1).weight
        assert not _torch.has_hooks(weight)
        getattr(weight, f"register_{kind}")(nothing)
        assert _torch.has_hooks(weight), kind
