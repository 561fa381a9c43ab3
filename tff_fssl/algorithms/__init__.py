"""All algorithms, one file or folder each, their shared parts, the registry."""
