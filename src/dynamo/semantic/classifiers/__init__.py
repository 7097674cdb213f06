"""The fast classifiers: linear models over words, patterns with checksums, and rules; numpy alone."""
