"""Generated data sets of many kinds, suitable kernels, and fits with a time limit."""
