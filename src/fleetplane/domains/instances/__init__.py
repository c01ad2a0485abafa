"""Instances: groups of machines that register, get certificates and files, and are replaced when they fail.

The server side comes together in `domain`, the node side in `agent`; neither loads the other.
"""
