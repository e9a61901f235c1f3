"""What the README's table measures, on the machine at hand."""
