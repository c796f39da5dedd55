"""The studies, one file each: claim, source, arms, fixed data, budget, numeric condition, charts."""
