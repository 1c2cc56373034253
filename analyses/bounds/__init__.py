"""The questions `assumption` and `bound-tightness`: σ, θ, θ̂ and θ̂_relax (figure 4, Theorems 2 to 4)."""
