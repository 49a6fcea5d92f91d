"""The data sets and kernels of the record, the objective of each set, and times."""
