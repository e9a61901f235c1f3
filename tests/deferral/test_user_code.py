"""Ways to use the output of a compiled model, each as with the eager model: values, gradients, errors."""

from __future__ import annotations

import contextlib
import copy
import io
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from turbogr_compile import _torch
from turbogr_compile.deferral import model
from turbogr_compile.deferral import step as step_of_deferral
from turbogr_compile.deferral import tensor as tensor_of_deferral
from turbogr_compile.deferral.record import WAITING
from turbogr_compile.deferral.tensor import Deferred, pending
from turbogr_compile.errors import TurbogrError

from . import programs
from .programs import IDS, MASK, Broken, SASRec, Tower, Twice, Y, assert_same, compiled, cross_entropy, fresh, made


def sgd(model, rate=0.5):
    return torch.optim.SGD(model.parameters(), lr=rate)


# --- losses and backwards -------------------------------------------------------------------------------


def one_loss(model, called):
    loss = cross_entropy(called(IDS))
    loss.backward()
    return loss.item()


def accumulation(model, called):
    seen = []
    for _ in range(3):
        loss = cross_entropy(called(IDS)) / 3
        loss.backward()
        seen.append(loss.item())
    return seen


def one_backward_for_several_calls(model, called):
    total = 0
    for i in range(3):
        total = total + cross_entropy(called(IDS.roll(i, 0)), Y.roll(i, 0))
    total.backward()
    return total.item()


def two_losses_retained(model, called):
    logits = called(IDS)
    first, second = cross_entropy(logits), (logits * MASK[..., None]).square().mean()
    first.backward(retain_graph=True)
    second.backward()
    return first.item(), second.item()


def second_loss_after_backward(model, called):
    logits = called(IDS)
    first = cross_entropy(logits)
    first.backward(retain_graph=True)
    second = (logits * MASK[..., None]).square().mean()
    second.backward()
    return first.item(), second.item()


def autograd_grad(model, called):
    return torch.autograd.grad(cross_entropy(called(IDS)), list(model.parameters()))


def autograd_backward(model, called):
    logits = called(IDS)
    torch.autograd.backward([cross_entropy(logits), logits.mean()])
    return 0


def autograd_backward_with_gradient(model, called):
    logits = called(IDS)
    torch.autograd.backward([logits], [torch.ones_like(logits)])
    return logits


def gradient_of_logits(model, called):
    logits = called(IDS)
    return torch.autograd.grad(cross_entropy(logits), logits)


def gradient_of_a_view_of_logits(model, called):
    logits = called(IDS)
    rows = logits.view(-1, logits.size(-1))
    loss = cross_entropy(rows)
    return torch.autograd.grad(loss, rows)


def gradient_of_logits_and_of_what_follows(model, called):
    logits = called(IDS)
    twice = logits * 2
    loss = cross_entropy(logits) + cross_entropy(twice)
    return torch.autograd.grad(loss, [twice, logits])


def gradient_of_one_of_two_calls(model, called):
    first, second = called(IDS), called(IDS.flip(0))
    other = second.mean()
    return torch.autograd.grad(cross_entropy(first) + other, first), other


def backward_into_logits_alone(model, called):
    first, second = called(IDS), called(IDS.flip(0))
    loss, other = cross_entropy(first), second.square().mean()
    loss.backward(inputs=[first], retain_graph=True)
    torch.autograd.backward(other, inputs=[second, model.head.bias])
    return first.grad, second.grad


def retain_grad_after_recording(model, called):
    logits = called(IDS)
    scaled = logits / 2
    loss = cross_entropy(scaled)
    scaled.retain_grad()
    logits.retain_grad()
    loss.backward()
    return logits.grad, scaled.grad


def hook_after_a_metric_was_read(model, called):
    seen, logits = [], called(IDS)
    seen.append((logits.argmax(-1) == Y).sum().item())
    logits.register_hook(lambda g: seen.append(g.clone()))
    cross_entropy(logits).backward()
    return seen


def view_written_under_no_grad(model, called):
    logits = called(IDS)
    with torch.no_grad():
        logits[:, 1:].mul_(2)
    return cross_entropy(logits)


def checkpointed_after_the_model(model, called):
    logits = called(IDS)
    rows = torch.utils.checkpoint.checkpoint(lambda x: x.tanh() * logits, logits, use_reentrant=False)
    again = torch.utils.checkpoint.checkpoint(called, IDS.flip(0), use_reentrant=False)
    return cross_entropy(rows).backward(), cross_entropy(again).backward()


def two_losses_of_other_parameters(model, called):
    logits, other = called(IDS), torch.nn.Parameter(torch.ones(3))
    first, second = cross_entropy(logits), logits.mean() + other.square().sum()
    first.backward(retain_graph=True)
    assert other.grad is None
    second.backward()
    return other.grad


def mapped_output(model, called):
    logits = called(IDS)
    return torch.func.vmap(lambda rows: rows.softmax(-1))(logits), cross_entropy(logits)


def derivative_along_an_output(model, called):
    logits = called(IDS).detach()
    return torch.func.jvp(torch.tanh, (logits,), (torch.ones_like(logits),))


def gradient_by_a_transform(model, called):
    prefix = "_orig_mod." if called is not model else ""
    parameters = {prefix + name: p for name, p in model.named_parameters()}

    def loss(given):
        return cross_entropy(torch.func.functional_call(called, given, (IDS,)))

    found = list(torch.func.grad(loss)(parameters).values())
    torch._dynamo.reset()  # it would go on with what it made of the model inside of a transform
    return found


def hook_before_loss(model, called):
    seen, logits = [], called(IDS)
    logits.register_hook(lambda g: seen.append(g.clone()))
    cross_entropy(logits).backward()
    return seen


def hook_after_recording(model, called):
    seen, logits = [], called(IDS)
    loss = cross_entropy(logits)
    logits.register_hook(lambda g: seen.append(g.clone()))
    loss.backward()
    return seen


def hook_that_changes(model, called):
    logits = called(IDS)
    logits.register_hook(lambda g: 2 * g)
    cross_entropy(logits).backward()
    return 0


def hook_on_loss(model, called):
    seen, loss = [], cross_entropy(called(IDS))
    loss.register_hook(lambda g: seen.append(g.clone()))
    loss.backward()
    return seen


def retain_grad(model, called):
    logits = called(IDS)
    logits.retain_grad()
    cross_entropy(logits).backward()
    return logits.grad


def double_backward(model, called):
    loss = (called(IDS) * MASK[..., None]).square().sum()
    (grad,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
    grad.square().sum().backward()
    return loss.item(), grad


def powers_by_operators(model, called):
    logits = called(IDS)
    loss = (logits**2).mean() + (2**logits).mean() - (1 / (logits**2 + 1)).mean() + (3 - logits).square().mean()
    loss.backward()
    return loss


def numbers_in_control_flow(model, called):
    loss = cross_entropy(called(IDS))
    if loss.item() > 3:
        loss = loss * 2
    if bool(loss > 1e9):
        loss = loss * 0
    loss.backward()
    return loss


def custom_function(model, called):
    loss = cross_entropy(Twice.apply(called(IDS)))
    loss.backward()
    return loss


def custom_function_of_recorded(model, called):
    loss = Twice.apply(called(IDS).softmax(-1)).square().sum()
    loss.backward()
    return loss


def parameters_in_the_loss(model, called):
    loss = cross_entropy(called(IDS)) + 0.1 * model.head.weight.square().sum()
    loss.backward()
    return loss


def added_in_place(model, called):
    loss = cross_entropy(called(IDS))
    loss += 0.1 * model.head.weight.square().sum()
    loss *= 2
    loss.backward()
    return loss


def total_in_place(model, called):
    total = 0.0
    for i in range(2):
        total += cross_entropy(called(IDS.roll(i, 0)), Y.roll(i, 0))
    total.backward()
    return total


def added_in_place_through_a_view(model, called):
    loss = cross_entropy(called(IDS))
    seen = loss.detach()
    loss += 1
    return loss, seen


def hidden_state_as_input(model, called):
    hidden = model.items.weight.sum() * torch.ones(())
    loss = cross_entropy(called(IDS)) * hidden
    loss.backward()
    return loss


def nonleaf_written_after_recording(model, called):
    hidden = model.items.weight.sum() * torch.ones(())
    loss = cross_entropy(called(IDS)) * (hidden * 1)
    scale = hidden * 1
    loss = loss * scale
    loss.backward()
    return loss


# --- reading --------------------------------------------------------------------------------------------


def metric_before_loss(model, called):
    logits = called(IDS)
    hits = ((logits.argmax(-1) == Y) & MASK).sum().item()
    loss = cross_entropy(logits)
    loss.backward()
    return hits, loss


def metric_without_grad(model, called):
    logits = called(IDS)
    loss = cross_entropy(logits)
    with torch.no_grad():
        p = logits.softmax(-1)
        entropy = -(p * p.log()).sum(-1)[MASK].mean()
    loss.backward()
    return loss, entropy, entropy.requires_grad


def evaluation(model, called):
    model.eval()
    with torch.no_grad():
        logits = called(IDS)
        return logits[:, -1].topk(3).indices, logits


def evaluation_in_inference_mode(model, called):
    with torch.inference_mode():
        return called(IDS)[:, -1].topk(3).values


def evaluation_collects(model, called):
    model.eval()
    seen, total = [], 0
    with torch.no_grad():
        for i in range(6):
            logits = called(IDS.roll(i, 0))
            seen.append(logits[:, 2])
            total += (logits.argmax(-1) == Y).sum()
    return torch.cat(seen), total


def described(model, called):
    logits = called(IDS)
    loss = cross_entropy(logits)
    said = [
        isinstance(logits, torch.Tensor), torch.is_tensor(logits), logits.shape == (4, 12, 50), logits.requires_grad,
        logits.dtype == torch.float64, logits.device.type == "cpu", logits.is_leaf, loss.requires_grad, len(logits),
        logits.ndim, logits.numel(), logits.detach().requires_grad, logits.grad is None, logits.is_contiguous(),
        logits.stride(), logits.grad_fn is not None, logits._version,
    ]  # fmt: skip
    if called is not model:
        assert pending(logits) and pending(loss)
    return said


def read_in_many_ways(model, called):
    logits = called(IDS)
    text = f"{logits.mean():.3f}", str(logits)
    assert text[0] == f"{model(IDS).mean():.3f}" and text[1].startswith("tensor([[[")
    return (
        logits.detach().numpy().sum(), logits.data.sum(), logits.detach().cpu().tolist(), float(logits.sum()),
        [row.sum() for row in logits], logits[0, 0, 0].item(),
    )  # fmt: skip


def copied_and_saved(model, called):
    logits = called(IDS).detach()
    file = io.BytesIO()
    torch.save({"logits": logits}, file)
    file.seek(0)
    loaded = torch.load(file)["logits"]
    assert type(loaded) is torch.Tensor
    return copy.deepcopy(logits), loaded


def containers(model, called):
    losses = [cross_entropy(called(IDS.roll(i, 0)), Y.roll(i, 0)) for i in range(2)]
    found = {"mean": torch.stack(losses).mean(), "sum": sum(losses)}
    found["mean"].backward()
    return found


def rows_by_mask(model, called):
    loss = F.cross_entropy(called(IDS)[MASK], Y[MASK])
    loss.backward()
    return loss


def rows_by_numpy(model, called):
    at = np.where(MASK.numpy())
    logits = called(IDS)
    loss = logits[at].square().sum() + logits[MASK.numpy()].sum()
    loss.backward()
    return loss, logits[1:3, np.array([1, 2])].detach()


def numpy_index_written(model, called):
    at = np.where(MASK.numpy())
    picked = called(IDS)[at].detach()
    at[0][:] = 0
    return picked


def rows_by_index(model, called):
    loss = F.cross_entropy(called(IDS)[torch.arange(4), (IDS != 0).sum(1) - 1], IDS[:, 0])
    loss.backward()
    return loss


def masked_select(model, called):
    loss = called(IDS).masked_select(MASK[..., None]).square().sum()
    loss.backward()
    return loss


def shaped_like(model, called):
    logits = called(IDS)
    return torch.zeros_like(logits), torch.rand_like(logits), Y[..., None].expand_as(logits), logits.new_ones(3)


def random_ops_outside(model, called):
    return F.dropout(called(IDS), 0.5).sum(), torch.rand(3)


# --- writing --------------------------------------------------------------------------------------------


def input_written(model, called):
    with torch.no_grad():
        ids = IDS.clone()
        logits = called(ids)
        ids.zero_()
        return cross_entropy(logits)


def input_written_with_grad(model, called):
    ids = IDS.clone()
    loss = cross_entropy(called(ids))
    ids.zero_()
    return loss.detach()


def target_written(model, called):
    target = Y.clone()
    loss = cross_entropy(called(IDS), target)
    target.zero_()
    return loss.detach()


def numpy_input_reused(model, called):
    memory = IDS.numpy().copy()
    logits = called(torch.from_numpy(memory))
    memory[:] = 1
    return cross_entropy(logits).detach()


def numpy_memory_filled_anew_between_calls(model, called):
    memory = IDS.numpy().copy()
    ids = torch.from_numpy(memory)
    first = called(ids)
    memory[:] = memory[::-1].copy()
    return (first - called(ids)).square().sum().detach()


def shared_memory_reused(model, called):
    """As batches come from workers of a data loader."""
    ids, target = IDS.clone().share_memory_(), Y.clone().share_memory_()
    loss = cross_entropy(called(ids), target)
    ids.zero_(), target.zero_()
    return loss.detach()


def output_written(model, called):
    logits = called(IDS)
    logits[:, :, 0] = -1e9
    logits.div_(2.0)
    loss = cross_entropy(logits)
    loss += 1.0
    loss.backward()
    return loss


def written_through_a_view(model, called):
    logits = called(IDS)
    flat = logits.detach().view(-1, 50)
    flat[0] = 0
    return logits, flat


def written_through_a_view_that_was_read(model, called):
    logits = called(IDS)
    flat = logits.detach().view(-1, 50)
    seen = flat.tolist()
    flat += 1
    return logits, flat, seen


def written_after_something_was_recorded(model, called):
    logits = called(IDS)
    p, flat = logits.softmax(-1), logits.flatten(0, 1)
    logits.detach().mul_(2)
    return p, flat, logits


def written_with_gradient(model, called):
    logits = called(IDS)
    p = logits.softmax(-1)
    logits.mul_(2)
    (p.square().sum() + cross_entropy(logits)).backward()
    return p, logits


def numpy_memory_of_output(model, called):
    logits = called(IDS).detach()
    memory = logits.numpy()
    memory[:] = 3
    return logits, logits[0]


def relu_in_place(model, called):
    logits = called(IDS)
    out = F.relu(logits, inplace=True)
    out.sum().backward()
    return out, logits


# --- late reads -----------------------------------------------------------------------------------------


def after_optimizer_step(model, called):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    logits = called(IDS)
    loss = cross_entropy(logits)
    loss.backward()
    optimizer.step()
    return logits, loss, logits.softmax(-1).sum()


def after_update_through_data(model, called):
    logits = called(IDS)
    cross_entropy(logits).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.5)
    return logits


def after_update_without_grad(model, called):
    logits = called(IDS)
    cross_entropy(logits).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.5)
    return logits


def loss_waits_while_parameters_change(model, called):
    loss = cross_entropy(called(IDS))
    with torch.no_grad():
        model.places.weight.add_(1)
    model.items.weight.data.mul_(2)
    return loss.detach()


def old_outputs_in_a_list(model, called):
    kept = []
    for _ in range(3):
        logits = called(IDS)
        kept.append(logits)
        model.zero_grad()
        cross_entropy(logits).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.5)
    return [k.sum() for k in kept]


def two_calls_with_a_step_between(model, called):
    optimizer = sgd(model)
    first = called(IDS)
    cross_entropy(first).backward()
    optimizer.step()
    second = called(IDS)
    return (first - second).square().sum().detach(), first.sum().detach()


def frozen_after_the_call(model, called):
    loss = cross_entropy(called(IDS))
    model.head.weight.requires_grad_(False)
    total = loss * 1
    total.item()
    model.head.weight.requires_grad_(True)
    total.backward()
    return loss


# --- around ---------------------------------------------------------------------------------------------


def loss_compiled_apart(model, called):
    apart = compiled(lambda z, t: cross_entropy(z, t))
    loss = apart(called(IDS), Y) if called is not model else cross_entropy(model(IDS))
    loss.backward()
    return loss


def loss_compiled_by_another_backend(model, called):
    apart = torch.compile(lambda z, t: cross_entropy(z, t), backend="aot_eager")
    loss = apart(called(IDS), Y) if called is not model else cross_entropy(model(IDS))
    loss.backward()
    return loss


def threads(model, called):
    out = [None] * 4
    logits = called(IDS)

    def work(i):
        out[i] = cross_entropy(logits).item() if i % 2 else cross_entropy(called(IDS)).item()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    return out


def hook_that_waits_for_a_thread(model, called):
    logits, other, seen = called(IDS), called(IDS.flip(0)), []

    def read(gradient):
        reader = threading.Thread(target=lambda: seen.append(other.detach().sum().item()), daemon=True)
        reader.start()
        reader.join(30)
        assert seen

    loss = cross_entropy(logits)
    handle = model.head.bias.register_hook(read)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    handle.remove()
    return seen, loss


def generator(model, called):
    def losses():
        for i in range(3):
            logits = called(IDS.roll(i, 0))
            loss = cross_entropy(logits, Y.roll(i, 0))
            loss.backward()
            yield logits, loss

    return [(logits.sum(), loss.item()) for logits, loss in losses()]


def checkpoint_around(model, called):
    loss = cross_entropy(torch.utils.checkpoint.checkpoint(called, IDS, use_reentrant=False))
    loss.backward()
    return loss


def vmap_over_output(model, called):
    return torch.vmap(lambda row: row.logsumexp(-1))(called(IDS))


def functional_gradient(model, called):
    logits = called(IDS)
    return torch.func.grad(lambda w: (logits * w).sum())(torch.ones(()))


def second_model_on_the_output(model, called):
    torch.manual_seed(3)
    top = nn.Sequential(nn.Linear(50, 8), nn.Tanh(), nn.Linear(8, 3))
    on_top = top if called is model else compiled(top)
    loss = (on_top(called(IDS)).square().sum(-1) * MASK).sum()
    loss.backward()
    return loss, [p.grad for p in top.parameters()]


def raised_and_handled(model, called):
    logits = called(IDS)
    with contextlib.suppress(IndexError):
        cross_entropy(logits, Y + 100).item()
    return logits.sum()


CODE = [f for f in list(globals().values()) if callable(f) and getattr(f, "__module__", "") == __name__
        and getattr(f, "__code__", None) and f.__code__.co_varnames[:2] == ("model", "called")]  # fmt: skip


@pytest.mark.parametrize("code", CODE, ids=lambda f: f.__name__)
def test_same_as_eager(code):
    assert_same(code)


@pytest.mark.parametrize("code", [one_loss, after_optimizer_step, written_with_gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", [SASRec, Broken])
def test_same_with_attention_and_with_a_graph_break(code, kind):
    assert_same(code, kind=kind)


def test_a_step_that_is_not_compiled_is_the_same(monkeypatch):
    monkeypatch.setattr(step_of_deferral, "_TOO_MANY", 0)
    torch._dynamo.reset()
    theirs, ours = made(Tower), made(Tower)
    for code in (one_loss, powers_by_operators, containers):
        assert programs.worst(code(theirs, theirs), code(ours, compiled(ours))) <= 1e-10
        assert programs.worst(programs.gradients(theirs), programs.gradients(ours)) <= 1e-10


# There a step is one function to autograd: nothing passes an output that the loss was not computed from.
@pytest.mark.parametrize(
    "code",
    [
        one_loss, after_optimizer_step, custom_function, gradient_of_logits, gradient_of_a_view_of_logits,
        gradient_of_logits_and_of_what_follows, backward_into_logits_alone, hook_after_recording, hook_that_changes,
        retain_grad_after_recording, hook_after_a_metric_was_read, gradient_of_one_of_two_calls, mapped_output,
        two_losses_of_other_parameters, gradient_by_a_transform, checkpointed_after_the_model,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_same_on_the_default_target(code):
    assert_same(code, options=(("target", "cpu"),))


def test_a_number_from_outside_is_no_symbol(recwarn):
    """Its value would be one to torch, if it is a float64, and the compiler of the target would refuse it."""

    def best_loss(model, called):
        best = torch.tensor(100.0)
        for weight in (0.5, 0.25):
            loss = cross_entropy(called(IDS)) * torch.tensor(weight)
            best = loss if loss < best else best
            loss.backward()
        return best

    assert_same(best_loss, options=(("target", "cpu"),))
    assert not [w for w in recwarn if "op by op" in str(w.message)]


def test_while_a_step_is_compiled_no_other_thread_compiles(monkeypatch):
    compile_step, taken = step_of_deferral._compiled, []

    def watched(*args):
        other = threading.Thread(target=lambda: taken.append(_torch.compile_lock.acquire(blocking=False)))
        other.start()
        other.join()
        return compile_step(*args)

    monkeypatch.setattr(step_of_deferral, "_compiled", watched)
    torch._dynamo.reset()
    cross_entropy(compiled(made(Tower))(IDS)).backward()
    assert taken == [False]


@pytest.mark.parametrize("target", ["cpu", "ascend-sim"])
def test_a_second_derivative_of_a_compiled_step_raises(target):
    torch._dynamo.reset()
    model = made(Tower).float()
    called = compiled(model, target=target)
    with pytest.raises(RuntimeError, match="double backward"):
        double_backward(model, called)


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy], ids=["looked at", "computed"])
def test_another_type_than_was_announced_raises(read, monkeypatch):
    _, _, called = fresh()
    rows = called(IDS).detach()
    results = tensor_of_deferral.dry_run(torch.cosh, (rows,), {}, [rows.value.meta], ())
    (meta,) = results.metas
    results.metas = [type(meta)(meta.shape, meta.stride, torch.float16, meta.device, False)]
    monkeypatch.setattr(tensor_of_deferral, "_KNOWN", {})
    monkeypatch.setattr(tensor_of_deferral, "dry_run", lambda func, *rest: results if func is torch.cosh else None)
    announced = torch.cosh(rows)
    assert announced.dtype is torch.float16
    with pytest.raises(TurbogrError, match=r"announced as torch\.float16 and is torch\.float64"):
        read(announced)


# --- mixed precision ------------------------------------------------------------------------------------


def autocast_around_the_model(model, called):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = called(IDS)
    loss = cross_entropy(logits.float())
    loss.backward()
    return loss, logits.dtype is torch.bfloat16


def autocast_and_scaler(model, called):
    optimizer, scaler = sgd(model, 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(called(IDS))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return loss.float()


@pytest.mark.parametrize("code", [autocast_around_the_model, autocast_and_scaler], ids=lambda f: f.__name__)
def test_same_in_mixed_precision(code):
    torch.set_default_dtype(torch.float32)
    assert_same(code, tolerance=5e-2, half=True)


# --- said, not done -------------------------------------------------------------------------------------


def test_hook_after_the_loss_was_computed_raises():
    logits = fresh()[2](IDS)
    cross_entropy(logits).item()
    with pytest.raises(RuntimeError, match="before the loss"):
        logits.register_hook(lambda g: None)


def test_errors_of_the_model_come_late_with_the_line_of_the_call():
    ids = IDS.clone()
    ids[0, 0] = 777
    logits = fresh()[2](ids)
    with pytest.raises(IndexError) as caught:
        cross_entropy(logits).item()
    assert any("test_user_code.py" in note for note in caught.value.__notes__)


def test_deepcopy_of_what_has_a_gradient_raises_as_in_eager():
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(fresh()[2](IDS))


def test_type_is_not_tensor():
    assert type(fresh()[2](IDS)) is Deferred


def test_nothing_is_left():
    _, _, called = fresh()
    for _ in range(4):
        cross_entropy(called(IDS.clone())).backward()
    assert not WAITING


def test_parameters_above_the_budget_are_not_kept(monkeypatch):
    monkeypatch.setattr(model, "BUDGET", 0)
    assert_same(after_optimizer_step, kind=Large)
    assert any(graph.large for graph in model.GRAPHS)


class Large(Tower):
    """A graph of its own."""


def test_dropout_has_the_same_law():
    _, eager_model, called = fresh(drop=0.3)
    torch.manual_seed(5)
    with torch.no_grad():
        eager = torch.stack([cross_entropy(eager_model(IDS)) for _ in range(200)])
    ours = torch.tensor([cross_entropy(called(IDS)).item() for _ in range(200)])
    assert abs(eager.mean() - ours.mean()) < 4 * (eager.std() / 200**0.5 * 2**0.5)

    def draws():
        torch.manual_seed(7)
        return [cross_entropy(called(IDS)).item() for _ in range(3)]

    assert draws() == draws() and len(set(draws())) == 3


def test_dropout_is_drawn_once_for_loss_and_output():
    logits = fresh(drop=0.3)[2](IDS)
    loss = cross_entropy(logits)
    assert abs(loss.item() - cross_entropy(logits.detach()).item()) < 1e-12
