"""Linear layers: those that make queries, keys and values of one input, multiplied once; and the library that does."""
