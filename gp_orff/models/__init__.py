"""The user interface: models, posteriors of fields, sample paths, comparisons."""
