"""Random user programs around compiled models, each against the same program around the eager models.

    python -m tests.deferral.random_programs --n 1000 --seed 0 [--op-by-op]

A program is Python source, so that its variables are variables: it calls models, makes views, losses and metrics, reads
early and late, writes to outputs, inputs and parameters, steps, drops variables, raises. What it has seen, what its
variables hold at the end, parameters and gradients must be eager's. A program in which eager raises counts apart: where
autograd finds a value overwritten, ours has kept the old one.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from turbogr_compile.deferral import step
from turbogr_compile.deferral.model import GRAPHS
from turbogr_compile.deferral.record import WAITING

from .programs import Twice, compiled, worst

V, B, N, D = 7, 3, 5, 4


class Rows(nn.Module):
    """Logits of rows."""

    def __init__(self):
        super().__init__()
        self.items, self.head = nn.Embedding(V, D, padding_idx=0), nn.Linear(D, V)

    def forward(self, ids):
        return self.head(torch.tanh(self.items(ids)))


class Both(nn.Module):
    """Hidden rows and logits, with rows that look at each other."""

    def __init__(self):
        super().__init__()
        self.items, self.mix, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, ids):
        x = self.items(ids)
        hidden = torch.tanh(self.mix(x)) + x.cumsum(1) / 10
        return hidden, self.head(hidden)


class Top(nn.Module):
    """On the logits of another model."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(V, V)

    def forward(self, rows):
        return torch.sigmoid(self.up(rows)) * rows


class Writer:
    """Writes one program. Names say what they hold: r rows (B, N, V), f flat rows, s a row per sequence, n a number."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lines, self.depth, self.count = [], 1, 0
        self.names = {"r": [], "f": [], "s": [], "n": []}
        # Writes that autograd does not see change what eager's backward has saved, and so its gradients; not ours.
        self.hidden = self.random.random() < 0.4

    def say(self, text):
        self.lines.append("    " * self.depth + text)

    def new(self, kind):
        if self.names[kind] and self.random.random() < 0.3:
            return self.random.choice(self.names[kind])
        self.count += 1
        name = f"{kind}{self.count}"
        self.names[kind].append(name)
        return name

    def old(self, kind):
        return self.random.choice(self.names[kind]) if self.names[kind] else None

    def program(self, length):
        self.call()
        for _ in range(length):
            self.statement()
        everything = [n for kind in self.names.values() for n in kind]
        self.random.shuffle(everything)
        self.say(f"return [{', '.join(everything)}]")
        return "def program(a, b, top, ma, mb, mtop, opt, x, y, mask, seen):\n" + "\n".join(self.lines) + "\n"

    def statement(self):
        r = self.random.random()
        if r < 0.12:
            self.call()
        elif r < 0.34:
            self.derive()
        elif r < 0.52:
            self.number()
        elif r < 0.66:
            self.read()
        elif r < 0.78:
            self.write()
        elif r < 0.90:
            self.train()
        else:
            self.other()

    def call(self):
        r = self.random.random()
        k = self.random.randrange(2)
        if r < 0.55:
            self.say(f"{self.new('r')} = a(x[{k}])")
        elif r < 0.8 or not self.names["r"]:
            name = self.new("r")
            self.say(f"hidden, {name} = b(x[{k}])")
            if self.random.random() < 0.3:
                self.say("seen.append(hidden.sum())")
        else:
            source = self.old("r")
            self.say(f"{self.new('r')} = top({source})")

    def derive(self):
        source = self.old("r")
        choices = [
            ("r", "{0}.softmax(-1)"), ("r", "{0} * 2"), ("r", "{0}.detach()"), ("r", "{0}.data"), ("r", "{0}.clone()"),
            ("r", "{0} + {1}"), ("r", "{0} * mask[..., None]"), ("f", "{0}.view(-1, {0}.size(-1))"),
            ("f", "{0}.flatten(0, 1)"), ("f", "{0}.reshape(-1, 7)"), ("s", "{0}[:, -1]"), ("s", "{0}[:, 0]"),
            ("s", "{0}.mean(1)"), ("r", "{0}.contiguous()"), ("r", "{0}.to({0}.dtype)"), ("r", "Twice.apply({0})"),
            ("r", "{0}.transpose(1, 2).transpose(1, 2)"), ("r", "{0} / {0}.norm()"), ("r", "{0} - {0}.mean()"),
            ("s", "{0}[torch.arange(3), mask.sum(1)]"), ("r", "torch.where(mask[..., None], {0}, {1})"),
            ("r", "{0}.masked_fill(~mask[..., None], 0.0)"), ("s", "{0}.unbind(1)[1]"),
            ("s", "{0}.chunk(5, 1)[2][:, 0]"),
            ("r", "{0}.unsqueeze(0)[0]"), ("r", "{0}.relu()"), ("r", "{0} @ ma.head.weight @ ma.head.weight.T"),
        ]  # fmt: skip
        kind, text = self.random.choice([c for c in choices if self.hidden or ".data" not in c[1]])
        other = self.old("r")
        self.say(f"{self.new(kind)} = " + text.format(source, other))

    def number(self):
        rows, flat, some, number, second = (self.old(k) for k in ("r", "f", "s", "n", "n"))
        choices = [
            "F.cross_entropy({r}.view(-1, 7), y.view(-1), ignore_index=0)", "{r}.square().mean()",
            "F.cross_entropy({r}.transpose(1, 2), y, ignore_index=0)", "({r} * mask[..., None]).square().sum()",
            "{r}.logsumexp(-1)[mask].mean()", "F.cross_entropy({r}[mask], y[mask])", "{r}[0, 0, 0]",
            "(F.cross_entropy({r}.flatten(0, 1), y.flatten(), reduction='none') * mask.flatten()).sum()",
            "{r}.mean() + 0.1 * ma.head.weight.square().sum()",
        ]  # fmt: skip
        if flat:
            choices += ["F.cross_entropy({f}, y.view(-1), ignore_index=0)", "{f}[mask.view(-1)].square().sum()"]
        if some:
            choices += ["{s}.square().sum()", "F.cross_entropy({s}, y[:, 0])"]
        if number:
            choices += [
                "{n} + {m}",
                "{n} * 0.5",
                "{n} - {m}.detach()",
                "{n}.clone()",
                "{n}.detach()",
                "{n}.view(1).sum()",
            ]
            if self.random.random() < 0.3:
                self.say(self.random.choice([f"{number} += {second} * 1", f"{number} *= 2", f"{number} += 0.5"]))
                return
        text = self.random.choice(choices).format(r=rows, f=flat, s=some, n=number, m=second)
        self.say(f"{self.new('n')} = {text}")

    def read(self):
        rows, kind = self.old("r"), self.random.choice([k for k in "rfsn" if self.names[k]])
        some = self.old(kind)
        number = self.old("n") or f"{rows}.sum()"
        self.say(self.random.choice([
            f"seen.append((({rows}.argmax(-1) == y) & mask).sum().item())", f"seen.append({number}.item())",
            f"seen.append({rows}.tolist())", f"seen.append({some}.detach().clone())", f"seen.append({some})",
            f"seen.append({some}.detach().numpy().copy())", f"seen.append(float({rows}.sum()))",
            f"seen.append(bool(({rows} > 0).any()))", f"seen.append(len(str({some})) > 0)",
            f"seen.append([t.sum() for t in {rows}])", f"seen.append({rows}[:, -1].topk(2).indices)",
            f"seen.append({some}.requires_grad)", f"seen.append({{'k': ({some}, {number})}})",
        ]))  # fmt: skip
        if self.random.random() < 0.25:
            self.say("with torch.no_grad():")
            self.say(f"    seen.append({rows}.softmax(-1).max(-1).values[mask].mean())")

    def write(self):
        rows, flat, some = self.old("r"), self.old("f"), self.old("s")
        number = self.old("n")
        choices = [
            f"{rows}.detach().mul_(1.5)", f"{rows}.data.add_(0.25)", f"{rows}.data[0] = 0",
            f"{rows}.detach()[0, 0] = 1",
            f"{rows}.mul_(2)", f"{rows}[:, 0] = 0.5", f"{rows}.detach().view(-1, 7)[1] = 3", "x[0].copy_(x[0].flip(0))",
            "y.copy_(y.roll(1, 0))", "mask.copy_(mask.flip(0))", "ma.head.weight.data.mul_(1.1)",
            "mb.items.weight.data.add_(0.1)", f"{rows}.detach().numpy()[0] = 2", "ma.items.weight.data[1] = 0.3",
        ]  # fmt: skip
        if flat:
            choices += [f"{flat}.detach().add_(1)", f"{flat}.data[0] = 0", f"{flat}.add_(1)"]
        if some:
            choices += [f"{some}.detach().add_(1)", f"{some}.data[0] = 0", f"{some}.mul_(1.5)"]
        if number:
            choices += [f"{number}.detach().add_(1)", f"{number}.data.mul_(2)"]
        if not self.hidden:
            choices = [c for c in choices if ".data" not in c and "numpy" not in c]
        text = self.random.choice(choices)
        if self.random.random() < 0.2:
            self.say("with torch.no_grad():")
            text = "    " + self.random.choice(["ma.head.bias.add_(0.2)", "mb.head.weight.mul_(0.9)", text])
        self.say(text)

    def train(self):
        if self.hidden:
            return self.read()
        number, rows = self.old("n"), self.old("r")
        loss = number if number and self.random.random() < 0.7 else f"{rows}.square().mean()"
        self.say(self.random.choice([
            f"{loss}.backward(retain_graph=True)", f"({loss} * 1).backward(retain_graph=True)", "opt.step()",
            f"torch.autograd.backward([{loss}], retain_graph=True)", "opt.zero_grad()",
            f"seen.append(torch.autograd.grad({loss}, ma.head.weight, retain_graph=True, allow_unused=True))",
            f"({loss} + ma.head.bias.sum()).backward(retain_graph=True); opt.step(); opt.zero_grad()",
        ]))  # fmt: skip

    def other(self):
        rows, r = self.old("r"), self.random.random()
        if r < 0.2 and len(self.names["r"]) > 1:
            self.names["r"].remove(rows)
            self.say(f"{rows} = None" if self.random.random() < 0.5 else f"del {rows}")
        elif r < 0.3:
            some = self.old("s") or rows
            self.say(f"if {some}.sum() > {self.random.choice([-100, 0, 100])}:")
            self.say(f"    seen.append({rows}[0].tolist())")
            if self.random.random() < 0.5:
                self.say("else:")
                self.say(f"    seen.append({some}.detach().mean())")
        elif r < 0.4:
            self.say("try:")
            self.say(f"    seen.append(F.cross_entropy({rows}.view(-1, 7), y.view(-1) + 1000).item())")
            self.say("except IndexError:")
            self.say(f"    seen.append({rows}.sum().item())")
        elif r < 0.6:
            name = self.new("r")
            self.say(f"{name} = (lambda t: t * 3)({rows})")
        elif r < 0.8 and self.depth == 1:
            self.say("for i in range(2):")
            self.depth += 1
            self.call()
            for _ in range(3):
                self.statement()
            self.depth -= 1
        else:
            self.say(f"seen.append(torch.ones_like({rows}).sum())")


def on_ranks(source):
    """The program for several ranks: the first alone reads, and all average gradients before a step.

    Gradients are asked for on all ranks: where autograd finds a value overwritten, they raise together.
    """
    read = re.compile(r"^(\s*)(seen\.append(?!\(torch\.autograd))", flags=re.M)
    return read.sub(r"\1if rank == 0: \2", source).replace("opt.step()", "average(); opt.step()")


def world(called, rank=0):
    """Models, data and an optimizer, the same for every program and both sides."""
    torch.manual_seed(0)
    models = MODELS[called]
    for model, state in zip(models["plain"], STATES, strict=True):
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
    ids = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0], [6, 1, 2, 3, 0]])
    target = torch.tensor([[2, 3, 0, 0, 0], [5, 0, 0, 0, 0], [1, 2, 3, 0, 0]])
    ids, target = ids.roll(rank, 0), target.roll(rank, 0)
    parameters = [p for model in models["plain"] for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    seen = []
    args = (*models["called"], *models["plain"], optimizer, [ids, ids.flip(0).clone()], target, target != 0, seen)
    return args, parameters, seen


MODELS, STATES = {}, []


def prepare():
    if MODELS:
        return
    torch.manual_seed(0)
    plain = [Rows(), Both(), Top()]
    STATES.extend(copy.deepcopy(m.state_dict()) for m in plain)
    MODELS[False] = {"plain": plain, "called": plain}
    ours = copy.deepcopy(plain)
    MODELS[True] = {"plain": ours, "called": [compiled(m) for m in ours]}


EXPECTED = ("modified by an inplace operation", "backward through the graph a second time", "does not require grad",
            "a leaf Variable that requires grad", "is a view and is being modified", "Output 0 of",
            "unbound_local", "cannot access local", "NoneType", "in-place")  # fmt: skip


def average(parameters):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def outcome(source, ours):
    rank = dist.get_rank() if dist.is_initialized() else 0
    args, parameters, seen = world(ours, rank)
    scope = {"torch": torch, "F": F, "Twice": Twice, "rank": rank, "average": lambda: average(parameters)}
    exec(compile(source, f"<program {ours}>", "exec"), scope)
    for graph in GRAPHS:
        graph.read_raw = 0
    WAITING.clear()
    try:
        held = scope["program"](*args)
    except Exception as error:
        return None, error
    flat = [held, seen, parameters, [p.grad for p in parameters if p.grad is not None], args[7], args[8]]
    return (flat, [p.grad is None for p in parameters]), None


def run(seed, op_by_op=False):
    """'same', 'both raise', 'only eager raises', or a text about the difference; and the program."""
    prepare()
    source = Writer(seed).program(random.Random(seed).randrange(4, 14))
    source = on_ranks(source) if dist.is_initialized() else source
    verdict = judged(source) if not op_by_op else without_compiler(source)
    if verdict not in FINE and not op_by_op and without_compiler(source) in FINE:
        verdict = f"THE COMPILER, not deferral: {verdict}"
    return verdict, source


FINE = ("same", "both raise", "only eager raises")


def without_compiler(source):
    """Deferral alone: recorded steps run op by op."""
    kept = step.Programs.run
    step.Programs.run = lambda programs, plan, ready=lambda: None: kept(step.Programs(step._op_by_op), plan, ready)
    try:
        return judged(source)
    finally:
        step.Programs.run = kept


def raised_somewhere(error):
    """Did the program raise on any rank?"""
    flag = torch.tensor([error is not None], dtype=torch.long)
    dist.all_reduce(flag)
    return bool(flag.item())


def judged(source):
    expected, theirs = outcome(source, False)
    if dist.is_initialized() and raised_somewhere(theirs):
        return "only eager raises"  # ours may go on where values are kept, on one rank and not on another
    found, ours = outcome(source, True)
    try:
        if theirs is not None and ours is not None:
            # Eager may have raised earlier, for a value that was overwritten: what was seen by then is not compared.
            known = any(e in str(theirs) for e in EXPECTED) or type(theirs) is type(ours)
            return "both raise" if known else f"eager raises {theirs!r}, ours {ours!r}"
        if theirs is not None:
            known = isinstance(theirs, (RuntimeError, UnboundLocalError)) and any(e in str(theirs) for e in EXPECTED)
            return "only eager raises" if known else f"eager raises {theirs!r}"
        if ours is not None:
            return f"ours raises {ours!r}\n" + "".join(traceback.format_exception(ours)[-6:])
        if expected[1] != found[1]:
            return "other parameters have gradients"
        difference = worst(expected[0], found[0])
        return "same" if difference <= 1e-9 else f"differs by {difference}"
    except Exception as error:
        return f"comparing raises {error!r}\n{''.join(traceback.format_exception(error)[-8:])}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op-by-op", action="store_true", help="without the compiler: deferral alone")
    parser.add_argument("--stop", type=int, default=10, help="after so many failures")
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts, began, failures = Counter(), time.time(), 0
    for seed in range(given.seed, given.seed + given.n):
        verdict, source = run(seed, given.op_by_op)
        if verdict in FINE:
            counts[verdict] += 1
        else:
            counts["compiler" if verdict.startswith("THE COMPILER") else "FAILED"] += 1
            failures += not verdict.startswith("THE COMPILER")
            print(f"--- seed {seed}: {verdict}\n{source}", flush=True)
            if failures >= given.stop:
                break
        if (seed - given.seed) % 100 == 99:
            print(f"{seed - given.seed + 1} programs, {dict(counts)}, {time.time() - began:.0f} s", flush=True)
    print(dict(counts), f"{time.time() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
