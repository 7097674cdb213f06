"""Engines that others have made, behind the seam: an adapter translates, and decides nothing."""
