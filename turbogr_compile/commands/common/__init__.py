"""What commands share: the model on the command line, signs of life, output."""
