"""What a fit did, in numbers and words: names of hyperparameters, standard errors, the report."""
