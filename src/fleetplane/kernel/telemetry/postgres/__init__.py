"""Telemetry in PostgreSQL, shared by several servers: tables of a day each, written by COPY."""
