"""`turbogr bench`: what the README claims, measured on the machine at hand."""
