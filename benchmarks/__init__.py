"""Measurements of the engine that take too long for a test."""
