"""Is a head hurt by how much goes or by what goes."""
