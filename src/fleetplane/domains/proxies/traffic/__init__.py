"""What requests came to: lines of the access log, summaries of them, and reports of these."""
