"""Tokens of those who act on the server: made, listed and revoked by whoever runs it.

`domain` declares it; this module stays empty so that nothing is loaded by mistake.
"""
