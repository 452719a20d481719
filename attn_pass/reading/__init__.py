"""From graph to description: what each node computes, element by element."""
