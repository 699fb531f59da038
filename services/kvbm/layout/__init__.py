"""One layout's blocks: carries out what tickets and tiers decide, and tells routers what can be found."""
