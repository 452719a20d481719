"""What an attention is, free of any graph: index arithmetic, expressions, the description, its meaning."""
