"""What waits to be written, and in which order it is."""
