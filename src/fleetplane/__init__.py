"""Fleetplane: one secure control plane for every machine that is not in front of you."""

__version__ = "0.1.0"
"""The build reads it here: asking the installed metadata would load two megabytes into every agent."""
