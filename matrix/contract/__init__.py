"""What liger_compat relies on in transformers, read from upstream's source: nothing of it is imported or run."""
