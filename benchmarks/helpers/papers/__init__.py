"""What the experiments of the papers share."""
