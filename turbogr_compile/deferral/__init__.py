"""Outputs of a compiled model that wait for what is done with them; docs/deferral.md has the contract."""
