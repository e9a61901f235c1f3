"""What rows are made from and what happens to them between attentions: row by row, moved, reduced and spread again."""

from __future__ import annotations

from .draw import Draw, outer, slot
from .masks import number, valid

# (B, N, D); {e} is E or another table.
ENTRY = slot(
    "entry",
    {
        "embedding": "F.embedding(ids, E)",
        "padding-idx": "F.embedding(ids, E, padding_idx={pad})",
        "index": "E[ids]",
        "by-frequency": "F.embedding(ids, E, scale_grad_by_freq=True)",
        "one-hot": "F.one_hot(ids, V).double() @ E",
        "flat": "E.index_select(0, ids.flatten()).view(B, N, D)",
        "flat-lookup": "F.embedding(ids.reshape(-1), E).reshape(B, N, D)",
        "positions": "F.embedding(ids, E) + {P}",
        "given-positions": "F.embedding(ids, E) + {P}[pos]",
        "position-lookup": "F.embedding(ids, E) + F.embedding(torch.arange(N).expand(B, N), {P})",
        "scaled": "F.embedding(ids, E) * D ** 0.5",
        "positions-permuted": "(F.embedding(ids, E) + {P}[perm]) * (ids != {pad})[..., None]",
        "two-tables": "F.embedding(ids, E) + F.embedding(tgt, E2)",
        "features": "feats @ Q",
        "features-added": "F.embedding(ids, E) + feats",
        "raw-features": "F.embedding(ids, E) + raw @ Q",
        "raw-masked": "F.embedding(ids, E) + (raw * mask[..., None]) @ Q",
        "raw-filled": "F.embedding(ids, E) + raw.masked_fill(~mask[..., None], 0.0)",
        "features-times": "F.embedding(ids, E) * feats",
        "clamped-ids": "F.embedding(ids.clamp(max=V - 1), E)",
        "shifted-ids": "F.embedding(F.pad(ids[:, :-1], (1, 0)), E)",
        "bag": "F.embedding(neg, E).mean(2)",
        "bag-masked": "(F.embedding(neg, E) * (neg > 2)[..., None]).sum(2)",
        "renormed": "F.normalize(F.embedding(ids, E), dim=-1)",
        "int32": "F.embedding(ids.int(), E)",
        "concatenated": "torch.cat([F.embedding(ids, E)[..., :D // 2], feats[..., D // 2:]], -1)",
        "weights": "F.embedding(ids, E) * wts[..., None]",
        "time-first": "F.embedding(ids.T, E).transpose(0, 1)",
        "zero-row": "F.embedding(ids, torch.cat([torch.zeros(1, D), E[1:]]))",
        "take": "torch.take_along_dim(E, ids.reshape(-1, 1).expand(-1, D), 0).view(B, N, D)",
        "gathered": "E.gather(0, ids.reshape(-1, 1).expand(-1, D)).view(B, N, D)",
        "byte-ids": "F.embedding(ids.byte().long(), E)",
        "hashed": "F.embedding((ids * 7 + 3) % V, E)",
        "of-pairs": "F.embedding(ids * (V - 1) // V, E) + F.embedding(pos % V, E2)",
        "bag-function": "F.embedding_bag(neg.flatten(0, 1), E, mode='sum').view(B, N, D)",
        "positions-from-the-end": "F.embedding(ids, E) + {P}[(lens[:, None] - 1 - torch.arange(N)).clamp(0, N - 1)]",
        "positions-counted": "F.embedding(ids, E) + {P}[((ids != {pad}).cumsum(1) - 1).clamp(min=0)]",
        "negative-index": "E[ids - V]",
        "half": "F.embedding(ids, E.half()).double()",
    },
)
COMMON_ENTRY = ("embedding", "embedding", "padding-idx", "index", "positions", "given-positions", "features-added")

ZEROED = slot(
    "zeroed",
    {
        "times": "{x} * {n}[..., None]",
        "fill": "{x}.masked_fill(~{v}[..., None], 0.0)",
        "where": "torch.where({v}[..., None], {x}, 0.0)",
        "times-unsqueeze": "{x} * {v}.unsqueeze(-1)",
        "in-place": "{x}.clone().mul_({v}[..., None])",
        "floored": "{x} * {v}.double().div(2, rounding_mode='floor')[..., None]",
        "assigned": "torch.where({v}[..., None], {x}, torch.zeros_like({x}))",
        "minus": "{x} - {x} * (~{v})[..., None]",
        "fill-other": "{x}.masked_fill(~{v}[..., None], 0.5)",
        "or-parameter": "torch.where({v}[..., None], {x}, w)",
        "or-itself": "torch.where({v}[..., None], {x} @ Q, {x}.tanh())",
        "shown-elsewhere": "torch.where({v}[..., None], 0.3, {x})",
        "minus-infinity": "{x}.masked_fill(~{v}[..., None], float('-inf')).clamp(min=-5)",
        "index-put": "{x}.index_put(((~{v}).nonzero(as_tuple=True)), torch.zeros(()))",
    },
)

# (B, N, D) from {x}, row by row.
ROWWISE = slot(
    "rowwise",
    {
        "linear": "{x} @ Q",
        "linear-function": "F.linear({x}, O, off)",
        "relu": "({x} @ Q).relu()",
        "gelu": "F.gelu({x})",
        "gelu-tanh": "F.gelu({x}, approximate='tanh')",
        "silu": "F.silu({x} @ Kw)",
        "layer-norm": "F.layer_norm({x}, (D,), gain, off)",
        "layer-norm-eps": "F.layer_norm({x}, (D,), eps=0.5)",
        "rms": "F.rms_norm({x}, (D,), gain)",
        "rms-by-hand": "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "gate": "{x} * torch.sigmoid({x} @ Q)",
        "residual": "{x} + F.relu({x} @ Kw) @ Vw",
        "softmax": "{x}.softmax(-1)",
        "dropout": "F.dropout({x}, 0.0)",
        "normalize": "F.normalize({x}, dim=-1)",
        "add-alpha": "torch.add({x}, {x} @ Q, alpha=0.5)",
        "rsub": "torch.rsub({x}, 1.0, alpha=2)",
        "floor-div": "torch.div({x} * 3, 0.5, rounding_mode='floor') + {x}",
        "floor-div-zero": "torch.div({x}, 2, rounding_mode='trunc') + {x}",
        "half": "{x}.half().double() + {x}",
        "float": "({x}.float() @ Q.float()).double()",
        "clamp": "{x}.clamp(-1, 1)",
        "pow": "{x}.pow(3) * 0.2",
        "cos": "{x}.cos()",
        "exp": "({x} * 0.3).exp()",
        "sort": "{x}.sort(-1).values",
        "sort-stable": "torch.sort({x}, dim=-1, stable=True)[0]",
        "topk": "{x}.topk(1, -1).values * {x}",
        "cumsum": "{x}.cumsum(-1)",
        "flip-features": "{x}.flip(-1)",
        "roll-features": "{x}.roll(1, -1)",
        "gather-features": "{x}.gather(-1, (ids % D)[..., None].expand(B, N, D))",
        "chunk": "torch.cat({x}.chunk(2, -1)[::-1], -1)",
        "slice-features": "F.pad({x}[..., 1:], (0, 1))",
        "select-features": "{x}.index_select(-1, torch.arange(D - 1, -1, -1))",
        "pick-negative": "{x}[..., [-1] * D]",
        "mean-features": "{x} - {x}.mean(-1, keepdim=True)",
        "max-features": "{x} * {x}.amax(-1, keepdim=True)",
        "var-features": "{x} / ({x}.var(-1, keepdim=True, unbiased=False) + 1)",
        "logsumexp-features": "{x} - {x}.logsumexp(-1, keepdim=True)",
        "glu": "F.glu(torch.cat([{x}, {x} @ Q], -1))",
        "addcmul": "torch.addcmul({x}, {x}, {x}, value=0.5)",
        "addcdiv": "torch.addcdiv({x}, {x}, {x}.square() + 1, value=2)",
        "lerp": "torch.lerp({x}, {x} @ Q, 0.3)",
        "maximum": "torch.maximum({x}, {x} @ Q)",
        "where-positive": "torch.where({x} > 0, {x}, {x} * 0.1)",
        "nan-to-num": "{x}.nan_to_num()",
        "einsum": "torch.einsum('bnd,de->bne', {x}, Q)",
        "flattened": "({x}.flatten(0, 1) @ Q).view(B, N, D)",
        "flattened-otherwise": "({x}.transpose(0, 1).reshape(N * B, D) @ Q).view(N, B, D).transpose(0, 1)",
        "heads": "{x}.view(B, N, -1, 2).flip(-1).reshape(B, N, D)",
        "detached": "{x}.detach() * 0.5 + {x}",
        "prelu": "F.prelu({x}, temp.reshape(1))",
        "hardswish": "F.hardswish({x})",
        "softplus": "F.softplus({x}, beta=2, threshold=1)",
        "elu": "F.elu({x}, alpha=0.5)",
        "leaky": "F.leaky_relu({x}, 0.3)",
        "cosine": "{x} * F.cosine_similarity({x}, {x} @ Q, dim=-1)[..., None]",
        "select-scatter": "{x}.select_scatter({x}[..., 0] * 2, -1, 0)",
        "views-of-views": "{x}.view(B, N, D, 1).transpose(1, 2).flatten(2).view(B, D, N).mT",
        "features-first": "{x}.permute(2, 0, 1).reshape(D, B * N).t().view(B, N, D)",
        "widened-and-back": "{x}[:, :, None].expand(B, N, 3, D).reshape(B, N * 3, D)[:, ::3]",
        "diagonal": "({x} @ Q)[:, :, None].expand(B, N, N, D).diagonal(dim1=1, dim2=2).transpose(1, 2)",
        "diagonal-of-pairs": "({x}[:, :, None] + {x}[:, None]).diagonal(dim1=1, dim2=2).transpose(1, 2)",
        "interleaved": "torch.stack([{x}, {x} @ Q], 2).flatten(1, 2)[:, 1::2]",
        "packed-by-hand": "torch.zeros(B, N, D).masked_scatter({v}[..., None], {x}[{v}] @ Q)",
        "packed-and-put-back": "torch.zeros(B, N, D).index_put({v}.nonzero(as_tuple=True), {x}[{v}] @ Q)",
        "written-where-valid": "{x}.masked_scatter({v}[..., None], {x}[{v}].tanh())",
        "float-norm": "F.layer_norm({x}.float(), (D,), gain.float(), off.float(), 1e-3).double()",
        "bfloat16": "({x}.bfloat16() @ Q.bfloat16()).double() * 0.1 + {x}",
        "shared-weight": "({x} @ Q) @ Q.T",
        "embedding-as-weight": "({x} @ E.T).softmax(-1) @ E",
        "where-valid": "torch.where({v}[..., None], {x} @ Q, {x})",
        "fill-then-use": "{x}.masked_fill(~{v}[..., None], 2.0) @ Q",
        "experts": "(torch.stack([{x} @ Q, {x} @ O], -1) * ({x} @ W[:, :2]).softmax(-1)[:, :, None]).sum(-1)",
        "argmax-features": "{x} * F.one_hot({x}.argmax(-1), D)",
        "unfold-features": "{x}.unfold(-1, 1, 1).squeeze(-1)",
        "bilinear": "torch.einsum('bnd,bne,de->bnd', {x}, {x}, Q)",
        "matmul-left": "(Q.T @ {x}.mT).mT",
        "divided-by-count": "{x} / {v}.sum().clamp(min=1)",
        "masked-by-self": "{x} * ({x}.sum(-1, keepdim=True) > 0)",
        "group-norm": "F.group_norm({x}.reshape(B * N, D), 1).view(B, N, D)",
        "median": "{x} - {x}.median(-1, keepdim=True).values",
        "positions": "{x} + {P}",
        "weights": "{x} * wts[..., None]",
        "baddbmm": "torch.baddbmm({x}, {x}, Q.expand(B, D, D), beta=0.5, alpha=2)",
        "addmm": "torch.addmm(off, {x}.flatten(0, 1), Q, beta=0.5, alpha=2.0).view(B, N, D)",
        "write-by-list": "torch.ops.aten.index_put({x}, [None, None, torch.tensor([0, -1])], {x}[..., [-1, 0]])",
        "write-slice": "{x}.slice_scatter({x}[..., :1] * 2, -1, D - 1, D)",
        "write-copy": "{x}.index_copy(-1, torch.tensor([0]), {x}[..., -1:])",
        "write-add": "{x}.index_add(-1, torch.arange(D), {x}, alpha=0.5)",
        "write-fill": "{x}.index_fill(-1, torch.tensor([0]), 0.5)",
        "write-ones": "{x}.select_scatter(torch.ones(B, N), 2, -1)",
        "write-reduce": "{x}.scatter_reduce(-1, (ids % D)[..., None].expand(B, N, D), {x}.tanh(), 'amax')",
        "pick-negative-list": "{x}[..., [-1, *range(D - 1)]]",
        "pick-negative-head": "{x} + {x}.unflatten(-1, (D, 1))[..., [-1], :].squeeze(-2)",
        "convolution-of-features": (
            "F.conv1d({x}.flatten(0, 1)[:, None], torch.stack([temp, one, temp])[None, None], padding=1)"
            "[:, 0].view(B, N, D)"
        ),
        "kth-feature": "{x} - {x}.kthvalue(1, -1, keepdim=True).values",
        "mode-feature": "{x} * {x}.detach().round().mode(-1, keepdim=True).values",
        "min-feature": "{x} - {x}.min(-1, keepdim=True)[0]",
        "cummax-features": "{x}.cummax(-1)[0] + {x}.cummin(-1).values",
        "cumprod-features": "(1 + {x}.tanh() * 0.5).cumprod(-1)",
        "logcumsumexp-features": "{x}.logcumsumexp(-1)",
        "argsort-features": "{x} * {x}.argsort(-1, descending=True)",
        "diff-features": "{x} + {x}.diff(dim=-1, prepend={x}[..., :1])",
        "buckets": "{x} * torch.bucketize({x}.detach(), torch.tensor([-0.5, 0.0, 0.5]), right=True)",
        "is-in": "{x} * torch.isin(ids, shared)[..., None]",
        "outer-product": "({x}[..., None] @ {x}[..., None, :]).sum(-1)",
        "heads-product": "({x}.view(B, N, -1, 1) @ ({x} @ Q).view(B, N, 1, -1)).mean(-1)",
        "candidates": "{x} + ((E[neg] @ {x}[..., None]).softmax(2) * E[neg]).sum(2)",
        "candidates-left": "{x} + (({x}[:, :, None] @ E[neg].mT).sigmoid() @ E[neg]).squeeze(2)",
        "candidates-shared": "{x} + ({x} @ E[shared].T).softmax(-1) @ E[shared]",
        "candidates-broadcast": "{x} + ({x}[:, :, None] * E[shared]).sum(-1).sigmoid() @ E[shared]",
        "candidate-of-sequence": "{x} * F.embedding(label, E2)[:, None]",
        "candidate-beside": (
            "torch.cat([{x}, F.embedding(label, E2)[:, None].expand(B, N, D), {x} * F.embedding(label, E2)[:, None]],"
            " -1) @ Win"
        ),
        "candidate-product": "{x} + torch.matmul({x}[:, :, None], F.embedding(label, E2)[:, None, :, None])[..., 0]",
        "experts-one-hot": (
            "torch.einsum('bne,bned->bnd', torch.zeros(B, N, 2).scatter(-1, ({x} @ W[:, :2]).topk(1, -1).indices, 1.0),"
            " torch.stack([{x} @ Q, {x} @ O], 2))"
        ),
        "picked-by-a-mask": "(lambda c: {x}.index_put((c,), ({x}[c] @ Q).tanh()))({x} @ w > 0)",
        "picked-and-centred": "(lambda c: {x}.index_put((c,), {x}[c] - {x}[c].mean(0)))({x} @ w > 0)",
        "picked-by-numbers": (
            "(lambda f: (lambda c: f.index_add(0, c, (f[c] @ Q).tanh()))(torch.where(f @ w > 0)[0]))"
            "({x}.reshape(B * N, D)).view(B, N, D)"
        ),
        "picked-among-two": (
            "(lambda f: (lambda c: f.index_put((c[0],), f[c[0]] * (f @ W)[c[0], c[1]][:, None], accumulate=True))"
            "(torch.where((f @ W)[:, :2] > 0)))({x}.reshape(B * N, D)).view(B, N, D)"
        ),
        "picked-and-numbered": (
            "(lambda f: (lambda c: f.index_add(0, c, f[c] * (c % 3)[:, None]))(torch.where(f @ w > 0)[0]))"
            "({x}.reshape(B * N, D)).view(B, N, D)"
        ),
        "expert-rows": (
            "torch.zeros(B * N, D).index_add(0, ({x} @ w > 0).flatten().nonzero().squeeze(1),"
            " {x}[{x} @ w > 0] @ Q).view(B, N, D) + {x}"
        ),
        "alive": "({x} @ Q) * {x}.abs().sum(-1, keepdim=True).sign()",
        "matrix-per-row": "({x}[:, :, None, None] @ Q.expand(B, N, 1, D, D)).flatten(2)",
        "matrix-per-column": "({x}.transpose(0, 1) @ Q.expand(N, D, D)).transpose(0, 1)",
        "matrix-per-sequence": "torch.bmm({x}, Q.repeat(B, 1, 1))",
        "matrix-per-head": "({x}[:, :, None, None] @ torch.stack([Q, O])).sum((2, 3))",
        "matrix-of-sequence": "{x} @ (F.embedding(label, E2)[:, :, None] * w)",
        "bits": "{x} + {x}.detach().view(torch.int64).view(torch.float64)",
        "rotary-complex": (
            "torch.view_as_real(torch.view_as_complex(torch.stack([{x}, {x} @ Q], -1)) * torch.polar(torch.ones(N, 1),"
            " torch.arange(N).double()[:, None]))[..., 0]"
        ),
        "fourier": "torch.fft.fft({x}, dim=-1).real",
        "argmin-features": "{x} * F.one_hot({x}.argmin(-1), D)",
        "count-features": "{x} * torch.count_nonzero({x} > 0, dim=-1)[..., None]",
        "nansum-features": "{x} + {x}.nansum(-1, keepdim=True)",
        "nanmedian-features": "{x} - {x}.nanmedian(-1, keepdim=True).values",
        "extremes": "{x} - torch.aminmax({x}, dim=-1, keepdim=True).min",
        "standardised": "({x} - torch.std_mean({x}, -1, keepdim=True)[1]) / (1 + {x}.std(-1, False, True))",
        "variance-and-mean": "{x} * torch.var_mean({x}, -1, unbiased=False, keepdim=True)[0] + 1",
        "on-a-diagonal": "torch.diag_embed({x}).sum(-1)",
        "repeated-edge": "F.pad({x}, (1, 0), mode='replicate')[..., :-1]",
    },
)
COMMON_ROWWISE = (
    "linear",
    "linear-function",
    "relu",
    "gelu",
    "silu",
    "layer-norm",
    "rms",
    "residual",
    "gate",
    "positions",
)

# (B, N, D) from {x} with rows moved or mixed; {v} says which count.
MOVE = slot(
    "move",
    {
        "flip": "{x}.flip(1)",
        "roll": "{x}.roll(1, 1)",
        "roll-back": "{x}.roll(-1, dims=1)",
        "roll-flat": "{x}.roll(D)",
        "shift-pad": "F.pad({x}, (0, 0, 1, 0))[:, :-1]",
        "shift-left": "F.pad({x}[:, 1:], (0, 0, 0, 1))",
        "shift-cat": "torch.cat([{x}[:, :1], {x}[:, :-1]], 1)",
        "index-select": "{x}.index_select(1, perm)",
        "fancy": "{x}[:, perm]",
        "take": "torch.take_along_dim({x}, pos[..., None], 1)",
        "gather": "{x}.gather(1, pos[..., None].expand(B, N, D))",
        "sorted-by-time": "{x}.gather(1, times.argsort(1)[..., None].expand(B, N, D))",
        "halves": "torch.cat([{x}[:, N // 2:], {x}[:, :N // 2]], 1)",
        "far-slice": "torch.cat([{x}[:, -50:], {x}[:, 50:]], 1)",
        "negative-slice": "F.pad({x}[:, -10:-1], (0, 0, 1, 0)) if N > 1 else {x}",
        "narrow": "torch.cat([{x}.narrow(1, 0, 1), {x}.narrow(1, 0, N - 1)], 1)",
        "stride": "{x}[:, ::2].repeat_interleave(2, 1)[:, :N]",
        "repeat": "{x}.repeat(1, 2, 1)[:, N // 2:N // 2 + N]",
        "unbind": "torch.stack({x}.unbind(1)[::-1], 1)",
        "neighbours": "{x} + F.pad({x}, (0, 0, 1, 0))[:, :-1] * 0.5",
        "convolution": "F.conv1d({x}.transpose(1, 2), Q[:, :, None], padding=0).transpose(1, 2)",
        "convolution-three": (
            "F.conv1d(F.pad({x}.transpose(1, 2), (2, 0)), torch.stack([Q, O, Kw], -1)).transpose(1, 2)"
        ),
        "other-sequence": "{x}.flip(0)",
        "other-sequence-roll": "{x} + {x}.roll(1, 0) * 0.5",
        "average-pool": "F.avg_pool1d(F.pad({x}.transpose(1, 2), (1, 0)), 2, 1).transpose(1, 2)",
        "index-add": "{x}.index_add(1, perm, {x} * 0.5)",
        "scatter": "torch.zeros(B, N, D).scatter(1, pos[..., None].expand(B, N, D), {x})",
        "diff": "{x}.diff(dim=1, prepend={x}[:, :1])",
        "swap-last": "torch.cat([{x}[:, :-1], {x}[:, :1]], 1)",
        "legacy-cat": "torch.cat([torch.tensor([]), {x}], 1)",
        "permuted-positions": "(({x} + {P}[perm]) * {v}[..., None]).index_select(1, perm)",
        "permuted-weights": "({x} * wts[:, perm][..., None] * {v}[..., None])[:, perm]",
        "sequences-as-rows": "{x}.transpose(0, 1).reshape(B, N, D)",
        "index-copy": "{x}.index_copy(1, perm[:1], {x}[:, :1])",
        "negative-both": "torch.cat([{x}[:, -1:], {x}[:, -N:-1]], 1)",
        "slice-beyond": "F.pad({x}[:, -2 * N:N - 1], (0, 0, 1, 0))",
        "step-three": "F.pad({x}[:, 1::3], (0, 0, 0, N - len(range(1, N, 3))))",
        "roll-far": "{x}.roll(N + 1, 1)",
        "roll-both": "{x}.roll((1, -1), (0, 1))",
        "flip-twice": "{x}.flip(1).roll(1, 1).flip(1)",
        "token-in-front": "torch.cat([w.expand(B, 1, D), {x}], 1)[:, 1:]",
        "token-shifts": "torch.cat([w.expand(B, 1, D), {x}], 1)[:, :-1]",
        "pad-both-ends": "F.pad({x}, (0, 0, 1, 1))[:, 2:]",
        "pad-negative": "F.pad({x}, (0, 0, -1, 1)) if N > 1 else {x}",
        "split": "torch.cat([*{x}.split(max(1, N // 2), 1)][::-1], 1)",
        "tensor-split": "torch.cat({x}.tensor_split(2, 1)[::-1], 1)",
        "unflatten-columns": "{x}.unflatten(1, (N // 2, 2)).flip(2).flatten(1, 2) if N % 2 == 0 else {x}",
        "transposed-squares": "{x}.mT.reshape(B, N, D)",
        "gather-reversed": "{x}.gather(1, (N - 1 - pos)[..., None].expand(B, N, D))",
        "fancy-both": "{x}[torch.arange(B)[:, None], pos]",
        "fancy-negative": "{x}[torch.arange(B)[:, None], pos - N]",
        "fancy-flat": "{x}.flatten(0, 1)[(torch.arange(B)[:, None] * N + pos).flatten()].view(B, N, D)",
        "sequences-permuted": "{x}[torch.arange(B - 1, -1, -1)]",
        "scatter-add": "torch.zeros(B, N, D).scatter_add(1, (pos // 2)[..., None].expand(B, N, D), {x})",
        "rotated": (
            "torch.cat([-{x}[..., D // 2:], {x}[..., :D // 2]], -1) * torch.arange(N)[:, None].double().cos() + {x}"
        ),
        "convolution-same": "F.conv1d({x}.mT, torch.stack([Q, O, Kw], -1), off, padding=1).mT",
        "convolution-dilated": "F.conv1d({x}.mT, torch.stack([Q, O, Kw], -1), padding=2, dilation=2).mT",
        "convolution-by-feature": (
            "F.conv1d(F.pad({x}.mT, (2, 0)), torch.stack([w, gain, off], -1)[:, None], groups=D).mT"
        ),
        "convolution-zeroed": "F.conv1d(({x} * {v}[..., None]).mT, torch.stack([Q, O, Kw], -1), padding='same').mT",
        "convolution-ahead": "F.conv1d(F.pad({x}.mT, (0, 1)), torch.stack([Q, O], -1)).mT",
        "convolution-two-dims": "F.conv2d(F.pad({x}[:, None], (0, 0, 1, 1)), Q[None, None, :3, :1]).squeeze(1)[:, :N]",
        "convolution-then-mask": (
            "F.conv1d({x}.mT, torch.stack([Q, O, Kw], -1), padding=1).mT.relu() * {v}[..., None] + {x}"
        ),
        "max-pool": "F.max_pool1d(F.pad({x}.mT, (1, 0)), 2, 1).mT",
        "split-ones": "torch.cat([*{x}.split(1, 1)][::-1], 1)",
        "split-sizes": "torch.cat({x}.split([N - 1, 1], 1)[::-1], 1)",
        "chunks": "torch.cat({x}.chunk(3, 1)[::-1], 1)",
        "chunk-each": "torch.cat({x}.chunk(N, 1)[1:] + {x}.chunk(N, 1)[:1], 1)",
        "select-each": "torch.stack([{x}.select(1, i) for i in range(N)][::-1], 1)",
        "permutation-undone": "{x}[:, perm.argsort()]",
        "permutation-inverted": "{x}[:, torch.zeros(N, dtype=torch.long).index_put((perm,), torch.arange(N))]",
        "unfold": "F.pad({x}, (0, 0, 1, 0)).unfold(1, 2, 1).sum(-1)",
        "columns": "F.unfold({x}.mT[..., None], (3, 1), padding=(1, 0)).view(B, D, 3, N).sum(2).mT",
        "convolution-strided": "F.conv1d({x}.mT, Q[..., None], stride=2).mT.repeat_interleave(2, 1)[:, :N]",
        "rows-written": "{x}.slice_scatter({x}[:, :1] * 2, 1, N - 1, N)",
        "row-written": "{x}.select_scatter({x}[:, 0] * 0.5, 1, -1)",
        "half-turn": "{x}.rot90(2, (1, 2))",
        "put-by-sequence-and-column": "{x}.index_put((torch.arange(B)[:, None], pos), {x}.tanh())",
        "any-row": "{x}[label[:, None] % B, pos]",
        "any-sequence": "{x}[label % B]",
        "scattered-over": "{x}.scatter(1, pos[:, :1, None].expand(B, 1, D), {x}[:, :1].tanh())",
        "written-by-mask": "{x}.masked_scatter({v}[..., None], {x} * 2)",
        "moved-dims": "{x}.movedim(1, 0).flip(0).movedim(0, 1)",
        "repeated-edge-row": "F.pad({x}.mT, (1, 0), mode='replicate').mT[:, :-1]",
        "reflected-rows": "F.pad({x}.mT, (1, 1), mode='reflect').mT[:, :N] if N > 2 else {x}",
        "circular-rows": "F.pad({x}.mT, (1, 0), mode='circular').mT[:, :-1]",
    },
)

# Over rows and back: (B, N, D).
SPREAD = slot(
    "spread",
    {
        "masked-mean": "{x} + ({x} * {n}[..., None]).sum(1, keepdim=True) / {n}.sum(1).clamp(min=1)[:, None, None]",
        "sum": "{x} + {x}.sum(1, keepdim=True) * 0.1",
        "mean": "{x} - {x}.mean(1, keepdim=True)",
        "masked-sum": "{x} + ({x} * {v}[..., None]).sum(1, keepdim=True) * 0.1",
        "max": "{x} + {x}.masked_fill(~{v}[..., None], -1e9).amax(1, keepdim=True)",
        "max-inf": "{x} * {x}.masked_fill(~{v}[..., None], float('-inf')).max(1, keepdim=True).values.sigmoid()",
        "cumsum": "({x} * {v}[..., None]).cumsum(1)",
        "cumsum-raw": "{x}.cumsum(1) * 0.2",
        "reverse-cumsum": "({x} * {v}[..., None]).flip(1).cumsum(1).flip(1)",
        "softmax": "{x} * {x}.masked_fill(~{v}[..., None], -1e9).softmax(1)",
        "softmax-raw": "{x} * {x}.softmax(1)",
        "logsumexp": "{x} - {x}.masked_fill(~{v}[..., None], float('-inf')).logsumexp(1, keepdim=True).clamp(min=-9)",
        "variance": "{x} / ({x}.var(1, keepdim=True, unbiased=False) + 1)",
        "masked-variance": "{x} / (({x} * {v}[..., None]).var(1, keepdim=True, unbiased=False) + 1)",
        "norm-over-all": "{x} / ({x} * {v}[..., None]).norm().clamp(min=1)",
        "batch-mean": "{x} - {x}.mean((0, 1))",
        "over-sequences": "{x} - {x}.mean(0, keepdim=True)",
        "batch-norm": "F.batch_norm({x}.flatten(0, 1), None, None, training=True).view(B, N, D) if B * N > 1 else {x}",
        "layer-norm-rows": "F.layer_norm({x}, (N, D))",
        "count": "{x} * {v}.sum(1)[:, None, None]",
        "rank": "{x} * {v}.cumsum(1)[..., None]",
        "last": "{x} + {x}[torch.arange(B), last][:, None]",
        "first": "{x} + {x}[:, :1]",
        "last-column": "{x} * {x}[:, -1:].sigmoid()",
        "cummax": "{x}.cummax(1).values",
        "row-matrix": "{x} + ({A} @ {x}) * 0.2",
        "transposed-linear": "{x} + ({x}.transpose(1, 2) @ {A}).transpose(1, 2) * 0.2",
        "masked-matrix": "{x} + ({A} * {v}[:, None, :]) @ {x} * 0.2",
        "prod": "{x} * (1 + {x} * {v}[..., None]).prod(1, keepdim=True).tanh()",
        "any": "{x} * ({x} > 1).any(1, keepdim=True)",
        "ema-buffer": "{x} - ema",
        "scatter-by-id": "{x} + torch.zeros(V, D).index_add(0, ids.flatten(), {x}.flatten(0, 1))[ids] * 0.1",
        "same-id-mean": "(ids[:, :, None] == ids[:, None, :]).double() @ ({x} * {v}[..., None]) * 0.2 + {x}",
        "cumsum-mean": "{x} + {x}.masked_fill(~{v}[..., None], 0.0).cumsum(1) / {v}.cumsum(1).clamp(min=1)[..., None]",
        "masked-deviation": (
            "{x} / (({x} * {n}[..., None]).square().sum(1, keepdim=True) / {n}.sum(1).clamp(min=1)[:, None, None] + "
            "1).sqrt()"
        ),
        "first-valid": "{x} + {x}[torch.arange(B), {v}.long().argmax(1)][:, None]",
        "total-of-batch": "{x} / ({x} * {v}[..., None]).sum().abs().clamp(min=1)",
        "linear-attention": "{x} + ({x} @ Q) @ ((({x} @ Kw) * {v}[..., None]).mT @ {x}) * 0.1",
        "linear-attention-softmax": (
            "{x} + ({x} @ Q).softmax(-1) @ (({x} @ Kw).masked_fill(~{v}[..., None], -1e9).softmax(1).mT @ {x})"
        ),
        "latent-queries": (
            "{x} + ((E[:2] @ {x}.mT).masked_fill(~{v}[:, None], -1e9).softmax(-1) @ {x}).mean(1, keepdim=True)"
        ),
        "gram": "{x} + {x} @ (({x} * {n}[..., None]).mT @ {x}) * 0.05",
        "gru": "torch.gru({x}, torch.zeros(1, B, D), [Win, Win, Bin, Bin], True, 1, 0.0, False, False, True)[0]",
        "gru-zeroed": (
            "torch.gru({x} * {v}[..., None], torch.zeros(1, B, D), [Win, Win], False, 1, 0.0, False, False, True)[0]"
        ),
        "gru-both-ways": (
            "torch.gru({x}, torch.zeros(2, B, D), [Win, Win, Bin, Bin] * 2, True, 1, 0.0, False, True, "
            "True)[0].unflatten(-1, (2, D)).sum(-2)"
        ),
        "gru-layers": (
            "torch.gru({x}, torch.zeros(2, B, D), [Win, Win, Bin, Bin] * 2, True, 2, 0.0, False, False, True)[0]"
        ),
        "gru-time-first": (
            "torch.gru({x}.transpose(0, 1), torch.zeros(1, B, D), [Win, Win, Bin, Bin], True, 1, 0.0, False, False, "
            "False)[0].transpose(0, 1)"
        ),
        "gru-last": (
            "{x} + torch.gru({x}, torch.zeros(1, B, D), [Win, Win, Bin, Bin], True, 1, 0.0, False, False, True)[1]"
            ".transpose(0, 1)"
        ),
        "gru-from-label": (
            "torch.gru({x}, F.embedding(label, E2)[None], [Win, Win, Bin, Bin], True, 1, 0.0, False, False, True)[0]"
        ),
        "rnn": "torch.rnn_tanh({x}, torch.zeros(1, B, D), [Q, O, off, gain], True, 1, 0.0, False, False, True)[0]",
        "rnn-relu": "torch.rnn_relu({x}, torch.zeros(1, B, D), [Q, O * 0.3], False, 1, 0.0, False, False, True)[0]",
        "rnn-backwards": (
            "torch.rnn_tanh({x}.flip(1), torch.zeros(1, B, D), [Q, O, off, gain], True, 1, 0.0, False, False, "
            "True)[0].flip(1)"
        ),
        "lstm": (
            "torch.lstm({x}, [torch.zeros(1, B, D)] * 2, [torch.cat([Win, Q]), torch.cat([Win, O])], False, 1, 0.0,"
            " False, False, True)[0]"
        ),
        "lstm-zeroed": (
            "torch.lstm({x} * {v}[..., None], [torch.zeros(1, B, D)] * 2, [torch.cat([Win, Q]), torch.cat([Win, O])],"
            " False, 1, 0.0, False, False, True)[0] * {v}[..., None]"
        ),
        "right-if-zero": "{x} + (({x} @ w).sigmoid()[..., None] * {x}).sum(1, keepdim=True)",
        "right-if-zero-weights": "{x} + (wts[..., None] * {x}).sum(1, keepdim=True)",
        "weights-by-time": (
            "{x} + (torch.exp(-(times[:, :, None] - times[:, None, :]).abs() / 30.0) * {v}[:, None]) @ {x} * 0.1"
        ),
        "weights-by-distance": (
            "{x} + (rel[torch.arange(N)[:, None] - torch.arange(N) + N - 1].tril() * {v}[:, None]) @ {x} * 0.2"
        ),
        "weights-in-channels": (
            "torch.einsum('bnm,bmhd->bnhd', {A} * {v}[:, None], {x}.unflatten(-1, (D, 1))).flatten(2) + {x}"
        ),
        "triangle-of-weights": "{x} + {A}.tril() @ ({x} * {v}[..., None]) * 0.2",
        "weights-given": "{x} + pairsf @ {x} * 0.2",
        "weights-given-both-ways": "{x} + torch.cat([pairsf @ ({x} @ Q), pairsf.mT @ {x}], -1)[..., :D] * 0.2",
        "weights-given-from-behind": "{x} + ({x}.mT @ pairsf).mT * 0.2",
        "weights-given-masked": "{x} + pairsf.masked_fill(~{v}[:, None], 0.0).tril() @ {x} * 0.2",
        "weights-given-negative": "{x} + (pairsf - 0.5) @ ({x} * {v}[..., None]) * 0.2",
        "weights-given-and-learned": "{x} + (pairsf * {A} + pairsf) @ {x} * 0.2",
        "weights-of-positions": "{x} + torch.ones(N, N).tril() / torch.arange(1, N + 1)[:, None] @ {x} * 0.2",
        "weights-dropped": "{x} + F.dropout(pairsf, 0.0) @ {x} * 0.2",
        "piece": "{x} + {x}.chunk(3, 1)[-1][:, :1]",
        "piece-of-sizes": "{x} + {x}.split([1, N - 1], 1)[0]",
        "middle-row": "{x} * {x}[:, N // 2:N // 2 + 1].tanh()",
        "unbound-row": "{x} + {x}.unbind(1)[-1][:, None]",
        "selected-row": "{x} + {x}.select(1, N // 2)[:, None]",
        "narrowed-row": "{x} + {x}.narrow(1, N - 1, 1)",
        "min": "{x} + {x}.masked_fill(~{v}[..., None], 1e9).amin(1, keepdim=True).clamp(max=9)",
        "top-rows": (
            "{x} + {x}.gather(1, ({x} @ w).masked_fill(~{v}, -1e9).topk(1, 1).indices[..., None].expand(B, 1, D))"
        ),
        "whole-pool": "{x} + F.adaptive_max_pool1d({x}.mT, 1).mT",
        "cumprod": "(1 + {x}.tanh() * 0.3).cumprod(1)",
        "cummin": "{x}.cummin(1)[0]",
        "logcumsumexp": "{x}.logcumsumexp(1)",
        "sorted-rows": "{x}.masked_fill(~{v}[..., None], -3.0).sort(1).values",
        "running-mean": ("torch.where({v}[..., None], {x}, 0.0).cumsum(1) / torch.arange(1, N + 1)[:, None]"),
        "fourier-of-rows": "torch.fft.fft({x} * {v}[..., None], dim=1).real",
        "instance-norm": "F.instance_norm({x}.mT).mT if N > 1 else {x}",
        "norm-of-rows": "F.normalize({x} * {v}[..., None], dim=1)",
        "nansum": "{x} + ({x} * {v}[..., None]).nansum(1, keepdim=True) * 0.1",
        "second-softmax": "{x} * ({x} @ w).masked_fill(~{v}, -1e9).log_softmax(1).exp()[..., None]",
        "pool-weights": "{x} + (({x} @ w).masked_fill(~{v}, -1e9).softmax(1).unsqueeze(-1) * {x}).sum(1, keepdim=True)",
    },
)


def entry(g: Draw) -> str:
    text = g.word("entry", ENTRY, COMMON_ENTRY, 0.5)
    x = g.let("x", text.format(pad=g.sizes.pad, P=outer(g.columns("P"))))
    if g.chance(0.35) or g.forced("zeroed", "number"):
        x = zeroed(g, x, valid(g))
    return x


def zeroed(g: Draw, x: str, v: str) -> str:
    text = g.word("zeroed", ZEROED, ("times", "fill", "where", "times-unsqueeze"), 0.4)
    text = ZEROED["times"] if g.forced("number") else text
    n = number(g, v) if "{n}" in text else ""
    return g.let("x", text.format(x=x, v=v, n=n))


def rowwise(g: Draw, x: str, v: str) -> str:
    text = g.word("rowwise", ROWWISE, COMMON_ROWWISE, 0.7)
    return g.let("x", text.format(x=x, v=v, P=outer(g.columns("P"))))


def move(g: Draw, x: str, v: str) -> str:
    return g.let("x", g.word("move", MOVE).format(x=x, v=v, P=outer(g.columns("P"))))


def spread(g: Draw, x: str, v: str) -> str:
    text = g.word("spread", SPREAD, ("masked-mean", "masked-sum", "softmax", "cumsum", "pool-weights"), 0.6)
    n = number(g, v) if "{n}" in text else ""
    return g.let("x", text.format(x=x, v=v, n=n, A=outer(g.columns("A", 2))))
