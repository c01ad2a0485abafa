"""What a release of the agents is: signed documents, and which wheels fit which machine. Pure."""
