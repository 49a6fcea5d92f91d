"""How hyperparameters are learned: starting values, coordinates, search and strategy."""
