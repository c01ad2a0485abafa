"""Boards: single-board computers whose pins are driven and whose health is monitored.

The server side comes together in `domain`, the node side in `agent`; neither loads the other.
"""
