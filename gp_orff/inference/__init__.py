"""Evidence and posterior, given a kernel, data and noise."""
