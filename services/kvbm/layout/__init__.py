"""One layout's block store: carries out what tickets and tiers decide, and reports to routers what can be found. May
import disk, pool, tickets and tiers."""
