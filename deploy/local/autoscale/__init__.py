"""`headrace autoscale`: how many workers a running fleet needs, and the orders that follow."""
