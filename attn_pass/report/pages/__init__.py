"""The report as a self-contained HTML page, comparisons, and the folder that `attn_pass.inspect` writes."""
