"""RULER's tasks (Hsieh et al., 2024, https://arxiv.org/abs/2404.06654), generated and graded by lm-eval's own files."""
