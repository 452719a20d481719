"""Where attention is: each finder yields sites, read or refused with a reason."""
