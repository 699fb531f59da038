"""What host memory and disk hold: what stays, what is evicted, what moves between the two. Pure; imports no other
package of kvbm."""
