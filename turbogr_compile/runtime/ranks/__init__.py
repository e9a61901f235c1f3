"""Processes that act as one: agreeing, reporting together, watching each other."""
