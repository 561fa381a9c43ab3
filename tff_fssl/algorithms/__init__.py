"""One file an algorithm; the parts they are composed of; the registry."""
