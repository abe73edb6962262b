"""Meshwright: trains transformer language models across many devices, and plans, proves and explains how."""

__version__ = "0.1.0"
