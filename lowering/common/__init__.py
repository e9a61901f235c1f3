"""What several targets share."""
