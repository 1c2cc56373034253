"""The questions `assumption` and `bound-tightness`: σ, θ, θ̂ and θ̂_relax (paper, figure 4 and Theorems 2 to 4)."""
