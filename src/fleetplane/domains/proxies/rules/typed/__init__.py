"""What typed options may say, one module for each group. Pure."""
