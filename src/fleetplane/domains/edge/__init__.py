"""Edge: daemons behind NAT on sealed bidirectional streams, and runs across fleets of them.

The server side comes together in `domain`, the node side in `agent`; neither loads the other.
"""
