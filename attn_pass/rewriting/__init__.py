"""One graph that is rewritten: what is known of it, what is decided for a site, its edit, and the check of that."""
