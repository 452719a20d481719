"""The decisions and their reasons: the record of a site, the report as text, JSON and HTML, and its observers."""
