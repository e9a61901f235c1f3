"""Rows of padded batches: what is computed on them, and what of it must be."""
