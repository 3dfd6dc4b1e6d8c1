"""Figures of speed and memory, measured as whole processes; never asserted in a timed test."""
