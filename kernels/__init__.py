"""Ops of the `turbogr` namespace: schema, fake, autograd, FLOP formula and implementations. Knows torch only."""
