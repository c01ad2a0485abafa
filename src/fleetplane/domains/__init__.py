"""One folder per domain. Domains never import each other."""
