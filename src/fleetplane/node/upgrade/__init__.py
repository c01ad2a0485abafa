"""An agent's own upgrade: download, verify, install beside the former version, try, keep or go back."""
