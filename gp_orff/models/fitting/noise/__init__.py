"""Starting values of the noise of readings along tracks."""
