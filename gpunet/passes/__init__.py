"""Passes over the graph of a segment, one file each: functions from a list of nodes to a list of nodes."""
