"""The training of a client: batches, optimizers, the loop, its cost."""
