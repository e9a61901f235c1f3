"""What turbogr does to each of the models: which rows stay, and that sampling is one op.

python examples/explain_models.py [hstu|sasrec|fuxi]
"""

import sys

import torch

import turbogr_compile as turbogr
from turbogr_compile.training.models import LAYERS, Recommender

ITEMS, DIM, MAX_LEN = 1000, 64, 128


def main() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([128, 9, 30, 4, 17, 60, 12, 25])
    there = torch.arange(MAX_LEN) < lengths[:, None]
    ids = torch.where(there, torch.randint(1, ITEMS + 1, there.shape), 0)
    times = torch.randint(0, 3600, there.shape).cumsum(1)
    for name in sys.argv[1:] or LAYERS:
        model = Recommender([LAYERS[name](DIM, 2, MAX_LEN) for _ in range(2)], ITEMS, DIM, MAX_LEN)
        print(f"== {name}\n{turbogr.explain(model.loss, ids, times)}\n")


if __name__ == "__main__":
    main()
