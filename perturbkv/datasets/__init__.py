"""Datasets: each module yields `Sample`s, `dataset_registry` lists them by name. No torch here."""
