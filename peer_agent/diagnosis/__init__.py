"""Checks of one node, over gathered facts; those of a cluster are in kvdir/diagnosis. Pure."""
