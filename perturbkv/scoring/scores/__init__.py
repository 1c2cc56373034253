"""The scores, one file each, named like the score with `_` for `-`; the folder is the list of scores."""
