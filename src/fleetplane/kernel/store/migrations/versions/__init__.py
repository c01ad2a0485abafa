"""One file per step, named by the revision it leads to."""
