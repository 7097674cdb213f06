"""Engines that others make: each adapter translates, and computes nothing itself."""
