"""SGLang: tokens in, tokens out, by its `Engine`. Written against the sources of SGLang 0.5.23, and not run here."""
