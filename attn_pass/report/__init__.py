"""What was decided and why: the record of a site, the report as text, JSON and pages, and who sees it."""
