"""The norms of other people's libraries, one file per group of libraries that fit into one environment.

Each file has `PACKAGES`, whose versions are recorded, and `ROWS`. The versions are pinned in `requirements/GROUP.txt`.
"""
