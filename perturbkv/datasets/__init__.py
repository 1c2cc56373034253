"""Where prompts come from: each file yields `Sample`s, `dataset_registry` names them. No torch here."""
