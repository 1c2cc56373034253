"""The scores, a file each; a file's name is the score's with `_` for `-`, and the folder is the list of them."""
