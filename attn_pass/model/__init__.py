"""What an attention is, independent of any graph: index arithmetic, expressions, the description, its meaning."""
