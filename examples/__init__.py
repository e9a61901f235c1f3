"""Small programs that show how turbogr is used; each runs by itself."""
