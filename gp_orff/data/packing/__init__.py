"""Keys, columns and sums as plain values, for files and for other processes."""
