"""The rewriting of one graph: what is known of it, the decision for a site, its edit, the check of the edit."""
