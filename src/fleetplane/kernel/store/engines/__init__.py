"""Databases behind the store: one module set each, one contract for all."""
