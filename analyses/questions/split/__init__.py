"""The question `split`: is a head hurt by how much attention goes, or by what goes."""
