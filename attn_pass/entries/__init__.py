"""The public functions: torch.compile backends, export, packages, `enabled`, `explain`, and the fallback."""
