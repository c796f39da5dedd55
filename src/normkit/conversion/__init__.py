"""Norms found by behaviour, verified number by number, and computed by normkit from then on; and back."""
