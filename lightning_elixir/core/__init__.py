"""Devices and collectives: imports nothing of ours."""
