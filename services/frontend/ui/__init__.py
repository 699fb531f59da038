"""The page at /ui: a view of the fleet that is made once a second, while a page is open."""
