"""Training loops that other people wrote, around a model whose loss is outside; each trains eager and deferred.

    PYTHONPATH=<packages> python -m tests.deferral.loops trainer lightning accelerate

prints a line of JSON per loop: how far parameters are from eager's, and executed FLOPs as a share of eager's and of
the same steps with the loss inside of the compiled function.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
import tempfile
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from turbogr_compile import _torch
from turbogr_compile.testing import Flops

from .programs import SASRec, batch, cross_entropy

STEPS = 4
OPTIONS = {"target": "eager", "verify": "fast", "worth": "always"}


def batches():
    return [batch(lengths=[3, 9, 5, 2 + i], seed=i) for i in range(STEPS)]


def rows():
    """A data set whose batches of four are those of `batches`."""
    return [{"ids": i, "labels": t} for ids, target in batches() for i, t in zip(ids, target, strict=True)]


class Named(nn.Module):
    """As transformers' models are called: by keywords, and with a dict as answer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return {"logits": self.model(ids)}


def trainer(model, called):
    from transformers import Trainer, TrainingArguments

    wrapped = Named(called)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.1, lr_scheduler_type="constant",
            optim="sgd", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=2,
            remove_unused_columns=False, dataloader_num_workers=0, label_names=["labels"],
        )  # fmt: skip
        loop = Trainer(
            wrapped, arguments, train_dataset=rows(),
            compute_loss_func=lambda out, labels, num_items_in_batch=None: cross_entropy(out["logits"], labels),
        )  # fmt: skip
        loop._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(loop.train_dataset)
        loop.train()


def lightning(model, called):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
            self.called = [called]  # beside the parameters

        def training_step(self, batch, index):
            logits = self.called[0](batch["ids"])
            loss = cross_entropy(logits, batch["labels"])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=1.0, **quiet).fit(Module(), loader)


def accelerate(model, called):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    prepared, optimizer, loader = accelerator.prepare(called, optimizer, loader)

    def train():
        for items in loader:
            with accelerator.accumulate(prepared):
                loss = cross_entropy(prepared(items["ids"]), items["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    train()


LOOPS = {f.__name__: f for f in (trainer, lightning, accelerate)}


def accumulated(model, called):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, target in batches():
        loss = cross_entropy(called(ids), target) / STEPS
        loss.backward()
    optimizer.step()


def scaled(model, called):
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for ids, target in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = called(ids)
            loss = cross_entropy(logits, target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def by_autograd_grad(model, called):
    parameters = list(model.parameters())
    for ids, target in batches():
        logits = called(ids)
        loss = cross_entropy(logits, target)
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.data.sub_(0.1 * grad)


def two_losses(logits, target):
    return cross_entropy(logits, target), (logits.logsumexp(-1) * (target != 0)).square().mean()


def two_backwards(model, called):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, target in batches():
        logits = called(ids)
        first, second = two_losses(logits, target)
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()


class Checkpointed(SASRec):
    """Activations of each layer are computed again in backward."""

    def forward(self, ids):
        n = ids.shape[1]
        future, pad = torch.ones(n, n, dtype=torch.bool).triu(1), ids == 0
        x = self.items(ids) + self.places(torch.arange(n))
        for layer in self.body.layers:
            x = checkpoint(layer, x, future, pad, use_reentrant=False)
        return self.head(x)


def inside(model, losses=cross_entropy) -> int:
    """FLOPs of the same steps, with the loss compiled along."""
    options = {**OPTIONS, "deferral": False}
    step = torch.compile(lambda ids, target: losses(model(ids), target), backend="turbogr", options=options)
    step(*batches()[0])  # whatever a process computes once, at its first compile
    with Flops() as flops:
        for given in batches():
            found = step(*given)
            *others, last = found if isinstance(found, tuple) else (found,)
            for loss in others:
                loss.backward(retain_graph=True)
            last.backward()
    return flops.total


def judged(loop, kind=SASRec, losses=cross_entropy):
    torch.manual_seed(0)
    theirs = kind(layers=2)
    start, ours = copy.deepcopy(theirs), copy.deepcopy(theirs)
    whole = inside(copy.deepcopy(theirs), losses)
    with Flops() as eager:
        loop(theirs, theirs)
    called = torch.compile(ours, backend="turbogr", options={**OPTIONS, "deferral": True})
    with Flops() as deferred:
        loop(ours, called)
    gaps = [(p - q).abs().max().item() for p, q in zip(theirs.parameters(), ours.parameters(), strict=True)]
    moved = [(p - q).abs().max().item() for p, q in zip(theirs.parameters(), start.parameters(), strict=True)]
    return {"worst": max(gaps), "moved": max(moved), "saved": eager.total / deferred.total,
            "of the whole step": deferred.total / whole}  # fmt: skip


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_default_dtype(torch.float64)
    _torch.trace_transformer_layers()
    for name in sys.argv[1:]:
        with contextlib.redirect_stdout(sys.stderr):
            found = judged(LOOPS[name])
        print(json.dumps({"loop": name, **found}), flush=True)


if __name__ == "__main__":
    main()
