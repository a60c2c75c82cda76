"""Training: examples, batches, objective, and the loop around them (a thin transformers.Trainer)."""
