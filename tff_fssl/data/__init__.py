"""Data: sources, partitions, clients' examples, augmentation."""
