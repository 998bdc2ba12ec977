"""Tokenizers: read as they are, against a byte-level BPE written out here."""
