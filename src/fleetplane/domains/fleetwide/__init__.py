"""What holds for every domain at once: `explain` and `freeze`, for the server's owner and over REST.

`server` declares it; this module stays empty so that nothing is loaded by mistake.
"""
