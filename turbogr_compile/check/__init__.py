"""Instruments that judge: invariants, numbers, expectations, which pass is to blame."""
