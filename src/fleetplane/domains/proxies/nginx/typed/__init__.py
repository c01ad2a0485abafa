"""Typed options as NGINX spells them, one module for each group. Pure."""
