"""The question `ablation`: gains of a method's ingredients, ranked methods, and costs of restricted kept sets."""
