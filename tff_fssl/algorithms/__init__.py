"""The algorithms, one file each, the parts they share, and the registry."""
