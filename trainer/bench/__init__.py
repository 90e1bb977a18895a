"""Measurements that a person can repeat on their own machine."""
