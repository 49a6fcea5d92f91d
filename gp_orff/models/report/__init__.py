"""The report of a model: names of hyperparameters, standard errors, and the printed form."""
