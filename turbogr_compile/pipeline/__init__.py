"""Passes as values, their order, who runs and who watches them; the settings of a compilation."""
