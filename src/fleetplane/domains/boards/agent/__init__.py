"""The node side of boards: pins, buses and measurements of one machine."""
