"""Optimizers of sharded tables: each rank updates the rows of its shard that were touched, and nothing else.

    rows = RowAdagrad(model, lr=0.1)
    dense = torch.optim.Adam(model.parameters())      # no table is among them
    ...
    loss.backward()
    average_gradients(model)
    dense.step(), rows.step()

All ranks call `step()`, after every backward, also one that looked nothing up. Each update equals that of torch's dense
optimizer on touched rows; rows that were not touched stay, which for SGD and Adagrad is what the dense ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import _torch
from ...errors import OptionError, TurbogrError
from ...kernels.row_adagrad import REALS, row_adagrad
from . import state as states
from .embedding import ShardedEmbedding
from .own import OwnEmbedding
from .table import RowGradient, Table, sharded_tables

Tables = nn.Module | Iterable[nn.Module]
Tabled = ShardedEmbedding | OwnEmbedding
CHUNK = 1 << 17  # numbers of rows that are updated at a time


class RowOptimizer(torch.optim.Optimizer):
    """Base: finds tables, takes their gradients, keeps state that is spread as they are."""

    def __init__(self, tables: Tables, defaults: dict[str, Any]) -> None:
        given = [tables] if isinstance(tables, nn.Module) else list(tables)
        found = [t for m in given for t in (sharded_tables(m) if isinstance(m, nn.Module) else [m])]
        if not found or not all(isinstance(t, ShardedEmbedding | OwnEmbedding) for t in found):
            text = "for tables with gradients of rows, and got none: shard(model, plan) first, or row_gradients(model)"
            raise OptionError(f"{type(self).__name__} is {text}")
        for name, value in defaults.items():
            if isinstance(value, (int, float)) and value < 0:
                raise OptionError(f"{type(self).__name__}: {name} must not be negative, got {value}")
        self.tables = {id(t.receipts): t for t in found}
        trained = [t for t in self.tables.values() if t.trained]
        if not trained:
            raise OptionError(f"{type(self).__name__}: all tables are frozen")
        super().__init__([t.receipts for t in trained], defaults)
        for t in trained:
            self.check(t)
            self.state[t.receipts] = {"step": 0, **self.begin(t.shard)}

    def check(self, table: Tabled) -> None:
        """Raises where this optimizer cannot take a table."""

    def begin(self, shard: Tensor) -> dict[str, Tensor]:
        """State of a table before the first step: of the size of its shard, or one number per row."""
        return {}

    def update(
        self, rows: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int, group: dict[str, Any]
    ) -> None:
        """Change rows, and the state of these rows, in place."""
        raise TypeError(f"{type(self).__name__} does not define update()")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for receipts in group["params"]:
                table = self.tables[id(receipts)]
                gradient, receipts.grad = receipts.grad, None
                self.state[receipts]["step"] += 1
                # Copies: the update may run beside the next step, when a schedule has changed the rate.
                apply = partial(self._apply, table.table, table.shard, dict(self.state[receipts]), dict(group))
                table.table.update(gradient, table.shard, apply)
        return loss

    def _apply(
        self, table: Table, shard: Tensor, state: dict[str, Any], group: dict[str, Any], found: RowGradient
    ) -> None:
        """Of rows of a table, and of its copy in FP16."""
        before = _torch.version_of(shard)
        self._change(shard, state, group, found)
        if table.half is not None:
            table.half.note(shard, found.rows, before)

    def _change(self, shard: Tensor, state: dict[str, Any], group: dict[str, Any], found: RowGradient) -> None:
        """So many rows at a time that all that is done to them happens in cache."""
        kept = {key: value for key, value in state.items() if key != "step"}
        wide = torch.float32 if shard.dtype in (torch.float16, torch.bfloat16) else shard.dtype
        some = max(1, CHUNK // max(shard.shape[1], 1))
        for names, values in zip(found.rows.split(some), found.values.split(some), strict=True):
            working = shard.index_select(0, names).to(wide)
            parts = {key: value.index_select(0, names) for key, value in kept.items()}
            self.update(working, values.to(wide), parts, state["step"], group)
            shard.index_copy_(0, names, working.to(shard.dtype))
            for key, value in kept.items():
                value.index_copy_(0, names, parts[key])

    def merge(self) -> None:
        """Between backwards of one step: gradients of rows that several have become one, in their memory too."""
        for table in self.tables.values():
            table.receipts.grad = table.table.merge(table.receipts.grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for table in self.tables.values():
            table.table.journal.clear()
            table.receipts.grad = None

    # --- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """By the names of tables; tensors are spread as the tables are, and load on another number of ranks."""
        found: dict[str, Any] = {}
        for table in self._trained():
            state = self.state[table.receipts]
            found[f"{table.name}.step"] = torch.tensor(state["step"])
            for key, value in self._tensors(table).items():
                found |= states.saved(table.table, table.mesh, value, f"{table.name}.{key}")
        options = {k: v for k, v in self.param_groups[0].items() if k != "params"}
        return {"state": found, "options": options}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        errors: list[str] = []
        entries = state_dict["state"]
        for table in self._trained():
            step = entries.get(f"{table.name}.step")
            if step is None:
                errors.append(f"nothing is stored for table {table.name!r}")
                continue
            self.state[table.receipts]["step"] = int(step)
            for key, value in self._tensors(table).items():
                name = f"{table.name}.{key}"
                found = states.find(table.table, entries, name, errors)
                if found is not None:
                    with torch.no_grad():
                        states.load(table.table, value, found, name, errors)
                elif value.shape[0]:
                    errors.append(f"{name} is not stored")
        if errors:
            raise TurbogrError(f"{type(self).__name__} cannot load this state:\n  " + "\n  ".join(errors))
        for group in self.param_groups:
            group.update(state_dict["options"])

    def _trained(self) -> list[Tabled]:
        for table in self.tables.values():
            table.table.settle()
        return [self.tables[id(r)] for group in self.param_groups for r in group["params"]]

    def _tensors(self, table: Tabled) -> dict[str, Tensor]:
        return {k: v for k, v in self.state[table.receipts].items() if k != "step"}


class RowSGD(RowOptimizer):
    """Stochastic gradient descent."""

    def __init__(self, tables: Tables, lr: float = 1e-2) -> None:
        super().__init__(tables, {"lr": lr})

    def update(self, rows: Tensor, gradient: Tensor, state: Any, step: int, group: dict[str, Any]) -> None:
        rows.add_(gradient, alpha=-group["lr"])


class RowAdagrad(RowOptimizer):
    """Adagrad, with a sum of squares for each number of the table."""

    def __init__(
        self, tables: Tables, lr: float = 1e-2, lr_decay: float = 0.0, eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
    ) -> None:  # fmt: skip
        self.initial = initial_accumulator_value
        super().__init__(tables, {"lr": lr, "lr_decay": lr_decay, "eps": eps})

    def begin(self, shard: Tensor) -> dict[str, Tensor]:
        return {"sum": torch.full_like(shard, self.initial, dtype=_wide(shard))}

    def update(self, rows: Tensor, gradient: Tensor, state: Any, step: int, group: dict[str, Any]) -> None:
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        state["sum"].addcmul_(gradient, gradient)
        rows.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"]), value=-rate)


class RowWiseAdagrad(RowOptimizer):
    """Adagrad, with one sum per row: of the mean square of the row's gradient."""

    def __init__(self, tables: Tables, lr: float = 1e-2, eps: float = 1e-10) -> None:
        super().__init__(tables, {"lr": lr, "eps": eps})

    def check(self, table: Tabled) -> None:
        if table.table.layout.pieces > 1:
            raise OptionError(
                f"RowWiseAdagrad needs whole rows, and no rank has those of table {table.name!r}, which is ColumnWise: "
                "use RowAdagrad for it, or place it RowWise"
            )

    def begin(self, shard: Tensor) -> dict[str, Tensor]:
        return {"sum": shard.new_zeros(shard.shape[0], dtype=_wide(shard))}

    def _apply(
        self, table: Table, shard: Tensor, state: dict[str, Any], group: dict[str, Any], found: RowGradient
    ) -> None:
        """In one visit of each row, where the table is as wide as its state."""
        if shard.dtype not in REALS or not shard.shape[1]:
            super()._apply(table, shard, state, group, found)
            return
        copy = None if table.half is None else table.half.current(shard)
        row_adagrad(shard, state["sum"], found.rows, found.values.to(shard.dtype), group["lr"], group["eps"], copy)
        if copy is not None:
            table.half.followed(shard)

    def update(self, rows: Tensor, gradient: Tensor, state: Any, step: int, group: dict[str, Any]) -> None:
        state["sum"].add_(gradient.square().mean(1))
        rows.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"])[:, None].expand_as(rows), value=-group["lr"])


class LazyAdam(RowOptimizer):
    """Adam whose moments change for touched rows only, as in `torch.optim.SparseAdam`; dense Adam moves all rows."""

    def __init__(
        self, tables: Tables, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        if not all(0 <= b < 1 for b in betas):
            raise OptionError(f"LazyAdam: betas are at least 0 and below 1, got {betas}")
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps})

    def begin(self, shard: Tensor) -> dict[str, Tensor]:
        return {key: torch.zeros_like(shard, dtype=_wide(shard)) for key in ("mean", "square")}

    def update(self, rows: Tensor, gradient: Tensor, state: Any, step: int, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].lerp_(gradient.square(), 1 - second)
        rate = group["lr"] * (1 - second**step) ** 0.5 / (1 - first**step)
        rows.addcdiv_(state["mean"], state["square"].sqrt().add_(group["eps"]), value=-rate)


def _wide(shard: Tensor) -> torch.dtype:
    return torch.float32 if shard.dtype in (torch.float16, torch.bfloat16) else shard.dtype
