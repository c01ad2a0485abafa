"""Composition roots of the node side: what each `fleetplane agent` runs, and nothing of the others."""
