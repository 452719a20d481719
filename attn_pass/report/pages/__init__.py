"""The report as a page that loads nothing, comparisons, and what `attn_pass.inspect` writes."""
