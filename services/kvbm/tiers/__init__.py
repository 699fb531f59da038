"""What host memory and disk hold: what stays, what goes, what moves between the two."""
