"""A Flower app, which `flower.write_app` copies as the package `fssl_app`."""
