"""What a user holds: models, posteriors of fields, sample paths, comparisons."""
