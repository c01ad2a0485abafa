"""Boards: small single-board computers with pins, told what to drive and asked how they are.

The server side comes together in `domain`, the node side in `agent`; neither loads the other.
"""
