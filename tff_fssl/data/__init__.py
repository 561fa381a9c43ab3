"""Data sets, partitions among clients, clients' examples and augmentation."""
