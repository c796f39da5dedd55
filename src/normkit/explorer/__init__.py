"""The geometry of normalization as one interactive page that needs only a browser."""
