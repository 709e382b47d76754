"""Labeled images: dataset formats, decoding, transforms and batching."""
