"""Linear layers of one input that make the queries, keys and values of attentions: read, and multiplied once."""
