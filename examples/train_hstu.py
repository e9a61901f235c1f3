"""A training loop of one's own around a plain padded model: `turbogr_compile.compile` is the only change.

python examples/train_hstu.py
"""

import tempfile

import torch

import turbogr_compile as turbogr
from turbogr_compile.training.data import Batches, generate, open_histories
from turbogr_compile.training.models import HSTULayer, Recommender

DIM, MAX_LEN, STEPS = 64, 128, 100


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        histories = open_histories(generate(folder, users=500, items=300, mean_length=30))
    batches = Batches(histories, batch=32, max_len=MAX_LEN)
    model = Recommender([HSTULayer(DIM, 2, MAX_LEN) for _ in range(2)], histories.catalogue, DIM, MAX_LEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_of = turbogr.compile(model.loss)  # padded in, packed inside

    stream = (next(batches) for _ in range(STEPS))
    for step, batch in enumerate(turbogr.ahead(stream), start=1):
        optimizer.zero_grad()
        loss = loss_of(batch["ids"], batch["times"])
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
