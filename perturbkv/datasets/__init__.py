"""Where prompts come from: each file yields `Sample`s, `registry` names them. Stands beside models; imports no torch."""
