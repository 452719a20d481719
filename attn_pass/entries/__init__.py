"""What people call: torch.compile backends, export, packages, `enabled`, `explain`; the original graph is kept."""
