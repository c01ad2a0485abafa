"""Telemetry in a file beside the store's."""
