"""Passes over chunks of data, here or on the workers of an executor: what chunks give is added.

    chunks  ->  tasks of a few chunks  ->  workers  ->  one sum, in the order of the chunks

`Work` is what is done with a chunk, `passes_on` says where, and `fold` does it.
"""
