"""Random user programs: what people write around a model, in any order."""

from __future__ import annotations

import random


class Writer:
    """Writes one program. Names say what they hold: r rows (B, N, V), f flat rows, s a row per sequence, n a number, o
    what the third model returns, v some view of rows."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lines, self.depth, self.count = [], 1, 0
        self.names = {"r": [], "f": [], "s": [], "n": [], "o": [], "v": []}
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
        if kind == "r" and self.names["o"] and self.random.random() < 0.15:
            return self.random.choice(self.names["o"]) + ".logits"
        return self.random.choice(self.names[kind]) if self.names[kind] else None

    def block(self, opening, body):
        """Names that are set only in here are not there after it where it may not run; `with` and `try` run."""
        self.say(opening)
        self.depth += 1
        body()
        self.depth -= 1

    def statements(self, count):
        for _ in range(count):
            self.statement()

    def program(self, length):
        self.call()
        for _ in range(length):
            self.statement()
        everything = [f"{n}.logits" if kind == "o" else n for kind, names in self.names.items() for n in names]
        self.random.shuffle(everything)
        self.say(f"return [{', '.join(everything)}]")
        return "def program(a, b, top, c, ma, mb, mtop, opt, x, y, mask, seen):\n" + "\n".join(self.lines) + "\n"

    def statement(self):
        r = self.random.random()
        if r < 0.11:
            self.call()
        elif r < 0.30:
            self.derive()
        elif r < 0.46:
            self.number()
        elif r < 0.59:
            self.read()
        elif r < 0.70:
            self.write()
        elif r < 0.81:
            self.train()
        elif r < 0.89:
            self.other()
        elif r < 0.94:
            self.rare()
        else:
            self.inside()

    def call(self):
        r = self.random.random()
        k = self.random.randrange(2)
        if r < 0.4:
            self.say(f"{self.new('r')} = a(x[{k}])")
        elif r < 0.55:
            self.say(f"{self.new('o')} = c(x[{k}])")
        elif r < 0.8 or not self.names["r"]:
            name = self.new("r")
            self.say(f"hidden, {name} = b(x[{k}])")
            if self.random.random() < 0.3:
                self.say("seen.append(hidden.sum())")
        else:
            source = self.old("r")
            self.say(f"{self.new('r')} = top({source})")
        if not self.names["r"]:
            self.say(f"{self.new('r')} = {self.old('o')}.logits")

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
            ("v", "{0}[:, 1:]"), ("v", "{0}[..., :3]"), ("v", "{0}.transpose(1, 2)"), ("v", "{0}.view(-1)[4:]"),
            ("v", "{0}.diagonal(0, 1, 2)"), ("v", "{0}.expand(2, -1, -1, -1)[1]"), ("v", "{0}.split(2, 1)[1]"),
            ("v", "{0}.narrow(0, 1, 1)"), ("v", "{0}.unfold(1, 2, 1)"), ("v", "{0}.detach()[:, ::2]"), ("v", "{0}.mT"),
            ("s", "torch.stack([{0}, {1}])[1][:, 1]"), ("f", "torch.cat([{0}, {1}], 1)[:, :5].reshape(-1, 7)"),
            ("r", "F.layer_norm({0}, (7,))"), ("r", "{0}.requires_grad_(False)" if self.hidden else "{0} + 0"),
            ("r", "F.linear({0}, ma.head.weight @ ma.head.weight.T)"), ("s",
            "torch.einsum('bnv,bn->bv', {0}, mask * 1.0)"),
            ("r", "{0}.float().double()"), ("r", "{0}.sort(-1).values"), ("s", "{0}.max(1).values"), ("r",
            "{0}.flip(1)"),
            ("r", "{0}.clone().detach().requires_grad_()"), ("r",
            "torch.nn.functional.dropout({0}, 0.5, training=True)"),
            ("s", "{0}.gather(1, y[:, :1, None].clamp(max=4).expand(-1, -1, 7))[:, 0]"),
            ("r", "{0} * torch.rand(3, 5, 1)"),
            ("r", "{0}.masked_scatter(mask[..., None], {1})"), ("r", "{0}.index_fill(1, y[0, :1].clamp(max=4), 0.5)"),
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
        choices += [
            f"{rows}[:, 1:].mul_(2)", f"{rows}.view(-1)[3] = 1", f"{rows}[mask] = 0.5",
            f"{rows}.transpose(1, 2)[:, 0].add_(1)",
            f"{rows}.unbind(1)[0].detach().add_(1)", f"{rows}[..., 0].fill_(0.1)", f"{rows}.clone().detach_()",
            f"{rows}[0].copy_({rows}[1].detach())", f"torch.mul({rows}.detach(), 2, out={rows}.data)",
            f"torch.add({rows}.detach(), 1, out=torch.empty(3, 5, 7))",
            f"{rows}.index_add_(0, y[0, :1] * 0, {rows}[:1] * 1)",
            f"{rows}.data = torch.zeros(3, 5, 7)", f"{rows}.clamp_(max=0.3)", "x[1].add_(0)", f"{rows}[1:2] += 1",
            f"torch.nn.init.ones_({rows}.detach()[0])",
        ]  # fmt: skip
        if view := self.old("v"):
            choices += 2 * [f"{view}.mul_(3)", f"{view}[0] = 0.25", f"{view}.detach().add_(1)", f"{view}.data.zero_()"]
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
        if self.random.random() < 0.15:
            return self.place()
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
        if r < 0.2 and len(self.names["r"]) > 1 and rows in self.names["r"]:
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
            self.statements(3)
            self.depth -= 1
        else:
            self.say(f"seen.append(torch.ones_like({rows}).sum())")

    def place(self):
        """Somebody wants gradients of an output, or to see them pass."""
        rows, number = self.old("r"), self.old("n")
        number = number or f"{rows}.square().mean()"
        self.say(f"if {rows}.requires_grad and {rows}.grad_fn is not None:")
        self.say("    " + self.random.choice([
            f"{rows}.register_hook(lambda g: seen.append(g.sum()) if g is not None else None)",
            f"{rows}.register_hook(lambda g: g * 2)", f"{rows}.retain_grad()",
            f"seen.append(torch.autograd.grad({rows}.square().sum() + {number}, {rows}, retain_graph=True))",
            f"{rows}.backward(torch.ones(3, 5, 7), retain_graph=True)",
            f"{rows}.sum((0, 1))[2].backward(retain_graph=True)",
            f"seen.append(torch.autograd.grad({rows}[0].sum(), [ma.head.weight, mb.items.weight], retain_graph=True, "
            "allow_unused=True))",
            "seen.append(torch.nn.utils.clip_grad_norm_([p for p in mb.parameters() if p.grad is not None], 0.5))",
        ]))  # fmt: skip

    def rare(self):
        """What few do, and somebody does."""
        rows, r2, k = self.old("r"), self.old("r"), self.random.randrange(2)
        checkpoint = "torch.utils.checkpoint.checkpoint"
        choices = [
            f"NEW_r = {checkpoint}(a, x[{k}], use_reentrant=False)",
            f"NEW_r = {checkpoint}(lambda t, s={r2}: t.tanh() * s, {rows}, use_reentrant=False)",
            f"NEW_r = {checkpoint}(torch.sigmoid, {rows}, use_reentrant=True)",
            f"seen.append(copy.deepcopy({rows}.detach()))", f"seen.append(pickle.loads(pickle.dumps({rows}.detach())))",
            f"seen.append(np.asarray({rows}.detach()).sum())", f"NEW_r = copy.copy({rows})",
            f"seen.append({{{rows}: 1}}[{rows}])", f"NEW_s = sum(t for t in {rows}.unbind(1))",
            f"NEW_n = sum(t.square().mean() for t in [{rows}, {r2}])",
            f"NEW_r = next(a(t) for t in x[{k}:])", f"*_, NEW_s = {rows}.unbind(1)",
            f"NEW_r = (lambda *t, **k: t[0] + k['z'])({rows}, z={r2})",
            f"thread = threading.Thread(target=lambda: seen.append({rows}.mean())); thread.start(); thread.join()",
            f"torch.manual_seed({k}); seen.append(torch.rand(2))", f"seen.append(id({rows}) == id({rows}))",
            f"seen.append([{rows}.shape, {rows}.dtype is torch.float64, {rows}.stride(), {rows}.requires_grad])",
            f"seen.append(max(({rows}.mean(), {r2}.sum()), key=float))", "opt.zero_grad(set_to_none=False)",
            f"seen.append(torch.func.vmap(lambda t: t * 2)({rows}.detach()))", f"seen.append({rows} is {r2})",
            f"seen.append(torch.func.grad(lambda t: t.square().sum())({rows}.detach()))",
            f"NEW_r = torch.utils._pytree.tree_map(lambda t: t - 1, {{'k': {rows}}})['k']",
            f"seen.append(torch.equal({rows}, {r2}))", f"assert torch.isfinite({rows}).all()",
            f"NEW_r = {rows}.to(torch.float64, copy=True)", f"seen.append(({rows} if y.sum() > 3 else {r2}).amax())",
            "ma.head.weight.grad = None", "ma.head.bias.requires_grad_(not ma.head.bias.requires_grad)",
            "ma.eval(); mb.train()",
            f"seen.append(torch.linalg.vector_norm({rows}))",
            f"seen.append([t.item() for t in {rows}.detach().flatten()[:3]])",
        ]  # fmt: skip
        text = self.random.choice(choices)
        for kind in "rsn":
            text = text.replace(f"NEW_{kind}", self.new(kind)) if f"NEW_{kind}" in text else text
        self.say(text)

    def inside(self):
        """Statements under a setting, in a generator, in a helper, or around an exception."""
        if self.depth > 2:
            return self.read()
        r, k = self.random.random(), self.random.randrange(2)
        if r < 0.5:
            self.block(self.random.choice([
                "with torch.no_grad():", "with torch.enable_grad():", "with torch.set_grad_enabled(False):",
                'with torch.autocast("cpu", dtype=torch.bfloat16):', 'with torch.autocast("cpu", enabled=False):',
                "with torch.autograd.graph.save_on_cpu():", "with torch.random.fork_rng():",
                "with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):",
                "with contextlib.suppress(ZeroDivisionError):",
                "with torch.autograd.set_multithreading_enabled(False):",
            ]), lambda: self.statements(self.random.randrange(1, 4)))  # fmt: skip
        elif r < 0.65:
            name = self.new("r")
            self.say(f"for {name} in (m(t) for m in [a, a] for t in x[{k}:]):")
            self.depth += 1
            self.statements(2)
            self.depth -= 1
        elif r < 0.85:
            failing = ["raise ValueError", "1 / 0", f"{self.old('r')}.view(8, 8)", "pass"]
            self.block("try:", lambda: (self.call(), self.statements(2), self.say(self.random.choice(failing))))
            self.block("except (ValueError, ZeroDivisionError, RuntimeError) as error:", lambda: (
                self.say("if type(error) is RuntimeError and 'invalid for input of size' not in str(error): raise"),
                self.say("seen.append(len(type(error).__name__))"),
            ))  # fmt: skip
            if self.random.random() < 0.3:
                self.block("finally:", self.read)
        else:
            rows, name = self.old("r"), self.new("r")
            self.count += 1
            helper = f"helper{self.count}"
            self.say(f"def {helper}(t, scale=2):")
            self.say(f"    kept = t * scale + {rows}" if self.random.random() < 0.5 else "    kept = t * scale")
            self.say("    return kept - kept.mean()")
            self.statements(1)
            self.say(f"{name} = {helper}({self.old('r')})")
