"""The geometry of normalization as one interactive page that needs nothing but a browser."""
