"""From rows to a loss: which rows are read, and what is made of them."""

from __future__ import annotations

from .draw import Draw, outer, slot
from .masks import number

# A scalar from {x} (B, N, D) and {l} (B, N, V), its logits; {v} and {n} say which rows count.
OVER_ROWS = slot(
    "loss",
    {
        "ce-ignore": "F.cross_entropy({l}.flatten(0, 1), tgt.flatten(), ignore_index=0)",
        "ce-labels": "F.cross_entropy({l}.reshape(-1, V), lab.reshape(-1))",
        "ce-sum": "F.cross_entropy({l}.flatten(0, 1), tgt.flatten(), ignore_index=0, reduction='sum')",
        "ce-transposed": "F.cross_entropy({l}.transpose(1, 2), tgt, ignore_index=0)",
        "ce-none": "(F.cross_entropy({l}.flatten(0, 1), tgt.flatten(), reduction='none') * {v}.flatten()).sum()",
        "ce-none-transposed": (
            "(F.cross_entropy({l}.transpose(1, 2), tgt, reduction='none') * {n}).sum() / {n}.sum().clamp(min=1)"
        ),
        "ce-ids": "F.cross_entropy({l}.flatten(0, 1), ids.flatten(), ignore_index={pad})",
        "ce-smoothed": "F.cross_entropy({l}.flatten(0, 1), tgt.flatten(), ignore_index=0, label_smoothing=0.1)",
        "ce-weight": "F.cross_entropy({l}.flatten(0, 1), tgt.flatten(), E[:, 0].abs().detach(), ignore_index=0)",
        "ce-weight-smoothed": (
            "F.cross_entropy({l}.flatten(0, 1), lab.flatten(), torch.arange(V) + 1.0, label_smoothing=0.2)"
        ),
        "ce-soft": "(F.cross_entropy({l}.flatten(0, 1), soft.flatten(0, 1), reduction='none') * {v}.flatten()).sum()",
        "ce-soft-mean": "F.cross_entropy(({l} * {v}[..., None]).transpose(1, 2), soft.transpose(1, 2))",
        "ce-masked-labels": "F.cross_entropy({l}.flatten(0, 1), tgt.masked_fill(~{v}, -100).flatten())",
        "ce-where-labels": "F.cross_entropy({l}.flatten(0, 1), torch.where({v}, ids, -100).flatten())",
        "ce-shifted": "F.cross_entropy({l}[:, :-1].flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)",
        "ce-shifted-ids": "F.cross_entropy({l}[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1), ignore_index={pad})",
        "ce-far-slice": "F.cross_entropy({l}[:, -10:-1].flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)",
        "ce-classes-first": (
            "(F.cross_entropy({l}.permute(2, 0, 1)[None].transpose(0, 1).permute(1, 0, 2, 3), tgt[None], "
            "reduction='none') * {v}).sum()"
        ),
        "ce-extra-dim": (
            "(F.cross_entropy({l}.unflatten(-1, (3, V // 3)).permute(3, 2, 0, 1), (ids % 3)[None].expand(V // 3, "
            "B, N), reduction='none') * {v}).sum()"
        ),
        "ce-extra-after": (
            "(F.cross_entropy({l}.unflatten(-1, (3, V // 3)).permute(0, 2, 1, 3), (ids % 3)[..., None].expand(B, "
            "N, V // 3), reduction='none') * {v}[..., None]).sum()"
        ),
        "ce-extra-ignored": (
            "F.cross_entropy({l}.unflatten(-1, (3, V // 3)).permute(3, 2, 0, 1), torch.where({v}, ids % 3, "
            "-100)[None].expand(V // 3, B, N))"
        ),
        "nll-extra": (
            "F.nll_loss({l}.unflatten(-1, (3, V // 3)).permute(3, 2, 0, 1).log_softmax(1), torch.where({v}, ids "
            "% 3, -100)[None].expand(V // 3, B, N), reduction='sum')"
        ),
        "ce-boolean": "F.cross_entropy({l}[{v}], tgt[{v}])",
        "ce-nonzero": (
            "F.cross_entropy({l}.flatten(0, 1)[{v}.flatten().nonzero().squeeze(1)], "
            "tgt.flatten()[{v}.flatten().nonzero().squeeze(1)])"
        ),
        "nll": "F.nll_loss({l}.log_softmax(-1).flatten(0, 1), tgt.flatten(), ignore_index=0)",
        "nll-weight": "F.nll_loss(F.log_softmax({l}, -1).transpose(1, 2), lab, torch.arange(V) + 0.5)",
        "nll-gather": "-({l}.log_softmax(-1).gather(-1, tgt[..., None]).squeeze(-1) * {n}).sum()",
        "log-take": (
            "-(torch.take_along_dim({l}.log_softmax(-1), tgt[..., None], -1)[..., 0]).masked_fill(~{v}, "
            "0.0).sum() / lens.sum().clamp(min=1)"
        ),
        "logsumexp": "({l}.logsumexp(-1) * {n}).sum()",
        "logsumexp-where": "torch.where({v}, {l}.logsumexp(-1), 0.0).sum()",
        "logsumexp-over-rows": (
            "({l}.masked_fill(~{v}[..., None], float('-inf')).logsumexp(1) * (lens > 0)[:, "
            "None]).nan_to_num(neginf=0.0).sum()"
        ),
        "sum": "({x} * {v}[..., None]).sum()",
        "square": "(({x} * {n}[..., None]) ** 2).mean()",
        "select": "{x}[{v}].pow(2).sum()",
        "masked-select": "{x}.masked_select({v}[..., None]).tanh().sum()",
        "masked-select-expanded": (
            "{x}.flatten(0, 1).masked_select(({v} & (tgt % 3 != 1)).flatten()[:, None].expand(B * N, D)).tanh().sum()"
        ),
        "select-both": "{x}[{v} & (tgt % 3 != 1)].pow(2).sum()",
        "weights": "({l}.logsumexp(-1) * wts).sum() / wts.sum().clamp(min=1)",
        "mean-valid": "({l}.logsumexp(-1) * {n}).sum() / {n}.sum().clamp(min=1)",
        "bce": (
            "(F.binary_cross_entropy_with_logits(({x} * F.embedding(tgt, E2)).sum(-1), y, reduction='none') * "
            "{v}).sum()"
        ),
        "bce-weight": "F.binary_cross_entropy_with_logits({x} @ w, y, weight={n}.double())",
        "bce-weight-sum": (
            "F.binary_cross_entropy(({x} @ w).sigmoid(), y, weight={n}.double(), reduction='sum')"
            " / {n}.sum().clamp(min=1)"
        ),
        "bce-weight-given": "F.binary_cross_entropy_with_logits({x} @ w, y, weight=wts)",
        "bce-pos": (
            "(F.binary_cross_entropy_with_logits({x} @ w, y, pos_weight=temp.detach(), reduction='none') * {n}).mean()"
        ),
        "bce-sigmoid": (
            "(F.binary_cross_entropy(({x} @ w).sigmoid(), y, reduction='none')).masked_fill(~{v}, 0.0).sum()"
        ),
        "bce-pairs": (
            "(-F.logsigmoid(({x} * E[tgt]).sum(-1)) - F.logsigmoid(-({x} * E[neg[..., 0]]).sum(-1)))[{v}].sum()"
        ),
        "bpr": "-(F.logsigmoid(({x}[:, :, None] * (E[tgt][:, :, None] - E[neg])).sum(-1)) * {v}[..., None]).sum()",
        "sampled": (
            "(torch.cat([({x} * E[tgt]).sum(-1, keepdim=True), torch.einsum('bnd,bnkd->bnk', {x}, E[neg])], "
            "-1).log_softmax(-1)[..., 0] * -{n}).sum()"
        ),
        "sampled-shared": (
            "(torch.cat([({x} * E[tgt]).sum(-1, keepdim=True), ({x} @ E[shared].T).masked_fill(tgt[..., None] == "
            "shared, -1e9)], -1).log_softmax(-1)[..., 0] * -{n}).sum()"
        ),
        "mse": "(F.mse_loss({x}, F.embedding(tgt, E2), reduction='none').mean(-1) * {n}).sum()",
        "mse-zeroed": "F.mse_loss({x} * {v}[..., None], feats)",
        "mse-both-zeroed": "F.mse_loss({x} * {v}[..., None], E[tgt] * {v}[..., None], reduction='sum')",
        "huber-both-zeroed": "F.smooth_l1_loss(({x} @ w) * {v}, y * {v}, reduction='sum', beta=0.3)",
        "huber": "(F.smooth_l1_loss({x} @ w, y, reduction='none', beta=0.3) * {v}).sum()",
        "kl": "(F.kl_div({l}.log_softmax(-1), soft, reduction='none').sum(-1) * {v}).sum()",
        "kl-batch": "F.kl_div({l}.log_softmax(-1) * {v}[..., None], soft, reduction='batchmean')",
        "cosine": "((1 - F.cosine_similarity({x}, F.embedding(tgt, E2), -1)) * {v}).sum()",
        "in-batch": "F.cross_entropy((({x} * {v}[..., None]).sum(1) @ F.embedding(label, E2).T), torch.arange(B))",
        "floor-mask": (
            "({l}.logsumexp(-1) * {v}.double().div(2, rounding_mode='floor')).sum() + ({x} * {v}[..., None]).sum()"
        ),
        "permuted-by-column": (
            "((({x} + {P}[perm]) * {v}[..., None]).index_select(1, perm) @ Q * torch.arange(1, N + 1)[:, None]).sum()"
        ),
        "by-column": "({x} * torch.arange(1, N + 1)[:, None]).sum()",
        "alpha": "torch.add(({x} * {v}[..., None]).sum(), {l}.logsumexp(-1)[{v}].sum(), alpha=0.5)",
        "everything": "{l}.logsumexp(-1).mean()",
        "gumbel-less": "({l}.softmax(-1).max(-1).values * {n}).sum()",
        "entropy": "-(({l}.softmax(-1) * {l}.log_softmax(-1)).sum(-1) * {v}).sum()",
        "half-loss": "({l}.logsumexp(-1).half().double() * {n}).sum()",
        "int-count": "({l}.logsumexp(-1) * {v}).sum() / {v}.sum().clamp(min=1).int()",
        "norm": "(({x} * {v}[..., None]).norm(dim=-1) + 1e-3).log().mul({n}).sum()",
        "ce-ignore-other": "F.cross_entropy({l}.flatten(0, 1), tgt.flatten(), ignore_index=2)",
        "ce-by-sequence": (
            "((F.cross_entropy({l}.flatten(0, 1), tgt.flatten(), reduction='none').view(B, N) * {n}).sum(1) / "
            "{n}.sum(1).clamp(min=1)).mean()"
        ),
        "ce-discounted": (
            "(F.cross_entropy({l}.transpose(1, 2), tgt, reduction='none', ignore_index=0) * 0.9 ** "
            "torch.arange(N)).sum()"
        ),
        "ce-over-labels": (
            "F.cross_entropy({l}.flatten(0, 1), tgt.flatten(), ignore_index=0, reduction='sum') / (tgt != "
            "0).sum().clamp(min=1)"
        ),
        "ce-two-shifts": (
            "F.cross_entropy({l}[:, :-1].flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0, reduction='sum') + "
            "F.cross_entropy({l}[:, :-2].flatten(0, 1), tgt[:, 2:].flatten(), ignore_index=0, reduction='sum') * 0.3"
        ),
        "ce-half": "F.cross_entropy({l}.flatten(0, 1).half(), lab.flatten()).double()",
        "ce-float": "F.cross_entropy({l}.float().flatten(0, 1), lab.flatten()).double()",
        "ce-clamped": "F.cross_entropy({l}.flatten(0, 1), (ids - 1).clamp(min=-1).flatten(), ignore_index=-1)",
        "ce-rows-by-index": (
            "F.cross_entropy({l}.flatten(0, 1).index_select(0, {v}.flatten().nonzero().flatten()), "
            "tgt.flatten().index_select(0, {v}.flatten().nonzero().flatten()))"
        ),
        "ce-where-logits": "F.cross_entropy(torch.where({v}[..., None], {l}, 0.0).flatten(0, 1), tgt.flatten())",
        "in-batch-rows": (
            "F.cross_entropy(({x} @ E[tgt].flatten(0, 1).T).flatten(0, 1), torch.where({v}.flatten(), "
            "torch.arange(B * N), -100))"
        ),
        "in-batch-masked": (
            "F.cross_entropy(({x} @ E[tgt].flatten(0, 1).T).masked_fill(~{v}.flatten(), -1e9).flatten(0, 1), "
            "torch.where({v}.flatten(), torch.arange(B * N), -100))"
        ),
        "triplet": "(F.triplet_margin_loss({x}, E[tgt], E[neg[..., 0]], reduction='none') * {v}).sum()",
        "focal": (
            "(((1 - {l}.softmax(-1).gather(-1, tgt[..., None])) ** 2 * -{l}.log_softmax(-1).gather(-1, tgt[..., "
            "None])).squeeze(-1) * {v}).sum()"
        ),
        "contrastive": (
            "-(F.normalize({x}, dim=-1) @ F.normalize(E, dim=-1).T / 0.2).log_softmax(-1).gather(-1, tgt[..., "
            "None]).squeeze(-1).masked_fill(~{v}, 0.0).sum()"
        ),
        "byte-weights": "({l}.logsumexp(-1) * ({v}.byte() * 200 + {v}.byte() * 100)).sum()",
        "smooth": "(({x}[:, 1:] - {x}[:, :-1]).square().sum(-1) * ({v}[:, 1:] & {v}[:, :-1])).sum()",
        "pairs-of-rows": "((({x} @ {x}.mT).sigmoid()) * ({v}[:, :, None] & {v}[:, None, :])).sum()",
        "l1": "(F.l1_loss({x}, F.embedding(tgt, E2), reduction='none').mean(-1) * {n}).sum()",
        "huber-delta": "(F.huber_loss({x} @ w, y, reduction='none', delta=0.3) * {v}).sum()",
        "nll-turned": "F.nll_loss({l}.log_softmax(-1).mT, lab)",
        "margin-ranking": (
            "(F.margin_ranking_loss({x} @ w, ({x} * E[neg[..., 0]]).sum(-1), y * 2 - 1, reduction='none') * {v}).sum()"
        ),
        "soft-margin": "(F.soft_margin_loss({x} @ w, y * 2 - 1, reduction='none') * {n}).sum()",
        "gaussian": "(F.gaussian_nll_loss({x} @ w, y, ({x} @ gain).square() + 1, reduction='none') * {v}).sum()",
        "poisson": "(F.poisson_nll_loss({x} @ w, y, reduction='none') * {v}).sum()",
        "piece-and-mask": "{x}.chunk(5, 1)[-1][:, 0].tanh().sum() + {x}[{v}].square().sum()",
        "row-and-mask": "{x}[:, N // 2].tanh().sum() + ({x} * {v}[..., None]).square().sum()",
        "candidates": "-(({x}[:, :, None] @ E[neg].mT).squeeze(2).log_softmax(-1)[..., 0] * {v}).sum()",
        "multi-margin": (
            "(F.multi_margin_loss({l}.flatten(0, 1), tgt.flatten(), reduction='none') * {v}.flatten()).sum()"
        ),
    },
)
COMMON_LOSS = (
    "ce-ignore", "ce-labels", "ce-none", "ce-masked-labels", "logsumexp", "nll-gather", "sum", "square", "bce",
    "sampled", "ce-shifted", "weights", "mean-valid", "ce-boolean",
)  # fmt: skip

# (B, D) or (B, K, D) from {x}: fewer rows than there are.
READOUT = slot(
    "readout",
    {
        "last": "{x}[torch.arange(B), last]",
        "last-lens": "{x}[torch.arange(B), (lens - 1).clamp(min=0)]",
        "last-negative": "{x}[torch.arange(B), lens - 1]",
        "gather": "{x}.gather(1, last[:, None, None].expand(B, 1, D)).squeeze(1)",
        "gather-lens": "{x}.gather(1, (lens - 1)[:, None, None].expand(B, 1, D)).squeeze(1)",
        "take": "torch.take_along_dim({x}, last[:, None, None], 1)[:, 0]",
        "first": "{x}[:, 0]",
        "last-column": "{x}[:, -1]",
        "select": "{x}.select(1, -1)",
        "one-hot": "(F.one_hot(last, N).double()[:, None] @ {x})[:, 0]",
        "slots": "{x}.gather(1, idx[..., None].expand(B, K, D)).sum(1)",
        "slots-fancy": "{x}[torch.arange(B)[:, None], idx].mean(1)",
        "masked-mean": "({x} * {n}[..., None]).sum(1) / {n}.sum(1).clamp(min=1)[:, None]",
        "masked-sum": "({x} * {v}[..., None]).sum(1)",
        "sum": "{x}.sum(1)",
        "mean": "{x}.mean(1)",
        "max": "{x}.masked_fill(~{v}[..., None], -1e9).max(1).values",
        "amax-zero": "({x} * {v}[..., None]).amax(1)",
        "softmax-pool": "(({x} @ w).masked_fill(~{v}, -1e9).softmax(1)[..., None] * {x}).sum(1)",
        "softmax-pool-inf": "(({x} @ w).masked_fill(~{v}, float('-inf')).softmax(-1).unsqueeze(1) @ {x}).squeeze(1)",
        "softmax-pool-raw": "(({x} @ w).softmax(1)[..., None] * {x}).sum(1)",
        "softmax-pool-few": "(({x} @ w).masked_fill(~{v}, -1e9).softmax(1)[..., None] * {x})[:, 0]",
        "softmax-pool-last": "(({x} @ w).masked_fill(~{v}, -1e9).softmax(1)[..., None] * {x})[torch.arange(B), last]",
        "softmax-gathered": "({x} @ w).masked_fill(~{v}, -1e9).softmax(1).gather(1, idx) @ torch.ones(K, D)",
        "log-softmax-gathered": (
            "({x} @ w).masked_fill(~{v}, float('-inf')).log_softmax(1).gather(1, last[:, None]) * gain"
        ),
        "cumsum-last": "({x} * {v}[..., None]).cumsum(1)[torch.arange(B), last]",
        "cumsum-slots": "({x} * {v}[..., None]).cumsum(1).gather(1, idx[..., None].expand(B, K, D)).sum(1)",
        "sigmoid-pool": "(({x} @ w).sigmoid()[..., None] * {x} * {v}[..., None]).sum(1)",
        "top-rows": "({x} * {v}[..., None]).topk(1, 1).values[:, 0]",
        "variance": "({x} * {v}[..., None]).var(1, unbiased=False)",
        "logsumexp": "{x}.masked_fill(~{v}[..., None], -1e9).logsumexp(1)",
        "index-select": "{x}.index_select(1, perm[:1])[:, 0]",
        "slice": "{x}[:, -3:].mean(1)",
        "far-slice": "{x}[:, -10:-1].sum(1)",
        "median": "{x}.median(1).values",
        "bag-of-last": "({x} * (torch.arange(N) == last[:, None])[..., None]).sum(1)",
        "argmax": "{x}[torch.arange(B), ({x} @ w).masked_fill(~{v}, -1e9).argmax(1)]",
        "cat-last": "torch.cat([{x}[:, :1], {x}[:, -1:]], 1).mean(1)",
        "softmax-shifted": "(({x} @ w).masked_fill(~{v}, -1e9).softmax(1)[:, 1:, None] * {x}[:, 1:]).sum(1)",
        "lens-divided": "({x} * {v}[..., None]).sum(1) / lens.clamp(min=1)[:, None]",
        "flip-first": "{x}.flip(1)[:, 0]",
        "count": "{x}[:, 0] * {v}.sum(1, keepdim=True)",
        "norm": "({x} * {v}[..., None]).norm(dim=1)",
        "prod": "(1 + 0.1 * {x} * {v}[..., None]).prod(1)",
        "index-add": "torch.zeros(B, D).index_add(0, {v}.nonzero()[:, 0], {x}[{v}])",
        "last-valid": "{x}[torch.arange(B), (torch.arange(N) * {v}).argmax(1)]",
        "last-two": "{x}.gather(1, (last[:, None] - torch.arange(2)).clamp(min=0)[..., None].expand(B, 2, D)).mean(1)",
        "first-valid": "{x}.gather(1, {v}.long().argmax(1)[:, None, None].expand(B, 1, D))[:, 0]",
        "fancy-minus-one": "{x}[torch.arange(B), torch.full((B,), -1)]",
        "einsum-mean": "torch.einsum('bn,bnd->bd', {n}.double() / {n}.sum(1, keepdim=True).clamp(min=1), {x})",
        "matmul-mask": "({n}.double().unsqueeze(1) @ {x}).squeeze(1)",
        "bmm-mask": "torch.bmm({x}.transpose(1, 2), {n}.double().unsqueeze(2)).squeeze(2)",
        "nanmean": "{x}.masked_fill(~{v}[..., None], float('nan')).nanmean(1).nan_to_num()",
        "sorted": "({x} * {v}[..., None]).sort(1).values[:, -1]",
        "quantile": "({x} * {v}[..., None]).quantile(0.5, dim=1)",
        "attention-of-label": (
            "((F.embedding(label, E2)[:, None] @ {x}.mT).masked_fill(~{v}[:, None], -1e9).softmax(-1) @ {x})[:, 0]"
        ),
        "weighted": "({x} * wts[..., None]).sum(1) / wts.sum(1, keepdim=True).clamp(min=1e-3)",
        "decayed": "({x} * {v}[..., None] * 0.8 ** (N - 1 - torch.arange(N))[:, None]).sum(1)",
        "piece": "{x}.chunk(3, 1)[-1][:, 0]",
        "piece-each": "{x}.chunk(N, 1)[0].squeeze(1)",
        "piece-of-sizes": "{x}.split([N - 1, 1], 1)[1][:, 0]",
        "pieces-summed": "{x}.split([1, N - 1], 1)[1].sum(1) + {x}.tensor_split(2, 1)[0].sum(1)",
        "piece-masked": "({x} * {v}[..., None]).chunk(2, 1)[-1].sum(1)",
        "unbound": "{x}.unbind(1)[N // 2]",
        "narrowed": "{x}.narrow(1, N - 1, 1)[:, 0]",
        "selected": "{x}.select(1, N // 2)",
        "one-column": "{x}[:, N // 2:N // 2 + 1].sum(1)",
        "last-three-kept": "{x}[:, -3:].tanh().sum(1)",
        "first-kept": "{x}[:, :1].tanh().flatten(1)",
        "last-column-kept": "{x}[:, -1:].flatten(1)",
        "given-pairs": "{x}[each, last]",
        "given-flat": "{x}.flatten(0, 1)[flat]",
        "given-flat-select": "{x}.reshape(-1, D).index_select(0, flat)",
        "given-expanded": "{x}.gather(1, lastx).squeeze(1)",
        "given-slots-expanded": "{x}.gather(1, idxx).sum(1)",
        "given-slots-flat": "{x}.flatten(0, 1)[each[:, None] * N + idx].sum(1)",
        "right-if-zero": "(({x} @ w).sigmoid()[..., None] * {x}).sum(1)",
        "top-rows-masked": (
            "{x}.gather(1, ({x} @ w).masked_fill(~{v}, -1e9).topk(1, 1).indices[..., None].expand(B, 1, D)).sum(1)"
        ),
        "top-values-masked": "{x}.masked_fill(~{v}[..., None], -1e9).topk(1, 1).values.clamp(min=-9).sum(1)",
        "max-pool": "F.max_pool1d({x}.masked_fill(~{v}[..., None], -1e9).mT, N).squeeze(-1).clamp(min=-9)",
        "click": (
            "((torch.cat([{x}, {x} * F.embedding(label, E2)[:, None], {x} - F.embedding(label, E2)[:, None]], -1)"
            " @ Win).relu() @ w).masked_fill(~{v}, 0.0).unsqueeze(1).matmul({x}).squeeze(1)"
        ),
        "click-softmax": (
            "(({x} * F.embedding(label, E2)[:, None]).sum(-1).masked_fill(~{v}, -2.0**32 + 1).softmax(-1)[..., None]"
            " * {x}).sum(1)"
        ),
        "minimum": "{x}.masked_fill(~{v}[..., None], 1e9).amin(1).clamp(max=9)",
    },
)
COMMON_READOUT = (
    "last",
    "last-lens",
    "gather",
    "masked-mean",
    "masked-sum",
    "softmax-pool",
    "last-column",
    "slots",
    "max",
    "take",
)

# A scalar from {r} (B, D).
OVER_SEQUENCES = slot(
    "loss-of-sequences",
    {
        "ce": "F.cross_entropy({r} @ W, label)",
        "ce-sum": "F.cross_entropy({r} @ W, label, reduction='sum')",
        "ce-smoothed": "F.cross_entropy({r} @ W, label, label_smoothing=0.1)",
        "ce-of-full": "(F.cross_entropy({r} @ W, label, reduction='none') * (lens > 0)).sum()",
        "in-batch": "F.cross_entropy({r} @ F.embedding(label, E2).T, torch.arange(B))",
        "square": "{r}.square().sum()",
        "bce": "F.binary_cross_entropy_with_logits(({r} * F.embedding(label, E2)).sum(-1), (label % 2).double())",
        "sum": "{r}.sum()",
        "candidates": "({r} @ E[shared].T).log_softmax(-1)[:, 0].neg().mean()",
        "log": "({r}.sigmoid() + 1e-3).log().mean()",
    },
)


# What a training step reports beside its loss, from {x}, {l}, {v}, {n}.
METRICS = slot(
    "metric",
    {
        "right": "(({l}.argmax(-1) == tgt) & {v}).sum()",
        "right-share": "(({l}.argmax(-1) == tgt) * {n}).sum() / {n}.sum().clamp(min=1)",
        "right-each": "({l}.argmax(-1) == tgt) & {v}",
        "hits": "(({l}.topk(2, -1).indices == tgt[..., None]).any(-1) & {v}).sum()",
        "rank": "((({l} > {l}.gather(-1, tgt[..., None])).sum(-1) < 2) & {v}).double().sum()",
        "best": "{l}.detach().max(-1).values.masked_select({v}).sum()",
        "above-zero": "(({x} @ w).detach() > 0).logical_and({v}).sum(1)",
        "loss-each": "(F.cross_entropy({l}.transpose(1, 2), tgt, reduction='none') * {v}).detach()",
        "hits-of-last": "({l}[torch.arange(B), last].topk(2, -1).indices == label[:, None]).any(-1).double().mean()",
        "norm": "({x} * {v}[..., None]).detach().norm()",
    },
)


def metric(g: Draw, x: str, v: str) -> str:
    text = g.word("metric", METRICS)
    n = number(g, v) if "{n}" in text else ""
    logits = g.let("l", f"{x} @ W") if "{l}" in text else ""
    return g.let("metric", text.format(x=x, l=logits, v=v, n=n))


def over_rows(g: Draw, x: str, v: str) -> str:
    text = g.word("loss", OVER_ROWS, COMMON_LOSS, 0.5)
    n = number(g, v) if "{n}" in text else ""
    logits = g.let("l", g.one(f"{x} @ W", f"{x} @ W", f"{x} @ E.T", f"F.linear({x}, E)")) if "{l}" in text else ""
    return g.let("loss", text.format(x=x, l=logits, v=v, n=n, pad=g.sizes.pad, P=outer(g.columns("P"))))


def over_sequences(g: Draw, x: str, v: str) -> str:
    text = g.word("readout", READOUT, COMMON_READOUT, 0.5)
    n = number(g, v) if "{n}" in text else ""
    r = g.let("r", text.format(x=x, v=v, n=n))
    return g.let("loss", g.word("loss-of-sequences", OVER_SEQUENCES).format(r=r))
