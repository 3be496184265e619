"""Training on one rank of a mesh: micro-batches, outputs, optimizer, and what is saved."""
