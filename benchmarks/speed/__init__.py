"""Time and memory, compared with other methods and with the operations that every method needs."""
