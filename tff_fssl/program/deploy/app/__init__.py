"""A Flower app: copied as it is by `flower.write_app`, as package `fssl_app`."""
