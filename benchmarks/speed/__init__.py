"""Seconds and memory, against other ways and against the work that no method avoids."""
