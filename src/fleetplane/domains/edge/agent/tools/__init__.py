"""What a daemon can do on its machine when it is asked to."""
