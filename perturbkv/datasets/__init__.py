"""Where prompts come from: each file yields `Sample`s, `registry` names them. No torch here."""
