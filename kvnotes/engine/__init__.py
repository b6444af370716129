"""Engines: what runs plans on a loaded model; the only code that touches transformers."""
