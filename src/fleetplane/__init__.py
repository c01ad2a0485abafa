"""Fleetplane: one secure control plane for every machine that is not in front of you."""

from importlib.metadata import version

__version__ = version("fleetplane")
