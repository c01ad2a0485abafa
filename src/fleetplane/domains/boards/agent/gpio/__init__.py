"""Lines of a GPIO chip: the contract in `port`, and the drivers that keep it."""
