"""Passes and analyses, one per file; the file's name is the pass's name. Loaded by name, on demand."""
