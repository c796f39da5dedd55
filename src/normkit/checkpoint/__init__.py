"""Checkpoints: from a folder or a Hub id to a model, without ever running what lies in it."""
