"""The question `ablation`: what each ingredient of a method brings, and what restricted kept sets cost."""
