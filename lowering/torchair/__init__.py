"""What the targets `ascend` and `ascend-sim` share: from an AOT graph to a GE graph by way of torchair."""
